"""Task suites by name."""

from __future__ import annotations

from clawgym_env.errors import ConfigError
from clawgym_env.tasks.base import Suite


def get_suite(name: str, *, level: int = 1) -> Suite:
    """A suite.

    Raises:
        ConfigError: there is no such suite.
    """
    from clawgym_env.tasks.builtin import BuiltinSuite

    if name != "builtin":
        raise ConfigError(f"unknown task suite {name!r}; there is 'builtin'")
    return BuiltinSuite(level=level)
