"""What the ends of Qwen Code mean, which settings it takes, and what it is told."""

from __future__ import annotations

import json

import pytest

from clawgym_env.errors import ConfigError
from clawgym_env.harnesses import QwenCodeHarness, get_harness
from clawgym_env.harnesses.base import LaunchContext
from clawgym_env.harnesses.qwen_code import OTHER_TOOLS, STEADY
from clawgym_env.sandboxes.base import ExecResult

CONTEXT = LaunchContext("Do it.", "http://127.0.0.1:1/rollout/7", "key", "policy", 9_000, 512, 60.0)


def ended(rc: int, *events: object, stderr: bytes = b"", truncated: bool = False) -> ExecResult:
    lines = [event if isinstance(event, str) else json.dumps(event) for event in events]
    return ExecResult(rc, "\n".join(lines).encode(), stderr, truncated=truncated)


DONE = {"type": "result", "subtype": "success", "is_error": False, "result": "Done."}
FAILED = {"type": "result", "subtype": "error", "is_error": True, "error": {"message": "[API Error: 400\n no]"}}


@pytest.mark.parametrize(
    ("end", "error"),
    [
        (ended(0, {"type": "system"}, DONE), None),
        (ended(0, DONE, "[1]", "noise"), None),
        (ended(0, "xxxx", truncated=True), None),
        (ended(0, "xxxx"), "Qwen Code ended with exit code 0 and no result"),
        (ended(0, FAILED), "[API Error: 400 no]"),
        (ended(1, FAILED, stderr=b"other\n"), "[API Error: 400 no]"),
        (ended(1, "xxxx", truncated=True, stderr=b"a\nlast words\n"), "last words"),
        (ended(1, DONE), "Qwen Code ended with exit code 1"),
        (ended(-9, DONE), "Qwen Code was killed by signal 9"),
    ],
)
def test_its_ends(end: ExecResult, error: str | None) -> None:
    assert QwenCodeHarness().exit_error(end) == error


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"profile": "large"}, "profile: Input should be 'lean' or 'stock'"),
        ({"wire": "openai_responses"}, "wire: Extra inputs are not permitted"),
    ],
)
def test_settings_that_are_refused(settings: dict[str, object], says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        get_harness("qwen-code", **settings)
    assert says in str(caught.value)


@pytest.mark.parametrize("profile", ["lean", "stock"])
def test_it_is_told_of_one_model_and_waits_for_it(profile: str) -> None:
    harness = get_harness("qwen-code", profile=profile)
    assert isinstance(harness, QwenCodeHarness)
    settings = harness._settings(CONTEXT)
    config = settings["model"]["generationConfig"]
    assert (config["contextWindowSize"], config["samplingParams"], config["maxRetries"]) == (
        9_000,
        {"max_tokens": 512},
        0,
    )
    assert config["timeout"] == config["streamIdleTimeoutMs"] == 24 * 3600 * 1000
    assert settings["context"]["clearContextOnIdle"] == {"toolResultsThresholdMinutes": -1}
    assert ("tools" in settings) == (profile == "lean")
    assert (harness.info.dialect.stabilise == STEADY) == (profile == "lean")
    assert not {"run_shell_command", "read_file", "write_file", "edit"} & set(OTHER_TOOLS)


def test_the_day_is_taken_out_and_the_task_stays() -> None:
    (rewrite,) = STEADY
    day = "<system-reminder>\nThe current date is: Tuesday, May 5, 2026. Note.\n</system-reminder>\n"
    task = "The current date is: today.\n"
    assert rewrite.pattern.sub(rewrite.replacement, day + task) == task
