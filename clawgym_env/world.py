"""The parts of a run by their names: where harness, tasks and sandbox come together.

Invariant: a name that is unknown, a harness that is not installed and a backend that cannot work are said here, before
any rollout begins; nothing is replaced by something else.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from clawgym_env.errors import SandboxUnavailable
from clawgym_env.harnesses import get_harness
from clawgym_env.harnesses.base import Harness
from clawgym_env.sandboxes import get_backend
from clawgym_env.sandboxes.base import Backend
from clawgym_env.tasks import get_suite
from clawgym_env.tasks.base import Suite


@dataclass(frozen=True, slots=True, eq=False)
class World:
    """What rollouts run in."""

    harness: Harness
    suite: Suite
    backend: Backend


def open_world(
    harness: str,
    suite: str = "builtin",
    *,
    level: int = 1,
    sandbox: str = "bubblewrap",
    harness_options: Mapping[str, Any] | None = None,
) -> World:
    """Looks the parts up and tries them.

    Raises:
        ConfigError: an unknown name or option.
        HarnessNotInstalled: with the command that installs it.
        SandboxUnavailable: naming the ways out.
    """
    program = get_harness(harness, **(harness_options or {}))
    program.mounts()
    backend = get_backend(sandbox)
    found = backend.probe()
    if not found.available:
        raise SandboxUnavailable(found.detail)
    return World(program, get_suite(suite, level=level), backend)
