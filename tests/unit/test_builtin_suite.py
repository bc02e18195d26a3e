"""The builtin suite: ids, sampling, splits, and what its checks take for an equal answer."""

from __future__ import annotations

import asyncio
import dataclasses

import pytest

from clawgym_env.errors import ConfigError, SandboxError, TaskError, VerifierError
from clawgym_env.sandboxes.base import Sandbox
from clawgym_env.tasks.base import Snapshot, Suite, Task
from clawgym_env.tasks.builtin import BuiltinSuite, checks, demonstrate
from clawgym_env.tasks.builtin.family import SPLIT_SHARES
from clawgym_env.tasks.builtin.suite import FAMILIES, combinations
from clawgym_env.types import Reward

LEVELS = (1, 2, 3)


class _BrokenBox:
    """A fresh sandbox that cannot be had."""

    def __init__(self, files: Snapshot):
        pass

    async def __aenter__(self) -> Sandbox:
        raise SandboxError("no box")

    async def __aexit__(self, *exc: object) -> None:
        raise AssertionError("never entered")


def judged(task: Task, changes: dict[str, bytes]) -> Reward:
    """The verdict on the starting files with changes, where nothing needs to run."""
    return asyncio.run(task.verify({**task.files, **changes}, _BrokenBox))  # type: ignore[arg-type]


def tasks(family: str, level: int = 1, n: int = 20) -> list[Task]:
    return BuiltinSuite(level).sample("train", n, seed=5, families=[family])


def test_suite_is_a_suite() -> None:
    suite = BuiltinSuite()
    assert isinstance(suite, Suite)
    assert suite.name == "builtin"
    assert set(suite.families) == {"csv", "rename", "logs", "config", "script", "folder", "count"}


@pytest.mark.parametrize("level", LEVELS)
def test_ids_round_trip(level: int) -> None:
    suite = BuiltinSuite(level)
    for split in SPLIT_SHARES:
        for task in suite.sample(split, 21, seed=0):
            again = BuiltinSuite().get(task.id)
            assert task.id.startswith(f"builtin/{task.family}/{level}/{split}/")
            for name in ("id", "suite", "family", "instruction", "files", "oracle", "metadata"):
                assert getattr(again, name) == getattr(task, name)
            assert task.metadata == {"level": level, "split": split, "slots": task.metadata["slots"]}


@pytest.mark.parametrize("level", LEVELS)
def test_sampling_is_seeded_balanced_and_without_repeats(level: int) -> None:
    suite = BuiltinSuite(level)
    ids = [task.id for task in suite.sample("test", 70, seed=1)]
    assert ids == [task.id for task in suite.sample("test", 70, seed=1)]
    assert ids[:10] == [task.id for task in suite.sample("test", 10, seed=1)]
    assert ids != [task.id for task in suite.sample("test", 70, seed=2)]
    assert len(set(ids)) == 70
    assert {name: sum(f"/{name}/" in each for each in ids) for name in FAMILIES} == dict.fromkeys(FAMILIES, 10)
    assert {task.family for task in suite.sample("test", 6, seed=1, families=["csv", "logs"])} == {"csv", "logs"}


def test_combinations_come_back_only_after_all_others() -> None:
    pool = len(combinations("logs", 1, "validation"))
    drawn = [str(t.metadata["slots"]) for t in BuiltinSuite().sample("validation", 3 * pool, seed=0, families=["logs"])]
    for start in range(0, 3 * pool, pool):
        assert len(set(drawn[start : start + pool])) == pool


@pytest.mark.parametrize(
    "task_id",
    [
        "", "csv/1/train/00001", "builtin/csv/1/train/1", "builtin/csv/4/train/00001", "builtin/nope/1/train/00001",
        "builtin/csv/1/dev/00001", "builtin/csv/1/train/000001", "builtin/csv/1/train/00001\n",
        "builtin/csv/0/train/00001",
    ],
)  # fmt: skip
def test_unknown_ids_say_what_ids_look_like(task_id: str) -> None:
    with pytest.raises(TaskError, match="builtin/csv/1/train/00017"):
        BuiltinSuite().get(task_id)


def test_bad_requests_are_refused() -> None:
    with pytest.raises(TaskError, match="levels 1, 2 and 3"):
        BuiltinSuite(4)
    for split, n, families in (("dev", 1, None), ("train", -1, None), ("train", 1, ["nope"]), ("train", 1, [])):
        with pytest.raises(TaskError, match="splits are"):
            BuiltinSuite().sample(split, n, seed=0, families=families)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="skill"):
        demonstrate(tasks("csv")[0], 0, skill=1.5)
    with pytest.raises(TaskError):
        demonstrate(dataclasses.replace(tasks("csv")[0], id="other/1"), 0)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("level", LEVELS)
def test_splits_are_disjoint_and_every_word_is_trained(family: str, level: int) -> None:
    pools = {split: combinations(family, level, split) for split in SPLIT_SHARES}
    keys = {split: {tuple(slots.items()) for slots in pool} for split, pool in pools.items()}
    total = len(FAMILIES[family].levels[level - 1].combinations())
    assert sum(len(each) for each in keys.values()) == total == len(set().union(*keys.values()))
    assert all(keys.values())
    for name, choices in FAMILIES[family].levels[level - 1].space.items():
        assert {slots[name] for slots in pools["train"]} == set(choices)


def test_level_1_oracles_are_one_short_command() -> None:
    for task in BuiltinSuite(1).sample("train", 350, seed=0):
        (command,) = task.oracle
        assert len(command) < 90
        assert "\n" not in command


@pytest.mark.parametrize("level", (2, 3))
def test_harder_levels_need_more(level: int) -> None:
    for family in FAMILIES:
        easy, hard = tasks(family, 1)[0], tasks(family, level)[0]
        assert sum(map(len, hard.oracle)) > sum(map(len, easy.oracle))
        assert len(hard.instruction) > len(easy.instruction)


@pytest.mark.parametrize("level", LEVELS)
def test_instructions_vary_and_hold_their_slots(level: int) -> None:
    hidden = {"unit", "op", "order"}
    for family in FAMILIES:
        drawn = tasks(family, level, 40)
        for task in drawn:
            shown = [word for name, word in task.metadata["slots"].items() if name not in hidden]
            assert all(word in task.instruction for word in shown), task.instruction
            assert "{" not in task.instruction or family == "logs"
        templates = set()
        for task in drawn:
            text = task.instruction
            for word in sorted(task.metadata["slots"].values(), key=len, reverse=True):
                text = text.replace(word, "_")
            templates.add(text)
        assert len(templates) >= 2


def test_demonstrations_are_seeded_and_keep_their_shares() -> None:
    suite = BuiltinSuite()
    drawn = suite.sample("train", 700, seed=9)
    shown = [demonstrate(task, seed=1, skill=0.4) for task in drawn]
    assert shown == [demonstrate(task, seed=1, skill=0.4) for task in drawn]
    shares = {kind: sum(each.kind == kind for each in shown) / 700 for kind in ("right", "mistake", "talk")}
    assert shares["right"] == pytest.approx(0.4, abs=0.06)
    assert shares["mistake"] == pytest.approx(0.2, abs=0.06)
    assert shares["talk"] == pytest.approx(0.4, abs=0.06)
    assert all((each.tool_commands == ()) == (each.kind == "talk") for each in shown)
    assert {demonstrate(task, 0, skill=1.0).kind for task in drawn} == {"right"}
    assert "right" not in {demonstrate(task, 0, skill=0.0).kind for task in drawn}


def test_equal_numbers_pass_and_others_fail() -> None:
    assert checks.number_is("1,234.50\n", 1234.5)
    assert checks.number_is("  1.2345e3 ", 1234.5)
    assert checks.number_is("+7.00", 7)
    assert checks.number_is("33.33", 100 / 3)
    for text in ("", None, "seven", "7 rows", "7\n8", "12,34", "nan", "inf", "0x7", "7.02", "9" * 200, "\u0667"):
        assert not checks.number_is(text, 7)


def test_equal_json_passes_and_others_fail() -> None:
    expected = {"a": 3, "b": {"last": "x"}}
    assert checks.json_is({"b": {"last": "x"}, "a": 3.0}, expected)
    for value in (
        {"a": 3},
        {"a": "3", "b": {"last": "x"}},
        {**expected, "c": 1},
        {"a": True, "b": {"last": "x"}},
        [],
        3,
    ):
        assert not checks.json_is(value, expected)
    assert not checks.json_is(True, 1)
    deep = b"[" * 60_000
    for data in (deep, b"\xff{}", b"{", b"1" * 6000, b""):
        assert checks.json_of({"answer.json": data}, "answer.json") is None


def test_answers_written_in_another_way_pass() -> None:
    for task in tasks("logs"):
        level = str(task.metadata["slots"]["level"])
        log = task.files[f"{task.metadata['slots']['log']}.log"].decode()
        count = sum(f" {level} " in line for line in log.splitlines())
        for text in (f'{{\n  "{level}" : {count}.0\n}}', f'\ufeff{{"{level}":{count}}}\r\n'):
            assert judged(task, {"answer.json": text.encode()}).passed
        for text in (
            f'{{"{level}": {count + 1}}}',
            f'{{"{level.lower()}": {count}}}',
            f"{count}",
            f'{{"{level}": "{count}"}}',
        ):
            assert not judged(task, {"answer.json": text.encode()}).passed
    for task in tasks("config"):
        slots = task.metadata["slots"]
        path, key, value = f"{slots['config']}.conf", slots["key"], slots["value"]
        lines = [line for line in task.files[path].decode().splitlines() if not line.startswith(f"{key}=")]
        place = next(i for i, line in enumerate(task.files[path].decode().splitlines()) if line.startswith(f"{key}="))
        lines.insert(place, f"{key} = {value}")
        assert judged(task, {path: "\r\n".join(lines).encode()}).passed
        assert not judged(task, {path: task.files[path] + f"{key}={value}\n".encode()}).passed
        assert not judged(task, {path: "\n".join(lines[1:]).encode()}).passed


def test_spoiling_another_file_fails_and_costs_score() -> None:
    for task in tasks("csv"):
        slots = task.metadata["slots"]
        header, *rows = (line.split(",") for line in task.files[f"{slots['table']}.csv"].decode().splitlines())
        values = [float(row[header.index(slots["column"])]) for row in rows]
        answer = {"sum": sum(values), "mean": sum(values) / len(values), "max": max(values), "min": min(values)}
        right = f"{answer[slots['op']]:.4f}".encode()
        assert judged(task, {"answer.txt": right}) == Reward(1.0, True, {"answer": 1.0, "kept": 1.0}, "all parts hold")
        spoiled = judged(task, {"answer.txt": right, f"{slots['table']}.csv": b""})
        assert (spoiled.score, spoiled.passed, spoiled.parts["kept"]) == (0.5, False, 0.5)
        assert "kept" in spoiled.note


def test_a_sandbox_fault_is_a_verifier_error() -> None:
    with pytest.raises(VerifierError, match="no box"):
        judged(tasks("script")[0], {})


def test_a_missing_script_needs_no_sandbox() -> None:
    task = tasks("script")[0]
    files = {path: data for path, data in task.files.items() if not path.endswith(".sh")}
    assert asyncio.run(task.verify(files, _BrokenBox)).score == 0.0  # type: ignore[arg-type]
