"""The real Claude Code, held to what every harness must do, and to what only it does.

It is proprietary, so nothing here installs it: whoever runs the tests has done that (``clawgym harness install
claude-code``), or they are left out.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping
from dataclasses import replace
from typing import ClassVar

import pytest

from clawgym_env.engines.base import EngineRequest
from clawgym_env.harnesses import ClaudeCodeHarness, Harness, install
from clawgym_env.harnesses.base import Launch
from clawgym_env.rollout import RolloutSettings
from clawgym_env.sandboxes import Limits, get_backend
from clawgym_env.types import Sampling, Status, TokenArray, ToolCall
from tests.conformance.harness_delegation import Delegation
from tests.conformance.harness_play import FREE_TASK, Play, play, say
from tests.conformance.harness_suite import HarnessSuite

pytestmark = pytest.mark.skipif(
    install.installed("claude-code") is None, reason="Claude Code is installed by its users' own command only"
)


class ClaudeCodeSuite(HarnessSuite):
    """Claude Code, whatever its profile.

    It asks for a summary with its tools on offer, and runs the whole calls of an answer that was cut short.
    """

    small_context: ClassVar[int] = 12_000

    def asks_for_summary(self, asked: EngineRequest) -> bool:
        return "summary" in asked.chat.messages[-1].content

    def thinking_harness(self) -> Harness:
        return self.harness().model_copy(update={"thinking": True})

    def harness(self) -> ClaudeCodeHarness:
        return ClaudeCodeHarness()

    def delegation(self) -> Delegation:
        return Delegation(STOCK, spawn)

    def idle_limits_s(self, launch: Launch) -> Mapping[str, float]:
        return {"whole answer": int(launch.env["API_TIMEOUT_MS"]) / 1000, "headers": 360.0, "bytes": math.inf}

    def test_truncated_answer_runs_no_tool(self) -> None:
        """Of two calls the second is cut: it is not run."""
        cut = say("", self.shell("echo ran > whole.txt"), self.shell("echo ran > cut.txt; " + "true; " * 200))
        sampling = Sampling(max_tokens=len(say("", self.shell("echo ran > whole.txt"))) + 20)
        plays = Play("cut", self.harness(), [cut, self.end()])
        played = self.play(plays, settings=replace(self.settings(), sampling=sampling))["cut"]
        assert played.rollout.records[0].call.finish_reason == "length", played
        assert set(played.workspace) == {"given.txt", "whole.txt"}, played
        self.check_clean(played)


class TestClaudeCode(ClaudeCodeSuite):
    """The lean profile."""


STOCK = ClaudeCodeHarness(profile="stock")
SETTINGS = RolloutSettings(timeout_s=60.0, limits=Limits(wall_s=90.0))


def bash(command: str) -> ToolCall:
    return ToolCall("Bash", {"command": command})


def spawn(prompt: str) -> ToolCall:
    return ToolCall("Agent", {"description": "a part", "prompt": prompt, "subagent_type": "general-purpose"})


def tells(asked: EngineRequest, text: str) -> bool:
    return any(text in m.content for m in asked.chat.messages if m.role == "user")


def test_stock_runs_are_one_trajectory_and_share_their_first_prompt() -> None:
    answers = [*(say("", bash(f"echo {k}")) for k in range(9)), say("Done.")]
    twins = asyncio.run(play([Play(n, STOCK, answers) for n in "ab"], get_backend("bubblewrap"), SETTINGS))
    first = [twins[name].requests[0] for name in "ab"]
    assert first[0].prompt_ids.tolist() == first[1].prompt_ids.tolist()
    assert {"Agent", "Bash", "Edit", "Read", "Write"} <= {tool.name for tool in first[0].chat.tools}
    for played in twins.values():
        assert played.rollout.status is Status.COMPLETED, played
        assert [r.parent for r in played.rollout.records] == [None, *range(9)], played
        assert dict(played.rollout.ledger.dropped) == {}, played
        assert dict(played.rollout.ledger.notes) == {}, played


def test_lean_offers_three_tools_and_takes_any_task_as_it_is() -> None:
    task = replace(FREE_TASK, instruction="@given.txt --help: write 'größe'\n/workspace !ls #x")
    plays = [Play("r", ClaudeCodeHarness(), [say("Done.")], task)]
    played = asyncio.run(play(plays, get_backend("bubblewrap"), SETTINGS))["r"]
    (request,) = played.requests
    assert [tool.name for tool in request.chat.tools] == ["Bash", "Edit", "Read"]
    assert [m.role for m in request.chat.messages] == ["system", "user"]
    assert request.chat.messages[1].content == task.instruction
    assert len(request.prompt_ids) < 1_500
    assert dict(played.rollout.ledger.notes) == {}


def test_settings_reach_it() -> None:
    harness = ClaudeCodeHarness(profile="stock", tools=("Bash", "Write"), system_prompt="BE KIND.")
    played = asyncio.run(play([Play("r", harness, [say("Done.")])], get_backend("bubblewrap"), SETTINGS))["r"]
    (request,) = played.requests
    assert [tool.name for tool in request.chat.tools] == ["Bash", "Write"]
    assert request.chat.messages[0].content.endswith("BE KIND.")


def test_its_own_limit_on_turns_is_a_failure_with_a_reason() -> None:
    plays = [Play("r", ClaudeCodeHarness(max_turns=2), [say("", bash("echo again"))])]
    played = asyncio.run(play(plays, get_backend("bubblewrap"), SETTINGS))["r"]
    assert played.rollout.status is Status.HARNESS_FAILED, played
    assert played.rollout.detail.startswith("error_max_turns"), played
    assert len(played.rollout.records) == 2, played


def test_sub_agents_are_told_apart_with_their_parents() -> None:
    """The main agent starts two at once, and the first of them starts another."""

    def script(asked: EngineRequest, turn: int) -> TokenArray:
        results = sum(m.role == "tool" for m in asked.chat.messages)
        if tells(asked, "PART-THREE") and not results:
            return say("Three is done.")
        if tells(asked, "PART-ONE"):
            return [say("", spawn("PART-THREE: say so")), say("One is done.")][results]
        if tells(asked, "PART-TWO"):
            return [say("", bash("echo two > two.txt")), say("Two is done.")][results]
        return say("", spawn("PART-ONE: delegate"), spawn("PART-TWO: write")) if not results else say("All done.")

    played = asyncio.run(play([Play("r", STOCK, script)], get_backend("bubblewrap"), SETTINGS))["r"]
    assert played.rollout.status is Status.COMPLETED, played
    assert played.workspace["two.txt"] == b"two\n", played
    calls = {str(r.messages[1].content if r.parent is None else ""): r for r in played.rollout.records}
    del calls[""]
    by_part = {part: r for text, r in calls.items() for part in ("ONE", "TWO", "THREE") if f"PART-{part}:" in text}
    main = [r for r in played.rollout.records if r.call.agent == "main"]
    assert [r.call.kind for r in main] == ["main", "main"], played
    assert {r.call.kind for r in by_part.values()} == {"subagent"}, played
    assert len({r.call.agent for r in by_part.values()}) == 3, played
    assert {r.call.confidence for r in played.rollout.records} == {1.0}, played
    assert by_part["ONE"].call.spawned_by == by_part["TWO"].call.spawned_by == main[0].call.call_id, played
    assert by_part["THREE"].call.spawned_by == by_part["ONE"].call.call_id, played
