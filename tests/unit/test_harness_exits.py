"""What harnesses' ends mean, which settings they take, and the environments that are named after them."""

from __future__ import annotations

import json

import gymnasium
import pytest

import clawgym_env
from clawgym_env.errors import ConfigError
from clawgym_env.harnesses import HARNESSES, ClaudeCodeHarness, CodexHarness, get_harness
from clawgym_env.sandboxes.base import ExecResult


def ended(rc: int = 0, *events: dict[str, object] | str, stderr: bytes = b"", truncated: bool = False) -> ExecResult:
    lines = [event if isinstance(event, str) else json.dumps(event) for event in events]
    return ExecResult(rc, "\n".join(lines).encode(), stderr, truncated=truncated)


def result(subtype: str = "success", is_error: bool = False, **more: object) -> dict[str, object]:
    return {"type": "result", "subtype": subtype, "is_error": is_error, **more}


@pytest.mark.parametrize(
    ("end", "error"),
    [
        (ended(0, result(result="All done.")), None),
        (ended(0, "noise", "[1]", result()), None),
        (ended(0), "Claude Code ended with exit code 0 and no result"),
        (ended(0, "{broken", truncated=True), None),
        (ended(1, "{broken", truncated=True), "{broken"),
        (ended(0, result(is_error=True, result="API Error: 400\nno")), "success: API Error: 400 no"),
        (ended(1, result(result="fine")), "success: fine"),
        (ended(1, result("error_max_turns", True)), "error_max_turns"),
        (ended(1, result("error_during_execution", True, errors=["one"])), "error_during_execution: ['one']"),
        (ended(2, stderr=b"first\nunknown option\n"), "unknown option"),
        (ended(-9, result()), "Claude Code was killed by signal 9"),
    ],
)
def test_claude_code(end: ExecResult, error: str | None) -> None:
    assert ClaudeCodeHarness().exit_error(end) == error


COMPLETED: dict[str, object] = {"type": "turn.completed", "usage": {}}
FAILED: dict[str, object] = {"type": "turn.failed", "error": {"message": "no\n such model"}}


@pytest.mark.parametrize(
    ("end", "error"),
    [
        (ended(0, {"type": "turn.started"}, COMPLETED), None),
        (ended(0, FAILED, COMPLETED), None),
        (ended(0, {"type": "error", "message": "a warning"}, "[]", "1", COMPLETED), None),
        (ended(0, {"type": "turn.started"}), "Codex ended with exit code 0 and no finished turn"),
        (ended(0, {"type": "turn.started"}, truncated=True), None),
        (ended(0, COMPLETED, FAILED), "no such model"),
        (ended(1, FAILED), "no such model"),
        (ended(1, {"type": "turn.failed", "error": "bare"}), "bare"),
        (ended(1, stderr=b"Error: bad config\n"), "Error: bad config"),
        (ended(1, COMPLETED), "Codex ended with exit code 1"),
        (ended(-11, COMPLETED), "Codex was killed by signal 11"),
    ],
)
def test_codex(end: ExecResult, error: str | None) -> None:
    assert CodexHarness().exit_error(end) == error


@pytest.mark.parametrize(
    ("name", "settings", "says"),
    [
        ("claude-code", {"profile": "large"}, "profile: Input should be 'lean' or 'stock'"),
        ("claude-code", {"tools": ("Bash", "Write")}, "the lean profile has no Write"),
        ("claude-code", {"max_turns": 0}, "max_turns: Input should be greater than or equal to 1"),
        ("claude-code", {"wire": "openai_chat"}, "wire: Extra inputs are not permitted"),
        ("codex", {"profile": "large"}, "profile: Input should be 'lean' or 'stock'"),
        ("codex", {"wire": "openai_chat"}, "wire: Extra inputs are not permitted"),
    ],
)
def test_settings_that_are_refused(name: str, settings: dict[str, object], says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        get_harness(name, **settings)
    assert says in str(caught.value)


def test_every_harness_is_an_environment() -> None:
    assert sorted([*clawgym_env.ENVIRONMENTS.values(), "scripted"]) == sorted(HARNESSES)
    for title, name in [*clawgym_env.ENVIRONMENTS.items(), ("Scripted", "scripted")]:
        for suffix in ("", "-Builtin"):
            assert gymnasium.spec(f"ClawGym/{title}{suffix}-v0").kwargs["harness"] == name
