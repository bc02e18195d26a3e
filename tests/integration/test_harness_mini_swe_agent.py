"""The real mini-swe-agent, held to what every harness must do, and to what only it does."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import pytest

from clawgym_env.harnesses import MiniSweAgentHarness, install
from clawgym_env.harnesses.mini_swe_agent import SHELL, SUBMIT
from clawgym_env.rollout import RolloutSettings
from clawgym_env.sandboxes import Limits, get_backend
from clawgym_env.types import Message, Status, TokenArray
from tests.conformance.harness_play import FREE_TASK, Play, Played, play, say
from tests.conformance.harness_suite import HarnessSuite


@pytest.fixture(scope="module", autouse=True)
def mini_folder() -> Path:
    return install.ensure("mini-swe-agent", print)


class TestMiniSweAgent(HarnessSuite):
    """The lean profile."""

    limit_s: ClassVar[float] = 40.0
    compacts: ClassVar[bool] = False
    runs_whole_calls: ClassVar[bool] = True

    def harness(self) -> MiniSweAgentHarness:
        return MiniSweAgentHarness()

    def trajectories(self, played: Played) -> int:
        """An answer that mini took out of the conversation is an end of its own in the tree."""
        return super().trajectories(played) - sum(not usable(r.reply) for r in played.rollout.records)


def usable(reply: Message) -> bool:
    """Whether mini keeps an answer."""
    calls = reply.tool_calls
    return bool(calls) and all(c.name == "bash" and "command" in c.arguments for c in calls)


SETTINGS = RolloutSettings(timeout_s=180.0, limits=Limits(wall_s=240.0))  # LiteLLM's import, on a busy machine
SUBMITTED = say("", SHELL.call(SUBMIT))


def played(*plays: Play, max_context: int = 131_072) -> dict[str, Played]:
    return asyncio.run(play(plays, get_backend("bubblewrap"), SETTINGS, max_context=max_context))


def test_lean_offers_a_shell_and_says_one_line_and_takes_any_task_as_it_is() -> None:
    task = replace(FREE_TASK, instruction="@given.txt --help: {{task}} \"größe\" \U0001f600\x85\u2028\t'\\x'\n=#x: y\n")
    (request,) = played(Play("r", MiniSweAgentHarness(), [SUBMITTED], task))["r"].requests
    assert [tool.name for tool in request.chat.tools] == ["bash"]
    assert [m.role for m in request.chat.messages] == ["system", "user"]
    assert request.chat.messages[0].content == (
        "Work on the user's task with the tools, in /workspace, until it is done. "
        "Then call bash with: echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
    )
    assert request.chat.messages[1].content == task.instruction
    assert len(request.prompt_ids) < 260


def test_results_are_short_and_say_what_went_wrong() -> None:
    harness = MiniSweAgentHarness(config={"environment": {"timeout": 1}})
    commands = ["true", "echo no; exit 3", "sleep 5", "head -c 30000 /dev/zero | tr '\\0' x"]
    answers = [*(say("", SHELL.call(c)) for c in commands), SUBMITTED]
    run = played(Play("r", harness, answers))["r"]
    empty, failed, slow, long = run.results
    assert (empty, failed) == ("(no output)", "exit code 3\nno\n"), run
    assert "timed out after 1 seconds" in slow, run
    assert long == f"{'x' * 5000}\n... 20000 characters left out ...\n{'x' * 5000}", run


def test_an_answer_that_it_cannot_use_is_taken_out_and_three_in_a_row_end_the_run() -> None:
    answers = [say("", SHELL.call("echo on > on.txt")), *(say(f"I wonder about {k}.") for k in range(3))]
    run = played(Play("r", MiniSweAgentHarness(), answers))["r"]
    assert (run.rollout.status, run.rollout.detail) == (Status.HARNESS_FAILED, "RepeatedFormatError"), run
    assert run.rollout.reward is not None and run.workspace["on.txt"] == b"on\n", run
    last = run.requests[-1].chat.messages
    assert [m.role for m in last] == ["system", "user", "assistant", "tool", "user", "user"]
    assert last[-1].content == (
        "No tool calls found in the response. Every response MUST include at least one tool call."
    )
    assert [r.call.segment for r in run.rollout.records] == [0] * 4, run
    assert run.rollout.ledger.dropped == {"dead leaf": sum(len(answers[k]) for k in (1, 2))}, run


def test_a_text_only_policy_needs_no_tool() -> None:
    def fenced(command: str) -> TokenArray:
        return say(f"On.\n```mswea_bash_command\n{command}\n```")

    answers = [fenced("echo on > on.txt"), say("What now?"), fenced(SUBMIT)]
    run = played(Play("r", MiniSweAgentHarness(text_only=True), answers))["r"]
    assert run.rollout.status is Status.COMPLETED, run
    assert run.workspace["on.txt"] == b"on\n", run
    assert [len(r.chat.tools) for r in run.requests] == [0, 0, 0]
    assert run.requests[0].chat.messages[0].content.endswith(SUBMIT)
    assert run.requests[2].chat.messages[-1].content == "Expected exactly 1 action, found 0."


def test_a_prompt_beyond_the_context_is_a_failure_with_a_reason() -> None:
    run = played(Play("r", MiniSweAgentHarness(), [SUBMITTED]), max_context=100)["r"]
    assert run.rollout.status is Status.NO_CALLS, run
    assert "context" in run.rollout.detail, run


def test_stock_runs_are_one_trajectory_and_share_their_first_prompt() -> None:
    answers = [*(say("", SHELL.call(f"echo {k}")) for k in range(5)), SUBMITTED]
    stock = MiniSweAgentHarness(profile="stock")
    twins = played(*(Play(name, stock, answers) for name in "ab"))
    first = [twins[name].requests[0] for name in "ab"]
    assert first[0].prompt_ids.tolist() == first[1].prompt_ids.tolist()
    assert "## Recommended Workflow" in first[0].chat.messages[1].content
    for run in twins.values():
        assert run.rollout.status is Status.COMPLETED, run
        assert [r.parent for r in run.rollout.records] == [None, *range(5)], run
        assert dict(run.rollout.ledger.dropped) == dict(run.rollout.ledger.notes) == {}, run
