"""Places for one rollout to run in. ``get_backend`` gives the one that was named, and never another.

Invariant: a backend that cannot work here says so; nothing falls back to less isolation by itself.
"""

from __future__ import annotations

from collections.abc import Callable

from clawgym_env.errors import ConfigError
from clawgym_env.sandboxes.base import (
    HOME,
    PORT,
    WORKSPACE,
    Backend,
    Capabilities,
    ExecResult,
    Limits,
    Mount,
    Sandbox,
    SandboxSpec,
)
from clawgym_env.sandboxes.bubblewrap import BubblewrapBackend
from clawgym_env.sandboxes.docker import DockerBackend
from clawgym_env.sandboxes.process import ProcessBackend

__all__ = [
    "BACKENDS",
    "HOME",
    "PORT",
    "WORKSPACE",
    "Backend",
    "Capabilities",
    "ExecResult",
    "Limits",
    "Mount",
    "Sandbox",
    "SandboxSpec",
    "get_backend",
]

BACKENDS: dict[str, Callable[[], Backend]] = {
    "bubblewrap": BubblewrapBackend,
    "docker": DockerBackend,
    "process": ProcessBackend,
}


def get_backend(name: str) -> Backend:
    """The backend of that name.

    Raises:
        ConfigError: there is none; the message lists those there are.
    """
    if name not in BACKENDS:
        raise ConfigError(f"unknown sandbox {name!r}; there are {', '.join(sorted(BACKENDS))}")
    return BACKENDS[name]()
