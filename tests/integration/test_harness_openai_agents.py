"""An agent of the real OpenAI Agents SDK, held to what every harness must do; and agents of others."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar

import pytest

from clawgym_env.harnesses import OpenAIAgentsHarness, install
from clawgym_env.harnesses.base import Launch, Shell
from clawgym_env.rollout import RolloutSettings
from clawgym_env.sandboxes import Limits, get_backend
from clawgym_env.types import Status, ToolCall
from tests.conformance.harness_delegation import Delegation
from tests.conformance.harness_play import Play, Played, play, say
from tests.conformance.harness_suite import HarnessSuite


@pytest.fixture(scope="module", autouse=True)
def agents_folder() -> Path:
    return install.ensure("openai-agents", print)


def delegate(prompt: str) -> ToolCall:
    return ToolCall("delegate", {"input": prompt})


class TestOpenAIAgents(HarnessSuite):
    """Our agent, over the responses API."""

    limit_s: ClassVar[float] = 60.0
    compacts: ClassVar[bool] = False

    def harness(self) -> OpenAIAgentsHarness:
        return OpenAIAgentsHarness()

    def delegation(self) -> Delegation:
        return Delegation(OpenAIAgentsHarness(delegates=True), delegate)

    def idle_limits_s(self, launch: Launch) -> Mapping[str, float]:
        return {"whole answer": math.inf}


SETTINGS = RolloutSettings(timeout_s=90.0, limits=Limits(wall_s=120.0))
BASH = Shell().call
HANDS_OFF = """
import sys
from agents import Agent, Runner, function_tool

@function_tool
def write(text: str) -> str:
    \"\"\"Write a note.\"\"\"
    open("note.txt", "w").write(text)
    return "written"

writer = Agent(name="writer", instructions="You write notes.", tools=[write])
asker = Agent(name="asker", instructions="You hand everything to the writer.", handoffs=[writer])
print(Runner.run_sync(asker, sys.stdin.read()).final_output)
"""


def played(*plays: Play, max_context: int = 131_072) -> dict[str, Played]:
    return asyncio.run(play(plays, get_backend("bubblewrap"), SETTINGS, max_context=max_context))


def test_chat_completions_lose_the_thinking_and_nothing_else() -> None:
    answers = [
        say("Two.", BASH("echo one"), BASH("echo two > two.txt"), reasoning="First."),
        say("", ToolCall("no_such_tool", {})),
        say("Done."),
    ]
    run = played(Play("r", OpenAIAgentsHarness(wire="openai_chat"), answers))["r"]
    assert run.rollout.status is Status.COMPLETED, run
    assert [r.parent for r in run.rollout.records] == [None, 0, 1], run
    assert run.results[:2] == ["one\n", "(no output)"] and run.workspace["two.txt"] == b"two\n", run
    assert "no_such_tool" in run.results[2], run
    assert {*run.rollout.ledger.notes} == {"tolerated: dropped reasoning"}, run
    assert [m.content for m in run.requests[0].chat.messages] == [
        "Work on the user's task with the tools, in /workspace, until it is done.",
        "Do what has to be done.",
    ]


def test_a_script_of_the_user_s_is_run_as_it_is(tmp_path: Path) -> None:
    """One that hands the conversation over from one agent to another."""
    script = tmp_path / "hands off.py"
    script.write_text(HANDS_OFF)
    answers = [
        say("", ToolCall("transfer_to_writer", {})),
        say("", ToolCall("write", {"text": "on"})),
        say("Done."),
    ]
    run = played(Play("r", OpenAIAgentsHarness(agent=script), answers))["r"]
    assert run.rollout.status is Status.COMPLETED, run
    assert run.workspace["note.txt"] == b"on", run
    systems = [r.chat.messages[0].content for r in run.requests]
    assert systems == ["You hand everything to the writer.", "You write notes.", "You write notes."], run
    assert [(r.call.kind, r.parent) for r in run.rollout.records] == [("main", None), ("main", None), ("main", 1)], run
    assert run.rollout.ledger.dropped == {} and "request rendered from scratch" in run.rollout.ledger.notes, run


def test_a_prompt_beyond_the_context_is_a_failure_with_a_reason() -> None:
    run = played(Play("r", OpenAIAgentsHarness(), [say("Never.")]), max_context=100)["r"]
    assert run.rollout.status is Status.NO_CALLS, run
    assert "context" in run.rollout.detail, run
