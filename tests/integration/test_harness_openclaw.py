"""The real OpenClaw, held to what every harness must do, and to what only it does; a run is heavy, so they are few."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar

import pytest

from clawgym_env.harnesses import OpenClawHarness, install
from clawgym_env.harnesses.base import Launch
from clawgym_env.rollout import RolloutSettings
from clawgym_env.sandboxes import Limits, get_backend
from clawgym_env.types import Status, ToolCall
from tests.conformance.harness_delegation import Delegation
from tests.conformance.harness_play import RENDERER, Play, Played, play, say
from tests.conformance.harness_suite import HarnessSuite

LIMIT_S = 300.0  # on two busy cores; a run takes ten seconds on idle ones


@pytest.fixture(scope="module", autouse=True)
def openclaw_folder() -> Path:
    return install.ensure("openclaw", print)


class TestOpenClaw(HarnessSuite):
    """The lean profile over chat completions; its sub-agents with a gateway."""

    limit_s: ClassVar[float] = LIMIT_S
    concurrency: ClassVar[int] = 2
    repairs: ClassVar[bool] = False  # arguments that are no object are "malformed" to it, and end the run
    documented: ClassVar[Mapping[str, str]] = {
        "taken out of prompts": "the minute, the session and the machine, which it always writes",
    }
    small_context: ClassVar[int] = 4_000

    def harness(self) -> OpenClawHarness:
        return OpenClawHarness()

    def idle_limits_s(self, launch: Launch) -> Mapping[str, float]:
        (provider,) = json.loads(launch.files["~/.openclaw/openclaw.json"])["models"]["providers"].values()
        return {"idle": provider["timeoutSeconds"]}

    def delegation(self) -> Delegation:
        return Delegation(
            OpenClawHarness(mode="gateway"),
            lambda task: ToolCall("sessions_spawn", {"task": task}),
            lambda result: ToolCall("sessions_yield", {}),
        )


OTHERS: Mapping[str, OpenClawHarness] = {
    "responses": OpenClawHarness(wire="openai_responses"),
    "anthropic": OpenClawHarness(wire="anthropic_messages"),
    "stock": OpenClawHarness(profile="stock"),
}


@pytest.fixture(scope="module")
def others() -> dict[str, Played]:
    """One run of each other surface: thoughts, calls in parallel, a tool that is not there."""

    def exec_(command: str) -> ToolCall:
        return ToolCall("exec", {"command": command})

    answers = [
        say("", exec_("echo one | tee one.txt"), reasoning="First, one."),
        say("Two.", exec_("echo two"), exec_("echo three")),
        say("", ToolCall("no_such_tool", {"path": "x"})),
        say("Done."),
    ]
    settings = RolloutSettings(timeout_s=LIMIT_S, limits=Limits(wall_s=LIMIT_S + 30.0))
    plays = [Play(name, harness, answers) for name, harness in OTHERS.items()]
    return asyncio.run(play(plays, get_backend("bubblewrap"), settings, concurrency=2))


@pytest.mark.parametrize("name", OTHERS)
def test_every_surface_runs_and_loses_nothing(name: str, others: Mapping[str, Played]) -> None:
    played = others[name]
    ledger = played.rollout.ledger
    assert played.rollout.status is Status.COMPLETED, played
    assert played.workspace["one.txt"] == b"one\n", played
    assert len(played.rollout.records) == 4 and ledger.captured == ledger.trained, played
    assert [r.call.continues for r in played.rollout.records] == [None, 0, 1, 2], played
    assert {(r.call.kind, r.call.segment) for r in played.rollout.records} == {("main", 0)}, played


@pytest.mark.parametrize("name", ["responses", "anthropic"])
def test_lean_is_append_only_over_every_wire_and_tells_nothing_of_the_moment(
    name: str, others: Mapping[str, Played]
) -> None:
    played = others[name]
    assert [r.parent for r in played.rollout.records] == [None, 0, 1, 2], played
    dropped = any("reasoning" in note for note in played.rollout.ledger.notes)
    assert dropped == (name == "anthropic"), played
    first = RENDERER.decode(played.requests[0].prompt_ids)
    assert "Current date" not in first and "session=" not in first and "Linux" not in first, first
    assert [t.name for t in played.requests[0].chat.tools] == ["edit", "exec", "read", "write"]
    assert played.requests[0].chat.messages[-1].content == "Do what has to be done."


def test_stock_tells_the_moment_and_forks_at_every_call(others: Mapping[str, Played]) -> None:
    played = others["stock"]
    assert [r.parent for r in played.rollout.records] == [None] * 4, played
    first = played.requests[0].chat
    assert "Current date: " in first.messages[0].content and "<available_skills>" in first.messages[0].content
    assert "Runtime: agent=main | session=agent:main:" in first.messages[1].content
    assert "BEGIN_OPENCLAW_INTERNAL_CONTEXT" in first.messages[2].content
    assert {"read", "write", "edit", "exec", "process"} < {t.name for t in first.tools}
