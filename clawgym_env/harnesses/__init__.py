"""Agent programs by name. ``get_harness("pi", thinking="low")`` configures one; a wrong name or setting is refused.

Invariant: importing this costs no program and no network; a harness looks for its install when it is launched.
"""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Callable
from typing import Any

from pydantic import ValidationError

from clawgym_env.errors import ConfigError
from clawgym_env.harnesses.base import Harness, HarnessInfo, Launch, LaunchContext
from clawgym_env.harnesses.claude_code import ClaudeCodeHarness
from clawgym_env.harnesses.codex import CodexHarness
from clawgym_env.harnesses.command import CommandHarness
from clawgym_env.harnesses.hermes import HermesHarness
from clawgym_env.harnesses.mini_swe_agent import MiniSweAgentHarness
from clawgym_env.harnesses.nanobot import NanobotHarness
from clawgym_env.harnesses.openai_agents import OpenAIAgentsHarness
from clawgym_env.harnesses.openclaw import OpenClawHarness
from clawgym_env.harnesses.opencode import OpenCodeHarness
from clawgym_env.harnesses.openhands import OpenHandsHarness
from clawgym_env.harnesses.pi import PiHarness
from clawgym_env.harnesses.qwen_code import QwenCodeHarness
from clawgym_env.harnesses.scripted import ScriptedHarness
from clawgym_env.harnesses.smolagents import SmolagentsHarness

__all__ = [
    "HARNESSES",
    "ClaudeCodeHarness",
    "CodexHarness",
    "CommandHarness",
    "Harness",
    "HarnessInfo",
    "HermesHarness",
    "Launch",
    "LaunchContext",
    "MiniSweAgentHarness",
    "NanobotHarness",
    "OpenAIAgentsHarness",
    "OpenClawHarness",
    "OpenCodeHarness",
    "OpenHandsHarness",
    "PiHarness",
    "QwenCodeHarness",
    "ScriptedHarness",
    "SmolagentsHarness",
    "get_harness",
]

HARNESSES: dict[str, Callable[..., Harness]] = {
    "claude-code": ClaudeCodeHarness,
    "codex": CodexHarness,
    "command": CommandHarness,
    "hermes": HermesHarness,
    "mini-swe-agent": MiniSweAgentHarness,
    "nanobot": NanobotHarness,
    "openclaw": OpenClawHarness,
    "openai-agents": OpenAIAgentsHarness,
    "opencode": OpenCodeHarness,
    "openhands": OpenHandsHarness,
    "pi": PiHarness,
    "qwen-code": QwenCodeHarness,
    "scripted": ScriptedHarness,
    "smolagents": SmolagentsHarness,
}


def get_harness(name: str, /, **settings: object) -> Harness:
    """The harness of that name, with its settings.

    Args:
        name: One of ``HARNESSES``, or ``package.module:attribute`` of anyone's: a class, or whatever makes a harness.

    Raises:
        ConfigError: no such harness, or a setting that it does not take.
    """
    maker = _maker(name)
    try:
        harness = maker(**settings)
    except ValidationError as error:
        faults = "; ".join(f"{'.'.join(map(str, fault['loc']))}: {fault['msg']}" for fault in error.errors())
        raise ConfigError(f"settings of harness {name!r}: {faults}") from None
    except TypeError as error:
        raise ConfigError(f"settings of harness {name!r}: {error}") from error
    if not isinstance(harness, Harness):
        wanted = ", ".join(m for m in ("info", "mounts", "launch", "exit_error") if not hasattr(harness, m))
        raise ConfigError(f"{name!r} makes no harness: {type(harness).__name__} lacks {wanted}")
    return harness


def _maker(name: str) -> Callable[..., Any]:
    if name in HARNESSES:
        return HARNESSES[name]
    module, colon, attribute = name.partition(":")
    if module and colon and attribute:
        try:
            found: Callable[..., Any] = getattr(importlib.import_module(module), attribute)
        except (ImportError, AttributeError) as error:
            raise ConfigError(f"harness {name!r} cannot be imported: {error}") from error
        return found
    close = difflib.get_close_matches(name, HARNESSES)
    hint = f"; did you mean {' or '.join(close)}?" if close else "."
    raise ConfigError(
        f"unknown harness {name!r}{hint} There are {', '.join(sorted(HARNESSES))}, and any package.module:attribute."
    )
