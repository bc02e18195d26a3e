"""What OpenCode's ends mean, and what its settings change in its configuration."""

from __future__ import annotations

import json
from typing import Any

import pytest
from pydantic import ValidationError

from clawgym_env.harnesses import OpenCodeHarness, get_harness
from clawgym_env.sandboxes.base import ExecResult

FINISHED: dict[str, Any] = {"type": "step_finish", "part": {"reason": "stop"}}
FAILED: dict[str, Any] = {"type": "error", "error": {"name": "APIError", "data": {"message": "no\n such model"}}}


def ended(rc: int, *events: dict[str, Any] | str, stderr: bytes = b"", truncated: bool = False) -> ExecResult:
    lines = [event if isinstance(event, str) else json.dumps(event) for event in events]
    return ExecResult(rc, "\n".join(lines).encode(), stderr, truncated=truncated)


@pytest.mark.parametrize(
    ("end", "error"),
    [
        (ended(0, FINISHED), None),
        (ended(0, "noise", "[1]", FINISHED, "7"), None),
        (ended(0, FAILED, FINISHED), None),
        (ended(0, FINISHED, FAILED), "no such model"),
        (ended(1, FAILED), "no such model"),
        (ended(0, {"type": "error", "error": {"name": "UnknownError"}}), "UnknownError"),
        (ended(0, {"type": "error", "error": "torn"}), "torn"),
        (ended(0), "OpenCode ended with exit code 0 and no finished step"),
        (ended(0, "{broken", truncated=True), None),
        (ended(1, "{broken", truncated=True), "OpenCode ended with exit code 1 and no finished step"),
        (ended(1, FINISHED), "OpenCode ended with exit code 1"),
        (ended(2, stderr=b"first\nunknown option\n"), "unknown option"),
        (ended(-9, FINISHED), "OpenCode was killed by signal 9"),
    ],
)
def test_exit_error(end: ExecResult, error: str | None) -> None:
    assert OpenCodeHarness().exit_error(end) == error


def test_settings() -> None:
    assert get_harness("opencode", wire="anthropic_messages", profile="stock") == OpenCodeHarness(
        wire="anthropic_messages", profile="stock"
    )
    with pytest.raises(ValidationError):
        OpenCodeHarness.model_validate({"wire": "gemini"})


def test_only_lean_takes_the_day_out() -> None:
    said = "<env>\n  Platform: linux\n  Today's date: Tue Dec 01 2026\n</env>"
    (date,) = OpenCodeHarness().info.dialect.stabilise
    assert date.pattern.sub(date.replacement, said) == "<env>\n  Platform: linux\n</env>"
    assert OpenCodeHarness(profile="stock").info.dialect.stabilise == ()
