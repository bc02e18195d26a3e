"""An agent of the real OpenHands SDK, held to what every harness must do, and to what only it does.

Its start costs nine CPU-seconds, so that this takes minutes: it runs where the SDK is installed (``clawgym harness
install openhands``).
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from typing import ClassVar

import pytest

from clawgym_env.errors import HarnessNotInstalled
from clawgym_env.harnesses import OpenHandsHarness, install
from clawgym_env.harnesses.base import Launch
from clawgym_env.harnesses.openhands import SHELL
from clawgym_env.rollout import RolloutSettings
from clawgym_env.sandboxes import Limits, get_backend
from clawgym_env.types import Status, ToolCall
from tests.conformance.harness_delegation import Delegation
from tests.conformance.harness_play import Play, Played, play, say
from tests.conformance.harness_suite import HarnessSuite


def missing() -> str:
    """Why the SDK is not here; empty where it is."""
    try:
        return "" if install.installed("openhands") else "the OpenHands SDK is not installed"
    except HarnessNotInstalled as error:  # there is no Python for it
        return str(error)


pytestmark = pytest.mark.skipif(bool(missing()), reason=missing())


def delegate(prompt: str) -> ToolCall:
    return ToolCall("task", {"prompt": prompt})


class TestOpenHands(HarnessSuite):
    """The lean profile."""

    limit_s: ClassVar[float] = 120.0
    runs_whole_calls: ClassVar[bool] = True

    def harness(self) -> OpenHandsHarness:
        return OpenHandsHarness()

    def printed(self, result: str) -> str:
        return result.partition("\n[The command completed with exit code ")[0]

    def delegation(self) -> Delegation:
        return Delegation(OpenHandsHarness(delegates=True), delegate)

    def idle_limits_s(self, launch: Launch) -> Mapping[str, float]:
        return {"whole answer": json.loads(launch.argv[-1])["llm"]["timeout"]}


SETTINGS = RolloutSettings(timeout_s=120.0, limits=Limits(wall_s=150.0))
BASH = SHELL.call


def played(*plays: Play, max_context: int = 131_072) -> dict[str, Played]:
    return asyncio.run(play(plays, get_backend("bubblewrap"), SETTINGS, max_context=max_context))


def test_lean_offers_two_tools_and_says_one_line() -> None:
    edit = ToolCall("file_editor", {"command": "create", "path": "/workspace/on.txt", "file_text": "on"})
    other_name = say("", ToolCall("bash", {"command": "echo other"}))
    answers = [other_name, say("", edit), say("", BASH("printf 'a\\nb'; false")), say("Done.")]
    run = played(Play("r", OpenHandsHarness(), answers))["r"]
    assert run.rollout.status is Status.COMPLETED, run
    assert {tool.name for tool in run.requests[0].chat.tools} == {"terminal", "file_editor"}
    assert [(m.role, m.content) for m in run.requests[0].chat.messages] == [
        ("system", "Work on the user's task with the tools, in /workspace, until it is done."),
        ("user", "Do what has to be done."),
    ]
    assert len(run.requests[0].prompt_ids) < 600
    assert run.workspace["on.txt"] == b"on", run
    assert run.results[0].startswith("other"), run
    assert run.results[2].startswith("a\nb") and "exit code 1" in run.results[2], run
    assert [r.parent for r in run.rollout.records] == [None, None, 1, 2], run  # a call of bash is told as terminal's
    assert {*run.rollout.ledger.notes} == {"request rendered from scratch"} and not run.rollout.ledger.dropped, run


def test_stock_runs_are_one_trajectory_and_keep_out_of_the_workspace() -> None:
    stock = OpenHandsHarness(profile="stock")
    answers = [
        say("", BASH("echo one; ls ~/.openhands"), reasoning="Look."),
        say("", ToolCall("think", {"thought": "Hm."})),
    ]
    plays = [Play(n, stock, [*answers, say("", ToolCall("finish", {"message": "Done."}))]) for n in "ab"]
    twins = played(*plays, Play("again", stock, [say("", BASH("echo again"))] * 9))
    stuck = twins.pop("again").rollout
    assert (stuck.status, stuck.detail) == (Status.HARNESS_FAILED, "the agent ended as stuck"), stuck
    first = [twins[name].requests[0] for name in "ab"]
    assert first[0].prompt_ids.tolist() == first[1].prompt_ids.tolist()
    assert len(first[0].chat.messages[0].content) > 5_000
    for run in twins.values():
        assert run.rollout.status is Status.COMPLETED, run
        assert [r.parent for r in run.rollout.records] == [None, 0, 1], run
        assert {*run.rollout.ledger.notes} == {"tolerated: dropped reasoning"}, run
        assert set(run.workspace) == {"given.txt"}, run


def test_a_prompt_beyond_the_context_is_a_failure_with_a_reason() -> None:
    run = played(Play("r", OpenHandsHarness(), [say("Never.")]), max_context=100)["r"]
    assert run.rollout.status is Status.NO_CALLS, run
    assert "context" in run.rollout.detail, run
