"""Ids name the same tasks on every machine: fingerprints of instruction, files and oracle.

A change here breaks every stored task id: it is a change of the suite, not of a test.
"""

from __future__ import annotations

import hashlib

import pytest

from clawgym_env.tasks.base import Task
from clawgym_env.tasks.builtin import BuiltinSuite

FINGERPRINTS = {
    "builtin/csv/1/train/00017": "c4cbf49cf69fa5a1",
    "builtin/rename/1/train/00017": "b1bc06c2b9b4f8be",
    "builtin/logs/1/train/00017": "baf03e1c180b3423",
    "builtin/config/1/train/00017": "957915ee3f9293c3",
    "builtin/script/1/train/00017": "fe76b40157082d03",
    "builtin/folder/1/train/00017": "ecba616c25f4f2ba",
    "builtin/count/1/train/00017": "ab991791560b9f29",
    "builtin/csv/2/train/00017": "016493c5c8809627",
    "builtin/rename/2/train/00017": "caf0fe587d2abe3c",
    "builtin/logs/2/train/00017": "da6285fd8c78a64f",
    "builtin/config/2/train/00017": "4279dbbf65b2d5be",
    "builtin/script/2/train/00017": "68042a34c469e872",
    "builtin/folder/2/train/00017": "4da476da31bc8122",
    "builtin/count/2/train/00017": "bf1d25bd4b4a2277",
    "builtin/csv/3/train/00017": "15fd29a74e5bfd0a",
    "builtin/rename/3/train/00017": "e98515998754fe8d",
    "builtin/logs/3/train/00017": "eb3efc766f84ea0c",
    "builtin/config/3/train/00017": "b9779694cec53d3b",
    "builtin/script/3/train/00017": "3410f07b4ccbf6c9",
    "builtin/folder/3/train/00017": "06a1ae4c687f3f34",
    "builtin/count/3/train/00017": "7a975e3aa0a10cfe",
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


SAMPLE = ["builtin/folder/1/test/35087", "builtin/count/1/test/28722", "builtin/script/1/test/80932"]
