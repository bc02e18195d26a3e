"""What the ends of harnesses written in Python mean, and which settings these take."""

from __future__ import annotations

from pathlib import Path

import pytest

from clawgym_env.errors import ConfigError
from clawgym_env.harnesses import (
    MiniSweAgentHarness,
    OpenAIAgentsHarness,
    OpenHandsHarness,
    SmolagentsHarness,
    get_harness,
)
from clawgym_env.harnesses.base import LaunchContext
from clawgym_env.harnesses.mini_swe_agent import SUBMIT
from clawgym_env.sandboxes.base import ExecResult

GAVE_UP = b"User:\n\nNo tool calls found.\n\nExit:\n\nRepeatedFormatError\n"


@pytest.mark.parametrize(
    ("end", "error"),
    [
        (ExecResult(0, b"Tool:\n\nan Exit: of it\n\nExit:\n\nsubmitted\n", b""), None),
        (ExecResult(0, b"", b"a warning\n"), None),
        (ExecResult(0, b"noise", b"", truncated=True), None),
        (ExecResult(0, GAVE_UP + b"Saved trajectory to ...\n", b""), "RepeatedFormatError"),
        (ExecResult(0, GAVE_UP.replace(b"RepeatedFormatError", b"LimitsExceeded"), b""), "LimitsExceeded"),
        (
            ExecResult(1, b"", b"Traceback\n  line\nOpenRouterAPIError: HTTP 400: no\n"),
            "OpenRouterAPIError: HTTP 400: no",
        ),
        (ExecResult(1, b"said\n", b" \n"), "mini-swe-agent ended with exit code 1 and said nothing"),
        (ExecResult(-9, GAVE_UP, b""), "mini-swe-agent was killed by signal 9"),
    ],
)
def test_mini_swe_agent(end: ExecResult, error: str | None) -> None:
    assert MiniSweAgentHarness().exit_error(end) == error


def test_mini_swe_agent_ends_by_its_submit_command() -> None:
    shell = MiniSweAgentHarness().info.shell
    assert shell is not None and shell.end == shell.call(SUBMIT)
    assert MiniSweAgentHarness(text_only=True).info.shell is None


@pytest.mark.parametrize(
    ("end", "error"),
    [
        (ExecResult(0, b"Done.\n", b"a warning\n"), None),
        (ExecResult(1, b"", b"Traceback\n  line\nValueError: no\n"), "ValueError: no"),
        (ExecResult(3, b"said\n", b""), "the agent ended with exit code 3 and said nothing"),
        (ExecResult(-11, b"", b""), "the agent was killed by signal 11"),
    ],
)
@pytest.mark.parametrize(
    "harness", [OpenAIAgentsHarness(), OpenHandsHarness(), SmolagentsHarness()], ids=lambda h: h.info.name
)
def test_agents_of_libraries(
    harness: OpenAIAgentsHarness | OpenHandsHarness | SmolagentsHarness, end: ExecResult, error: str | None
) -> None:
    assert harness.exit_error(end) == error


def test_openhands_is_told_of_one_model() -> None:
    context = LaunchContext("Do it.", "http://127.0.0.1:1/rollout/7", "key", "policy", 9_000, 512, 60.0)
    lean = OpenHandsHarness(llm={"max_message_chars": 99})._llm(context)
    stock = OpenHandsHarness(profile="stock")._llm(context)
    for told in lean, stock:
        assert (told["model"], told["base_url"]) == ("hosted_vllm/policy", "http://127.0.0.1:1/rollout/7/v1")
        assert told["max_output_tokens"] == 512 and told["num_retries"] == 1
    assert lean["max_message_chars"] == 99 and "max_input_tokens" not in lean
    assert stock["max_input_tokens"] == 9_000 - 512 and "model_canonical_name" not in stock


def test_agents_without_a_shell_say_so() -> None:
    assert OpenAIAgentsHarness(agent=Path("mine.py")).info.shell is None
    assert SmolagentsHarness(agent="code").info.shell is None


def test_a_script_that_is_not_there_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("clawgym_env.harnesses.install.require", lambda name: tmp_path)
    for missing in tmp_path, tmp_path / "no.py":  # a folder without a main script, and nothing at all
        with pytest.raises(ConfigError, match="is no script and has no __main__"):
            OpenAIAgentsHarness(agent=missing).mounts()


@pytest.mark.parametrize(
    ("name", "settings", "says"),
    [
        ("mini-swe-agent", {"profile": "large"}, "profile: Input should be 'lean' or 'stock'"),
        ("mini-swe-agent", {"wire": "openai_chat"}, "wire: Extra inputs are not permitted"),
        ("mini-swe-agent", {"config": "fast.yaml"}, "config: Input should be a valid"),
        ("openai-agents", {"wire": "gemini"}, "wire: Input should be 'openai_responses' or 'openai_chat'"),
        ("openai-agents", {"profile": "lean"}, "profile: Extra inputs are not permitted"),
        ("openhands", {"profile": "large"}, "profile: Input should be 'lean' or 'stock'"),
        ("openhands", {"terminal": "tmux"}, "terminal: Extra inputs are not permitted"),
        ("smolagents", {"agent": "mine.py"}, "agent: Input should be 'tool_calling' or 'code'"),
        ("smolagents", {"profile": "large"}, "profile: Input should be 'lean' or 'stock'"),
    ],
)
def test_settings_that_are_refused(name: str, settings: dict[str, object], says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        get_harness(name, **settings)
    assert says in str(caught.value)
