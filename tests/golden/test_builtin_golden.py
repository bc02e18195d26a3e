"""Ids name the same tasks on every machine: fingerprints of instruction, files and oracle.

A change here breaks every stored task id: it is a change of the suite, not of a test.
"""

from __future__ import annotations

import hashlib

import pytest

from clawgym_env.tasks.base import Task
from clawgym_env.tasks.builtin import BuiltinSuite

FINGERPRINTS = {
    "builtin/csv/1/train/00017": "6c47788aa2b53c08",
    "builtin/rename/1/train/00017": "a8943bb5e8636c9d",
    "builtin/logs/1/train/00017": "e03c6f6b399324ae",
    "builtin/config/1/train/00017": "33d40a5840a4a6de",
    "builtin/script/1/train/00017": "efb170dc7fb8655a",
    "builtin/folder/1/train/00017": "73caab2024ba8164",
    "builtin/count/1/train/00017": "d665fd0675df99cb",
    "builtin/csv/2/train/00017": "016493c5c8809627",
    "builtin/rename/2/train/00017": "caf0fe587d2abe3c",
    "builtin/logs/2/train/00017": "cbc1a483c475ff0a",
    "builtin/config/2/train/00017": "4acae865b4a91968",
    "builtin/script/2/train/00017": "1f9a70d64d961e97",
    "builtin/folder/2/train/00017": "a196809a72745337",
    "builtin/count/2/train/00017": "90471d0fd7d76d20",
    "builtin/csv/3/train/00017": "15fd29a74e5bfd0a",
    "builtin/rename/3/train/00017": "e98515998754fe8d",
    "builtin/logs/3/train/00017": "63ab87e78eebba0c",
    "builtin/config/3/train/00017": "57e0d8011591cb8a",
    "builtin/script/3/train/00017": "161d59b492eb0939",
    "builtin/folder/3/train/00017": "06a1ae4c687f3f34",
    "builtin/count/3/train/00017": "fad5415984ee643f",
}


def fingerprint(task: Task) -> str:
    digest = hashlib.sha256(task.instruction.encode())
    for path in sorted(task.files):
        digest.update(path.encode() + b"\0" + task.files[path] + b"\0")
    digest.update("\n".join(task.oracle).encode())
    return digest.hexdigest()[:16]


@pytest.mark.parametrize("task_id", FINGERPRINTS)
def test_id_names_the_same_task(task_id: str) -> None:
    assert fingerprint(BuiltinSuite().get(task_id)) == FINGERPRINTS[task_id]


def test_sample_names_the_same_tasks() -> None:
    assert [task.id for task in BuiltinSuite(1).sample("test", 3, seed=0)] == SAMPLE


SAMPLE = ["builtin/folder/1/test/94721", "builtin/count/1/test/12588", "builtin/script/1/test/33092"]
