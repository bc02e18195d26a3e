"""A demonstrator says the same thing to every harness in that harness's own words."""

from __future__ import annotations

import numpy as np
import pytest

from clawgym_env.engines.base import EngineRequest
from clawgym_env.errors import ConfigError
from clawgym_env.harnesses import HARNESSES, get_harness
from clawgym_env.harnesses.base import Shell
from clawgym_env.rendering import ChatRenderer
from clawgym_env.tasks.builtin import BuiltinSuite
from clawgym_env.types import ChatRequest, Message, Sampling, ToolCall, ToolSpec
from torchrl_ext.demos import Demonstrator, demonstration, shell_of

TASK = BuiltinSuite(1).get("builtin/count/1/train/00017")
SUBMIT = ToolCall("sh", {"cmd": "submit"})


def test_the_oracle_in_a_harness_s_own_words() -> None:
    plain = demonstration(TASK, Shell(), seed=0, skill=1.0)
    assert [m.tool_calls for m in plain] == [(ToolCall("bash", {"command": TASK.oracle[0]}),), ()]
    own = demonstration(TASK, Shell("sh", "cmd", {"why": "x"}, end=SUBMIT), seed=0, skill=1.0)
    assert [m.tool_calls for m in own] == [(ToolCall("sh", {"cmd": TASK.oracle[0], "why": "x"}),), (SUBMIT,)]
    assert plain[-1].content == own[-1].content == "Done."


def test_talk_ends_the_run_as_well() -> None:
    seed = next(s for s in range(100) if len(demonstration(TASK, Shell(), s, 0.0)) == 1)
    (said,) = demonstration(TASK, Shell("sh", "cmd", end=SUBMIT), seed, 0.0)
    assert said.content.startswith("Run: ") and said.tool_calls == (SUBMIT,)


def test_every_harness_says_how_it_is_worked_through() -> None:
    found = {name: get_harness(name).info.shell for name in HARNESSES}
    assert found["scripted"] is None
    assert found["codex"] == Shell("exec_command", "cmd") and found["claude-code"] == Shell("Bash")
    assert all(isinstance(shell, Shell) for name, shell in found.items() if name != "scripted")


def test_a_harness_without_a_shell_is_refused() -> None:
    with pytest.raises(ConfigError, match="'scripted' has no tool that runs commands"):
        shell_of(get_harness("scripted"))


def test_a_shell_is_a_typed_setting() -> None:
    harness = get_harness("command", argv=["x"], shell={"tool": "run", "argument": "line"})
    assert harness.info.shell == Shell("run", "line")
    with pytest.raises(ConfigError, match=r"shell.Shell.name: Unexpected|shell.name: "):
        get_harness("command", argv=["x"], shell={"name": "run"})


def test_requests_without_the_tool_count_for_no_turn() -> None:
    renderer = ChatRenderer.from_folder()
    answers = {
        "r": [Message("assistant", tool_calls=(ToolCall("bash", {"command": "ls"}),)), Message("assistant", "Bye")]
    }
    script = Demonstrator(renderer, {"r": Shell()}, answers)

    def ask(*tools: str) -> str:
        chat = ChatRequest("policy", (Message("user", "x"),), tuple(ToolSpec(name) for name in tools))
        request = EngineRequest(np.array([1]), Sampling(), renderer.stop_token_ids, chat, "r")
        return renderer.decode(script(request, 0))

    assert "Done." in ask()
    assert '"command": "ls"' in ask("read", "bash")
    assert "Done." in ask("read")
    assert "Bye" in ask("bash") and "Bye" in ask("bash")
