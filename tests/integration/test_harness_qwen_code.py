"""The real Qwen Code, held to what every harness must do, and to what only it does."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar

import pytest

from clawgym_env.harnesses import QwenCodeHarness, install
from clawgym_env.harnesses.base import Launch
from clawgym_env.rollout import RolloutSettings
from clawgym_env.sandboxes import Limits, get_backend
from clawgym_env.types import Status, TokenArray, ToolCall
from tests.conformance.harness_delegation import Delegation
from tests.conformance.harness_play import Play, play, say
from tests.conformance.harness_suite import HarnessSuite

LIMIT_S = 120.0  # on a busy machine: the longest run has 30 calls


@pytest.fixture(scope="module", autouse=True)
def qwen_code_folder() -> Path:
    return install.ensure("qwen-code", print)


STOCK = QwenCodeHarness(profile="stock")


def spawn(task: str) -> ToolCall:
    arguments = {"description": "a part", "prompt": task, "subagent_type": "general-purpose"}
    return ToolCall("agent", {**arguments, "run_in_background": False})


class TestQwenCode(HarnessSuite):
    """The lean profile. It runs the whole calls of an answer that was cut short."""

    limit_s: ClassVar[float] = LIMIT_S
    concurrency: ClassVar[int] = 2
    documented: ClassVar[Mapping[str, str]] = {"taken out of prompts": "the day, which it always writes"}
    runs_whole_calls: ClassVar[bool] = True
    small_context: ClassVar[int] = 8_000

    def harness(self) -> QwenCodeHarness:
        return QwenCodeHarness()

    def printed(self, result: str) -> str:
        return result.partition("\nOutput: ")[2].rpartition("\nError: ")[0]

    def steps(self, *commands: str) -> list[TokenArray]:
        """Each command with a number: five calls with the same arguments end a run of Qwen Code."""
        return super().steps(*(f"{command}  # {k}" for k, command in enumerate(commands)))

    def delegation(self) -> Delegation:
        return Delegation(STOCK, spawn)

    def idle_limits_s(self, launch: Launch) -> Mapping[str, float]:
        config = json.loads(launch.files["~/.qwen/settings.json"])["model"]["generationConfig"]
        return {"whole answer": config["timeout"] / 1000, "idle": config["streamIdleTimeoutMs"] / 1000}


def test_each_profile_offers_what_it_says() -> None:
    settings = RolloutSettings(timeout_s=LIMIT_S, limits=Limits(wall_s=LIMIT_S + 30.0))
    shell = QwenCodeHarness().info.shell
    assert shell is not None
    answers = [*(say("", shell.call(f"echo {k}")) for k in range(3)), say("Done.")]
    plays = [Play("lean", QwenCodeHarness(), answers), Play("stock", STOCK, answers)]
    done = asyncio.run(play(plays, get_backend("bubblewrap"), settings, concurrency=2))
    for played in done.values():
        assert played.rollout.status is Status.COMPLETED, played
        assert [r.parent for r in played.rollout.records] == [None, 0, 1, 2], played
        assert dict(played.rollout.ledger.dropped) == {}, played
    lean, stock = (done[name].requests[0] for name in ("lean", "stock"))
    assert [t.name for t in lean.chat.tools] == ["edit", "read_file", "run_shell_command", "write_file"]
    assert {"agent", "glob", "grep_search", "run_shell_command", "tool_search"} < {t.name for t in stock.chat.tools}
    assert lean.chat.messages[0].content.startswith("Work on the user's task with the tools, in /workspace, until")
    assert lean.chat.messages[1].content.strip().endswith("</system-reminder>\nDo what has to be done.")
    assert "The current date is" not in lean.chat.messages[1].content
    assert "The current date is" in stock.chat.messages[1].content
    assert len(lean.prompt_ids) < 6_000 and len(stock.chat.messages[0].content) > 20_000
