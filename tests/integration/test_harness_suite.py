"""The conformance suite itself: a third party's agent, described by settings alone, passes it; faults are noticed."""

from __future__ import annotations

import time
from pathlib import Path
from typing import ClassVar

import pytest

from clawgym_env.harnesses import CommandHarness, Harness
from clawgym_env.types import ToolCall
from tests.conformance.harness_delegation import Delegation
from tests.conformance.harness_play import Hung, Play, say
from tests.conformance.harness_suite import HarnessSuite

AGENT = Path(__file__).parents[1] / "agents" / "shell_agent.py"


def agent(fault: str = "") -> Harness:
    given = ["{openai_base_url}", "{api_key}", "{model}", "{max_tokens}"]
    argv = ("/usr/bin/python3", "-I", "-S", "{agent}", *given, *([fault] if fault else []))
    return CommandHarness(argv=argv, mounts={"agent": AGENT}, name="shell-agent")


class TestShellAgent(HarnessSuite):
    compacts: ClassVar[bool] = False

    def harness(self) -> Harness:
        return agent()


class Faulty(TestShellAgent):
    """The agent with one fault. Its tests are called by hand."""

    __test__ = False
    fault: ClassVar[str]

    def harness(self) -> Harness:
        return agent(self.fault)


def faulty(fault: str, limit_s: float = 20.0) -> Faulty:
    """A suite of its own for one fault."""
    return type("Faulty", (Faulty,), {"fault": fault, "limit_s": limit_s})()  # type: ignore[no-any-return]


def test_a_first_prompt_that_differs_is_noticed() -> None:
    suite = faulty("nonce")
    with pytest.raises(AssertionError, match="first prompts differ at character"):
        suite.test_runs_at_once_do_not_mix_and_share_their_first_prompt(suite.ordinary_runs())


def test_a_history_that_is_not_kept_is_noticed() -> None:
    suite = faulty("forgets")
    with pytest.raises(AssertionError, match="rendered from scratch"):
        suite.test_a_long_run_is_one_trajectory(suite.ordinary_runs())


def test_an_answer_that_is_thrown_away_is_noticed() -> None:
    suite = faulty("wastes")
    with pytest.raises(AssertionError, match="solver: completed"):
        suite.test_solves_a_task(suite.ordinary_runs())


def test_running_the_tools_of_a_truncated_answer_is_noticed() -> None:
    with pytest.raises(AssertionError, match="cut: completed"):
        faulty("trusts").test_truncated_answer_runs_no_tool()


def test_a_sub_agent_that_does_nothing_is_noticed() -> None:
    class Idle(Faulty):
        __test__ = False
        fault = ""

        def delegation(self) -> Delegation:
            return Delegation(self.harness(), lambda task: ToolCall("delegate", {"task": task}))

    with pytest.raises(AssertionError, match="delegating: completed"):
        Idle().test_sub_agents({})


def test_a_harness_that_hangs_fails_the_suite_in_time() -> None:
    suite, began = faulty("hangs", limit_s=1.5), time.monotonic()
    with pytest.raises(Hung, match="still running after"):
        suite.ordinary_runs()
    with pytest.raises(Hung):
        suite.test_a_refused_request_ends_the_run()
    with pytest.raises(pytest.fail.Exception, match="hung twice"):
        suite.play(Play("third", suite.harness(), [say("Done.")]))
    assert time.monotonic() - began < 20
    assert TestShellAgent._hung == 0
