"""The real Codex, held to what every harness must do, and to what only it does."""

from __future__ import annotations

import asyncio
import json
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar

import pytest

from clawgym_env.engines.base import EngineRequest
from clawgym_env.harnesses import CodexHarness, install
from clawgym_env.harnesses.base import Launch
from clawgym_env.rollout import RolloutSettings
from clawgym_env.sandboxes import Limits, get_backend
from clawgym_env.types import Status, TokenArray, ToolCall
from tests.conformance.harness_delegation import Delegation
from tests.conformance.harness_play import Play, play, say
from tests.conformance.harness_suite import HarnessSuite


@pytest.fixture(scope="module", autouse=True)
def codex_folder() -> Path:
    return install.ensure("codex", print)


def spawn(task: str) -> ToolCall:
    return ToolCall("multi_agent_v1__spawn_agent", {"message": task})


def wait(result: str) -> ToolCall:
    return ToolCall("multi_agent_v1__wait_agent", {"targets": [json.loads(result)["agent_id"]]})


class TestCodex(HarnessSuite):
    """The lean profile."""

    small_context: ClassVar[int] = 12_000

    def harness(self) -> CodexHarness:
        return CodexHarness()

    def delegation(self) -> Delegation:
        return Delegation(CodexHarness(profile="stock"), spawn, wait)

    def idle_limits_s(self, launch: Launch) -> Mapping[str, float]:
        (provider,) = tomllib.loads(launch.files["~/.codex/config.toml"].decode())["model_providers"].values()
        return {"idle": provider["stream_idle_timeout_ms"] / 1000}


SETTINGS = RolloutSettings(timeout_s=60.0, limits=Limits(wall_s=90.0))


def test_lean_offers_a_shell_and_says_one_line() -> None:
    played = asyncio.run(play([Play("r", CodexHarness(), [say("Done.")])], get_backend("bubblewrap"), SETTINGS))["r"]
    (request,) = played.requests
    assert {tool.name for tool in request.chat.tools} == {"exec_command", "write_stdin"}
    assert [m.role for m in request.chat.messages] == ["system", "user"]
    assert (
        request.chat.messages[0].content == "Work on the user's task with the tools, in /workspace, until it is done."
    )
    assert request.chat.messages[1].content == "Do what has to be done."
    assert dict(played.rollout.ledger.notes) == {}


def test_stock_runs_are_one_trajectory_and_share_their_first_prompt() -> None:
    answers = [*(say("", ToolCall("exec_command", {"cmd": f"echo {k}"})) for k in range(9)), say("Done.")]
    stock = CodexHarness(profile="stock")
    twins = asyncio.run(play([Play(n, stock, answers) for n in "ab"], get_backend("bubblewrap"), SETTINGS))
    first = [twins[name].requests[0] for name in "ab"]
    assert first[0].prompt_ids.tolist() == first[1].prompt_ids.tolist()
    assert len(first[0].chat.messages[0].content) > 10_000
    for played in twins.values():
        assert played.rollout.status is Status.COMPLETED, played
        assert [r.parent for r in played.rollout.records] == [None, *range(9)], played
        assert dict(played.rollout.ledger.dropped) == dict(played.rollout.ledger.notes) == {}, played


def test_two_sub_agents_at_once_are_told_apart() -> None:
    def script(asked: EngineRequest, turn: int) -> TokenArray:
        results = [m.content for m in asked.chat.messages if m.role == "tool"]
        for part in "one", "two":
            if any(f"PART {part}" in m.content for m in asked.chat.messages if m.role == "user"):
                steps = [
                    say("", ToolCall("exec_command", {"cmd": f"echo {part} > {part}.txt"})),
                    say(f"Part of {part}."),
                ]
                return steps[len(results)]
        if not results:
            return say("", spawn("PART one: write"), spawn("PART two: write"))
        waited = "".join(results[2:])
        left = [r for r in results[:2] if json.loads(r)["agent_id"] not in waited]
        return say("", wait(left[0])) if left else say("All is done.")

    stock = CodexHarness(profile="stock")
    played = asyncio.run(play([Play("r", stock, script)], get_backend("bubblewrap"), SETTINGS))["r"]
    assert played.rollout.status is Status.COMPLETED, played
    assert (played.workspace["one.txt"], played.workspace["two.txt"]) == (b"one\n", b"two\n"), played
    parts = [r.call for r in played.rollout.records if r.call.kind == "subagent"]
    assert len(parts) == 4 and len({c.agent for c in parts}) == 2, played
    assert {c.spawned_by for c in parts} == {0} and {c.confidence for c in parts} == {1.0}, played
    assert {r.call.agent for r in played.rollout.records if r.call.kind == "main"} == {"main"}, played
    inner = next(asked for asked in played.requests if "PART one" in asked.chat.messages[-1].content)
    assert not any("agent" in tool.name for tool in inner.chat.tools), "a sub-agent cannot start others"


def test_a_prompt_beyond_the_context_is_a_failure_with_a_reason() -> None:
    plays = [Play("r", CodexHarness(), [say("Never.")])]
    played = asyncio.run(play(plays, get_backend("bubblewrap"), SETTINGS, max_context=300))["r"]
    assert played.rollout.status is Status.NO_CALLS, played
    assert "context" in played.rollout.detail, played
