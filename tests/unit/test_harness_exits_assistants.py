"""What the ends of nanobot and Hermes mean, which settings they take, and what they are told."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from clawgym_env.errors import ConfigError
from clawgym_env.harnesses import HermesHarness, NanobotHarness, get_harness
from clawgym_env.harnesses.base import LaunchContext
from clawgym_env.harnesses.merging import merged
from clawgym_env.sandboxes.base import ExecResult

CONTEXT = LaunchContext("Do it.", "http://127.0.0.1:1/rollout/7", "key", "policy", 9_000, 512, 60.0)


@pytest.mark.parametrize(
    ("end", "error"),
    [
        (ExecResult(0, b"Done.", b"WARNING: slow\n"), None),
        (ExecResult(1, b"", b"ERROR: x\nnanobot: Error: HTTP 400\n"), "nanobot: Error: HTTP 400"),
        (ExecResult(3, b"out", b""), "nanobot ended with exit code 3 and said nothing"),
        (ExecResult(-9, b"", b"x"), "nanobot was killed by signal 9"),
    ],
)
def test_nanobot(end: ExecResult, error: str | None) -> None:
    assert NanobotHarness().exit_error(end) == error


@pytest.mark.parametrize(
    ("end", "error"),
    [
        (ExecResult(0, b"Done.", b"\nsession_id: 1\n"), None),
        (ExecResult(1, b"", b"Error: HTTP 400\n\nsession_id: 20260101\n"), "Error: HTTP 400"),
        (ExecResult(1, b"Context length exceeded\n", b"\nsession_id: 1\n"), "Context length exceeded"),
        (ExecResult(1, b"", b"\nsession_id: 20260101\n"), "Hermes ended with exit code 1 and said nothing"),
        (ExecResult(-15, b"", b"x"), "Hermes was killed by signal 15"),
    ],
)
def test_hermes(end: ExecResult, error: str | None) -> None:
    assert HermesHarness().exit_error(end) == error


@pytest.mark.parametrize("name", ["nanobot", "hermes"])
@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"profile": "large"}, "profile: Input should be 'lean' or 'stock'"),
        ({"wire": "openai_chat"}, "wire: Extra inputs are not permitted"),
    ],
)
def test_settings_that_are_refused(name: str, settings: dict[str, object], says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        get_harness(name, **settings)
    assert says in str(caught.value)


def test_configuration_is_laid_on_top() -> None:
    below = {"a": {"b": 1, "c": 2}, "d": [1]}
    assert merged(below, {"a": {"c": 3, "e": 4}, "d": [2], "f": {"g": 5}}) == {
        "a": {"b": 1, "c": 3, "e": 4},
        "d": [2],
        "f": {"g": 5},
    }
    assert merged(below, {"a": None})["a"] is None
    assert below == {"a": {"b": 1, "c": 2}, "d": [1]}


def test_nanobot_is_told_of_one_model() -> None:
    config = NanobotHarness(config={"tools": {"exec": {"timeout": 9}}})._config(CONTEXT)
    assert config["agents"]["defaults"]["contextWindowTokens"] == 9_000
    assert config["providers"]["custom"] == {"apiKey": "key", "apiBase": "http://127.0.0.1:1/rollout/7/v1"}
    assert config["tools"] == {"web": {"enable": False}, "exec": {"timeout": 9}}
    assert json.loads(json.dumps(config)) == config


def test_the_drivers_lie_apart_from_our_modules() -> None:
    """Python looks beside a script first: a module of ours would be taken for the harness's package."""
    from clawgym_env.harnesses import hermes, nanobot

    for driver in (nanobot.DRIVER, hermes.DRIVER):
        beside = {path.stem for path in driver.parent.glob("*.py")}
        assert driver.is_file() and not beside & {"nanobot", "hermes", "openhands", "agents"}
        assert driver.parent != Path(nanobot.__file__).parent
