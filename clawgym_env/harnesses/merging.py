"""Lays the configuration that a user gives on top of the one that a harness is launched with."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def merged(config: Mapping[str, Any], more: Mapping[str, Any]) -> dict[str, Any]:
    """One configuration on top of another, table by table: other values of ``more`` take the place of ``config``'s."""
    result = dict(config)
    for key, value in more.items():
        below = result.get(key)
        if isinstance(value, Mapping) and isinstance(below, Mapping):
            result[key] = merged(below, value)
        else:
            result[key] = value
    return result
