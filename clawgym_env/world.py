"""The parts of a run by their names: where harness, tasks and sandbox come together.

Invariant: a name that is unknown, a harness that is not installed and a backend that cannot work are said here, before
any rollout begins; nothing is replaced by something else.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from pydantic import TypeAdapter, ValidationError

from clawgym_env.errors import ConfigError, HarnessNotInstalled, SandboxUnavailable
from clawgym_env.harnesses import get_harness
from clawgym_env.harnesses.base import Harness
from clawgym_env.sandboxes import get_backend
from clawgym_env.sandboxes.base import Backend, Limits
from clawgym_env.tasks import get_suite
from clawgym_env.tasks.base import Suite

#: A sandbox may live so much longer than its harness may run: to start, to settle, to be read.
SANDBOX_MARGIN_S = 120.0


@dataclass(frozen=True, slots=True)
class Program:
    """A harness as a run asks for it.

    Attributes:
        name: One of ``HARNESSES``, or ``package.module:attribute``.
        options: Its settings.
    """

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, eq=False)
class World:
    """What rollouts run in.

    Attributes:
        harnesses: Label -> harness; a label is what records and figures call it.
    """

    harnesses: Mapping[str, Harness]
    suite: Suite
    backend: Backend

    @property
    def harness(self) -> Harness:
        """The one harness of a world that has one."""
        (harness,) = self.harnesses.values()
        return harness


def open_world(
    harness: str,
    suite: str = "builtin",
    *,
    level: int = 1,
    sandbox: str = "bubblewrap",
    harness_options: Mapping[str, Any] | None = None,
) -> World:
    """A world with one harness; see :func:`open_mixed_world`."""
    programs = {harness: Program(harness, harness_options or {})}
    return open_mixed_world(programs, suite, level=level, sandbox=sandbox)


def open_mixed_world(
    programs: Mapping[str, Program], suite: str = "builtin", *, level: int = 1, sandbox: str = "bubblewrap"
) -> World:
    """Looks the parts up and tries them.

    Args:
        programs: Label -> harness.

    Raises:
        ConfigError: an unknown name or option.
        HarnessNotInstalled: with the command that installs it; of several, all that are missing are named.
        SandboxUnavailable: naming the ways out.
    """
    harnesses = {label: get_harness(program.name, **program.options) for label, program in programs.items()}
    missing: list[HarnessNotInstalled] = []
    for harness in harnesses.values():
        try:
            harness.mounts()
        except HarnessNotInstalled as error:
            missing.append(error)
    if missing:
        raise HarnessNotInstalled("; ".join(dict.fromkeys(map(str, missing))))
    backend = get_backend(sandbox)
    found = backend.probe()
    if not found.available:
        raise SandboxUnavailable(found.detail)
    return World(harnesses, get_suite(suite, level=level), backend)


def limits_of(given: Mapping[str, Any], timeout_s: float) -> Limits:
    """Bounds of each sandbox, as settings give them.

    Args:
        given: Fields of ``Limits`` -> value or its text; the others keep their defaults.
        timeout_s: Wall time of a harness, from which ``wall_s`` follows.

    Raises:
        ConfigError: there is no such bound, or the value does not fit.
    """
    known = [field.name for field in fields(Limits) if field.name != "wall_s"]
    unknown = sorted(set(given) - set(known))
    if unknown:
        raise ConfigError(f"unknown limit {', '.join(unknown)}; there are: {', '.join(known)}")
    try:
        return TypeAdapter(Limits).validate_python({**given, "wall_s": timeout_s + SANDBOX_MARGIN_S})
    except ValidationError as error:
        raise ConfigError("; ".join(f"limit {e['loc'][0]}: {e['msg']}" for e in error.errors())) from None
