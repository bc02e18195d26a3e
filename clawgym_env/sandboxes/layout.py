"""What a command needs to know of the sandbox that it runs in: paths, environment, ports.

Invariant: a command that cannot be passed to a process is refused before anything is sent.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from clawgym_env.errors import SandboxError
from clawgym_env.sandboxes.inside import wire


@dataclass(frozen=True, slots=True)
class Layout:
    """Where things are, as seen from inside, and the environment that every command starts from.

    Attributes:
        tool_ports: Ports of the listeners after the first, in order.
        has_endpoint: Whether the first listener is the rollout's.
        bounded: Whether the workspace is a file system of its own.
    """

    home: str
    workspace: str
    env: Mapping[str, str]
    has_endpoint: bool
    tool_ports: Sequence[int] = ()
    bounded: bool = True


def encode_command(argv: Sequence[str], env: Mapping[str, str], cwd: str) -> bytes:
    """Packs a command for the init."""
    if not argv:
        raise SandboxError("an empty command cannot be run")
    if any("\0" in part for part in (*argv, *env, *env.values(), cwd)):
        raise SandboxError("a command, its environment and its folder cannot contain NUL")
    if any("=" in name for name in env):
        raise SandboxError("an environment variable's name cannot contain '='")
    return wire.encode_exec(
        [os.fsencode(part) for part in argv],
        [os.fsencode(f"{name}={value}") for name, value in env.items()],
        os.fsencode(cwd),
    )
