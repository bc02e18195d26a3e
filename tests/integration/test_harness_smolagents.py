"""An agent of the real smolagents, held to what every harness must do, and to what only it does."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar

import pytest

from clawgym_env.harnesses import SmolagentsHarness, install
from clawgym_env.harnesses.base import Launch
from clawgym_env.harnesses.smolagents import SHELL
from clawgym_env.rollout import RolloutSettings
from clawgym_env.sandboxes import Limits, get_backend
from clawgym_env.types import Status
from tests.conformance.harness_play import Play, Played, play, say
from tests.conformance.harness_suite import HarnessSuite


@pytest.fixture(scope="module", autouse=True)
def smolagents_folder() -> Path:
    return install.ensure("smolagents", print)


class TestSmolagents(HarnessSuite):
    """The agent that calls tools. Its calls are told as text: each is rendered from scratch."""

    limit_s: ClassVar[float] = 60.0
    compacts: ClassVar[bool] = False
    runs_whole_calls: ClassVar[bool] = True
    documented: ClassVar[Mapping[str, str]] = {
        "request rendered from scratch": "calls and their results are told as text of the library's own"
    }

    def harness(self) -> SmolagentsHarness:
        return SmolagentsHarness()

    def idle_limits_s(self, launch: Launch) -> Mapping[str, float]:
        return {"whole answer": math.inf}

    def results(self, played: Played) -> list[str]:
        """Results are lines of user messages."""
        told = (m.content for m in played.requests[-1].chat.messages if m.role == "user")
        return [line for text in told if text.startswith("Observation:\n") for line in text.split("\n")[1:]]

    def trajectories(self, played: Played) -> int:
        """Every answer with a call is an end of its own in the tree, and all of them train."""
        assert super().trajectories(played) == sum(bool(r.reply.tool_calls) for r in played.rollout.records), played
        assert played.rollout.ledger.dropped == {}, played
        return 1


SETTINGS = RolloutSettings(timeout_s=90.0, limits=Limits(wall_s=120.0))


def played(*plays: Play, max_context: int = 131_072) -> dict[str, Played]:
    return asyncio.run(play(plays, get_backend("bubblewrap"), SETTINGS, max_context=max_context))


def test_an_agent_that_writes_python() -> None:
    answers = [
        say("I look.\n<code>\nprint(bash('cat given.txt'))\n"),  # the stop sequence ends it
        say("No code."),
        say("<code>\nopen('x')\n</code>"),
        say("<code>\nbash('echo on > on.txt')\nfinal_answer('Done.')\n</code>"),
    ]
    run = played(Play("r", SmolagentsHarness(agent="code"), answers))["r"]
    assert run.rollout.status is Status.COMPLETED, run
    assert run.workspace["on.txt"] == b"on\n", run
    assert all(not r.chat.tools for r in run.requests)
    seen, refused, forbidden = (run.requests[k].chat.messages[-1].content for k in (1, 2, 3))
    assert "given\n" in seen and "regex pattern" in refused and "not among the explicitly allowed" in forbidden, run
    assert run.rollout.ledger.dropped == {}, run


def test_stock_runs_share_their_first_prompt_and_words_end_nothing() -> None:
    stock = SmolagentsHarness(profile="stock")
    answers = [say("I am done."), say("", *SHELL.last("").tool_calls)]
    twins = played(*(Play(name, stock, answers) for name in "ab"))
    first = [twins[name].requests[0] for name in "ab"]
    assert first[0].prompt_ids.tolist() == first[1].prompt_ids.tolist()
    assert len(first[0].chat.messages[0].content) > 3_000
    for run in twins.values():
        assert run.rollout.status is Status.COMPLETED, run
        assert len(run.rollout.records) == 2, run


def test_a_prompt_beyond_the_context_is_a_failure_with_a_reason() -> None:
    run = played(Play("r", SmolagentsHarness(), [say("Never.")]), max_context=100)["r"]
    assert run.rollout.status is Status.NO_CALLS, run
    assert "context" in run.rollout.detail, run
