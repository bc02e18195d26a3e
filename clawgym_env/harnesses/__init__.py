"""Agent programs by name. ``get_harness("pi", thinking="low")`` configures one; a wrong name or setting is refused.

Invariant: importing this costs no program and no network; a harness looks for its install when it is launched.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable

from pydantic import ValidationError

from clawgym_env.errors import ConfigError
from clawgym_env.harnesses.base import Harness, HarnessInfo, Launch, LaunchContext
from clawgym_env.harnesses.pi import PiHarness
from clawgym_env.harnesses.scripted import ScriptedHarness

__all__ = [
    "HARNESSES",
    "Harness",
    "HarnessInfo",
    "Launch",
    "LaunchContext",
    "PiHarness",
    "ScriptedHarness",
    "get_harness",
]

HARNESSES: dict[str, Callable[..., Harness]] = {"pi": PiHarness, "scripted": ScriptedHarness}


def get_harness(name: str, **settings: object) -> Harness:
    """The harness of that name, with its settings.

    Raises:
        ConfigError: no such harness, or a setting that it does not take.
    """
    if name not in HARNESSES:
        close = difflib.get_close_matches(name, HARNESSES)
        hint = f"; did you mean {' or '.join(close)}?" if close else ""
        raise ConfigError(f"unknown harness {name!r}{hint} There are {', '.join(sorted(HARNESSES))}.")
    try:
        return HARNESSES[name](**settings)
    except ValidationError as error:
        faults = "; ".join(f"{'.'.join(map(str, fault['loc']))}: {fault['msg']}" for fault in error.errors())
        raise ConfigError(f"settings of harness {name!r}: {faults}") from None
