"""Oracles, slips and tampering of every family and level, run in real sandboxes and judged as rollouts are."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import pytest

from clawgym_env.sandboxes import Sandbox, SandboxSpec, get_backend
from clawgym_env.tasks.base import Snapshot, Task
from clawgym_env.tasks.builtin import BuiltinSuite, demonstrate
from clawgym_env.tasks.builtin.suite import FAMILIES
from clawgym_env.types import Reward

BACKEND = get_backend("bubblewrap")
CASES = [(family, level) for family in FAMILIES for level in (1, 2, 3)]


@asynccontextmanager
async def fresh(files: Snapshot) -> AsyncIterator[Sandbox]:
    async with await BACKEND.create(SandboxSpec(files=files, network="none")) as sandbox:
        yield sandbox


async def after(files: Snapshot, commands: Sequence[str]) -> dict[str, bytes]:
    """The workspace after the commands, each in a shell of its own as a harness runs them."""
    async with fresh(files) as sandbox:
        for command in commands:
            await sandbox.exec(["bash", "-c", command], timeout_s=20)
        return await sandbox.collect()


async def outcome(task: Task, commands: Sequence[str]) -> Reward:
    return await task.verify(await after(task.files, commands), fresh)


def drawn(family: str, level: int, n: int) -> list[Task]:
    return BuiltinSuite(level).sample("test", n, seed=17, families=[family])


@pytest.mark.parametrize(("family", "level"), CASES)
def test_oracle_passes_and_untouched_scores_nothing(family: str, level: int) -> None:
    for task in drawn(family, level, 2):
        solved = asyncio.run(outcome(task, task.oracle))
        assert (solved.passed, solved.score) == (True, 1.0), (task.id, solved)
        idle = asyncio.run(outcome(task, ()))
        assert (idle.passed, idle.score) == (False, 0.0), (task.id, idle)


@pytest.mark.parametrize(("family", "level"), CASES)
def test_demonstrators_slips_and_talk_fail(family: str, level: int) -> None:
    """Each of the two slips, and talk, of a task."""
    task = drawn(family, level, 1)[0]
    shown = {demonstrate(task, seed, skill=0.5) for seed in range(60)}
    assert sorted(each.kind for each in shown) == ["mistake", "mistake", "right", "talk"]
    for each in shown:
        reward = asyncio.run(outcome(task, each.tool_commands))
        assert reward.passed == (each.kind == "right"), (task.id, each, reward)


@pytest.mark.parametrize(("family", "level"), CASES)
def test_right_answer_with_collateral_damage_fails(family: str, level: int) -> None:
    task = drawn(family, level, 1)[0]
    solved = asyncio.run(after(task.files, task.oracle))
    bystander = next(path for path in task.files if solved.get(path) == task.files[path] != b"")
    for damage in (f"rm '{bystander}'", f"echo >> '{bystander}'", f"mv '{bystander}' elsewhere"):
        reward = asyncio.run(outcome(task, (*task.oracle, damage)))
        assert not reward.passed, (task.id, damage)
        assert reward.parts["kept"] < 1.0


@pytest.mark.parametrize("family", ["csv", "logs", "count"])
def test_answer_in_the_wrong_file_or_form_fails(family: str) -> None:
    for task in drawn(family, 1, 2):
        name = "answer.json" if family == "logs" else "answer.txt"
        for spoil in (f"mv {name} result.txt", f"echo 1 >> {name}", f"sed -i 's/[0-9]/9&/' {name}", f": > {name}"):
            reward = asyncio.run(outcome(task, (*task.oracle, spoil)))
            assert not reward.passed, (task.id, spoil)


@pytest.mark.parametrize("family", ["rename", "folder"])
def test_right_names_with_wrong_contents_fail(family: str) -> None:
    for task in drawn(family, 1, 2):
        moved = next(iter(set(asyncio.run(after(task.files, task.oracle))) - set(task.files)))
        for spoil in (f"echo >> {moved}", f"rm {moved}", f"cp {moved} {next(iter(task.files))}"):
            reward = asyncio.run(outcome(task, (*task.oracle, spoil)))
            assert not reward.passed, (task.id, spoil)


@pytest.mark.parametrize("level", [1, 2])
def test_hard_coded_output_of_a_script_fails(level: int) -> None:
    """A script that prints what the right one prints on the visible data."""
    for task in drawn("script", level, 2):
        script = f"{task.metadata['slots']['script']}.sh"
        freeze = f"bash {script} > seen.txt && echo 'cat seen.txt' > {script}"
        reward = asyncio.run(outcome(task, (*task.oracle, freeze)))
        assert not reward.passed
        assert reward.parts["runs"] == 1.0


def test_stale_output_of_a_script_fails() -> None:
    task = drawn("script", 3, 1)[0]
    script = f"{task.metadata['slots']['script']}.sh"
    reward = asyncio.run(outcome(task, (*task.oracle, f"bash {script}", f"echo true > {script}")))
    assert not reward.passed


def test_another_way_to_fix_a_script_passes() -> None:
    task = drawn("script", 1, 1)[0]
    slots = task.metadata["slots"]
    code = f"s=open(p).read(); open(p, 'w').write(s.replace('{slots['wrong']}.csv', './{slots['table']}.csv'))"
    rewrite = f"python3 -c \"p='{slots['script']}.sh'; {code}\""
    link = f"ln -s {slots['table']}.csv {slots['wrong']}.csv"
    assert asyncio.run(outcome(task, (rewrite,))).passed
    assert not asyncio.run(outcome(task, (link,))).passed


def test_a_script_that_never_ends_scores_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("clawgym_env.tasks.builtin.checks.SCRIPT_TIMEOUT_S", 0.5)
    task = drawn("script", 1, 1)[0]
    loop = f"echo 'while true; do :; done' > {task.metadata['slots']['script']}.sh"
    reward = asyncio.run(outcome(task, (loop,)))
    assert (reward.score, reward.passed) == (0.0, False)
