"""The real nanobot, held to what every harness must do, and to what only it does."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar

import pytest

from clawgym_env.engines.base import EngineRequest
from clawgym_env.harnesses import NanobotHarness, install
from clawgym_env.harnesses.base import Launch
from clawgym_env.rollout import RolloutSettings
from clawgym_env.sandboxes import Limits, get_backend
from clawgym_env.types import Status, ToolCall
from tests.conformance.harness_delegation import Delegation
from tests.conformance.harness_play import Play, play, say
from tests.conformance.harness_suite import HarnessSuite

STOCK = NanobotHarness(profile="stock")


@pytest.fixture(scope="module", autouse=True)
def nanobot_folder() -> Path:
    return install.ensure("nanobot", print)


def spawn(task: str) -> ToolCall:
    return ToolCall("spawn", {"task": task})


class TestNanobot(HarnessSuite):
    """The lean profile."""

    limit_s: ClassVar[float] = 60.0
    concurrency: ClassVar[int] = 4
    documented: ClassVar[Mapping[str, str]] = {
        "the run's sampling settings": "nanobot asks for a temperature",
    }
    small_context: ClassVar[int] = 12_000  # it counts a token a byte, nearly

    def harness(self) -> NanobotHarness:
        return NanobotHarness()

    def printed(self, result: str) -> str:
        return result.removesuffix("\n\nExit code: 0")

    def asks_for_summary(self, asked: EngineRequest) -> bool:
        """With its tools on offer, of which a call is refused."""
        return "replacement checkpoint" in asked.chat.messages[-1].content

    def delegation(self) -> Delegation:
        return Delegation(STOCK, spawn)

    def idle_limits_s(self, launch: Launch) -> Mapping[str, float]:
        return {name: float(launch.env[f"NANOBOT_{name}_TIMEOUT_S"]) for name in ("STREAM_IDLE", "OPENAI_COMPAT")}


SETTINGS = RolloutSettings(timeout_s=60.0, limits=Limits(wall_s=90.0))


def test_lean_offers_four_tools_and_says_one_line() -> None:
    played = asyncio.run(play([Play("r", NanobotHarness(), [say("Done.")])], get_backend("bubblewrap"), SETTINGS))["r"]
    (request,) = played.requests
    assert {tool.name for tool in request.chat.tools} == {"exec", "read_file", "edit_file", "write_file"}
    assert [(m.role, m.content) for m in request.chat.messages] == [
        ("system", "Work on the user's task with the tools, in /workspace, until it is done."),
        ("user", "Do what has to be done."),
    ]


def test_stock_runs_are_one_trajectory_and_keep_out_of_the_workspace() -> None:
    answers = [*(say("", ToolCall("exec", {"command": f"echo {k}; ls ~/.nanobot/workspace"})) for k in range(9))]
    plays = [Play(n, STOCK, [*answers, say("Done.")]) for n in "ab"]
    twins = asyncio.run(play(plays, get_backend("bubblewrap"), SETTINGS))
    first = [twins[name].requests[0] for name in "ab"]
    assert first[0].prompt_ids.tolist() == first[1].prompt_ids.tolist()
    assert len(first[0].chat.messages[0].content) > 8_000
    assert "spawn" in {tool.name for tool in first[0].chat.tools}
    for played in twins.values():
        assert played.rollout.status is Status.COMPLETED, played
        assert [r.parent for r in played.rollout.records] == [None, *range(9)], played
        assert "SOUL.md" in played.results[0], played
        assert set(played.workspace) == {"given.txt"}, played


def test_a_prompt_beyond_the_context_is_a_failure_with_a_reason() -> None:
    plays = [Play("r", NanobotHarness(), [say("Never.")])]
    played = asyncio.run(play(plays, get_backend("bubblewrap"), SETTINGS, max_context=3000))["r"]
    assert played.rollout.status is Status.NO_CALLS, played
    assert "context" in played.rollout.detail, played
