"""The real Hermes, held to what every harness must do, and to what only it does.

Its start costs three CPU-seconds, so that this takes minutes: it runs where Hermes is installed (``clawgym harness
install hermes``), and is left out elsewhere.
"""

from __future__ import annotations

import asyncio
import json
import shlex
from collections.abc import Mapping
from typing import ClassVar, Literal

import pytest

from clawgym_env.harnesses import HermesHarness, install
from clawgym_env.harnesses.base import Launch
from clawgym_env.rollout import RolloutSettings
from clawgym_env.sandboxes import Limits, get_backend
from clawgym_env.types import Message, Status, ToolCall
from tests.conformance.harness_delegation import Delegation
from tests.conformance.harness_play import Play, Played, play, say
from tests.conformance.harness_suite import HarnessSuite

STOCK = HermesHarness(profile="stock")


pytestmark = pytest.mark.skipif(install.installed("hermes") is None, reason="Hermes is not installed")


def spawn(task: str) -> ToolCall:
    return ToolCall("delegate_task", {"goal": task})


def usable(reply: Message) -> bool:
    """Whether Hermes keeps an answer: arguments are an object, and the text is no broken call."""
    return all(isinstance(c.arguments, Mapping) for c in reply.tool_calls) and "<tool_call>" not in reply.content


class TestHermes(HarnessSuite):
    """The lean profile."""

    limit_s: ClassVar[float] = 90.0
    concurrency: ClassVar[int] = 3
    thinking: ClassVar[Literal["kept", "dropped"]] = "dropped"
    small_context: ClassVar[int] = 9_000

    def harness(self) -> HermesHarness:
        return HermesHarness()

    def printed(self, result: str) -> str:
        return str(json.loads(result)["output"])

    def shell(self, command: str) -> ToolCall:
        """It refuses commands that leave a process behind, where it can read that in them."""
        return super().shell(f"sh -c {shlex.quote(command)}" if "setsid" in command else command)

    def trajectories(self, played: Played) -> int:
        """An answer that it asks for anew is an end of its own in the tree."""
        asked_anew = [r.reply for r in played.rollout.records if not usable(r.reply)]
        return super().trajectories(played) - len(asked_anew)

    def delegation(self) -> Delegation:
        return Delegation(STOCK, spawn)

    def idle_limits_s(self, launch: Launch) -> Mapping[str, float]:
        names = ("HERMES_API_TIMEOUT", "HERMES_STREAM_READ_TIMEOUT", "HERMES_STREAM_STALE_TIMEOUT")
        return {name: float(launch.env[name]) for name in names}


SETTINGS = RolloutSettings(timeout_s=90.0, limits=Limits(wall_s=120.0))


def test_lean_offers_a_terminal_and_says_one_line() -> None:
    played = asyncio.run(play([Play("r", HermesHarness(), [say("Done.")])], get_backend("bubblewrap"), SETTINGS))["r"]
    (request,) = played.requests
    assert {tool.name for tool in request.chat.tools} == {"terminal", "process"}
    assert [(m.role, m.content) for m in request.chat.messages] == [
        ("system", "Work on the user's task with the tools, in /workspace, until it is done."),
        ("user", "Do what has to be done."),
    ]
    assert dict(played.rollout.ledger.notes) == {}


def test_stock_runs_are_one_trajectory_and_keep_out_of_the_workspace() -> None:
    answers = [*(say("", ToolCall("terminal", {"command": f"echo {k}"})) for k in range(5)), say("Done.")]
    twins = asyncio.run(play([Play(n, STOCK, answers) for n in "ab"], get_backend("bubblewrap"), SETTINGS))
    first = [twins[name].requests[0] for name in "ab"]
    assert first[0].prompt_ids.tolist() == first[1].prompt_ids.tolist()
    assert len(first[0].chat.messages[0].content) > 4_000
    assert {"delegate_task", "patch", "terminal"} <= {tool.name for tool in first[0].chat.tools}
    for played in twins.values():
        assert played.rollout.status is Status.COMPLETED, played
        assert [r.parent for r in played.rollout.records] == [None, *range(5)], played
        assert set(played.workspace) == {"given.txt"}, played


def test_a_refused_request_is_told() -> None:
    plays = [Play("r", HermesHarness(), [say("Never.")])]
    played = asyncio.run(play(plays, get_backend("bubblewrap"), SETTINGS, max_context=300))["r"]
    assert played.rollout.status is Status.NO_CALLS, played
    assert "context" in played.rollout.detail, played
