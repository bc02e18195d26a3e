"""Settings as a command line writes them: ``key=value``, and ``part.key=value`` for a key of a part.

Invariant: nothing is guessed. A value is text, ``none``, or JSON where it begins with a bracket or a brace; types are
given by whoever validates.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import orjson

from clawgym_env.errors import ConfigError


def parse_overrides(overrides: Sequence[str]) -> dict[str, Any]:
    """``["seed=1", "grpo.lr=1e-4"]`` -> ``{"seed": "1", "grpo": {"lr": "1e-4"}}``; pydantic converts the text.

    Raises:
        ConfigError: an override without ``=``, one given twice, or a list or an object that is no JSON.
    """
    out: dict[str, Any] = {}
    for item in overrides:
        key, sign, text = item.partition("=")
        if not sign or not key:
            raise ConfigError(f"{item!r} is no setting: write key=value, for example seed=1 or grpo.steps=20")
        *path, leaf = key.split(".")
        at = out
        for name in path:
            at = at.setdefault(name, {})
            if not isinstance(at, dict):
                raise ConfigError(f"{name!r} in {item!r} is set to a value already")
        if leaf in at:
            raise ConfigError(f"{key!r} is set twice")
        at[leaf] = _value(key, text)
    return out


def _value(key: str, text: str) -> Any:
    if text == "none":
        return None
    if not text.startswith(("[", "{")):
        return text
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError:
        what = "list: write it as [1, 2]" if text.startswith("[") else 'object: write it as {"key": 1}'
        raise ConfigError(f"{key}={text} is no JSON {what}") from None
