"""The real Codex, held to what every harness must do, and to what only it does."""

from __future__ import annotations

import asyncio
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar

import pytest

from clawgym_env.harnesses import CodexHarness, install
from clawgym_env.harnesses.base import Launch
from clawgym_env.rollout import RolloutSettings
from clawgym_env.sandboxes import Limits, get_backend
from clawgym_env.types import Status, ToolCall
from tests.conformance.harness_play import Play, play, say
from tests.conformance.harness_suite import HarnessSuite


@pytest.fixture(scope="module", autouse=True)
def codex_folder() -> Path:
    return install.ensure("codex", print)


class TestCodex(HarnessSuite):
    """The lean profile."""

    small_context: ClassVar[int] = 12_000

    def harness(self) -> CodexHarness:
        return CodexHarness()

    def shell(self, command: str) -> ToolCall:
        return ToolCall("exec_command", {"cmd": command})

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


def test_a_prompt_beyond_the_context_is_a_failure_with_a_reason() -> None:
    plays = [Play("r", CodexHarness(), [say("Never.")])]
    played = asyncio.run(play(plays, get_backend("bubblewrap"), SETTINGS, max_context=300))["r"]
    assert played.rollout.status is Status.NO_CALLS, played
    assert "context" in played.rollout.detail, played
