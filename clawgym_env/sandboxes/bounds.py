"""Which means keeps which limit, decided before a sandbox starts.

Invariant: a limit that was asked for is kept or refused, never dropped. Memory and process count have two means each,
and the weaker one is used only where the kernel's control groups cannot be: ``Capabilities.limits`` says which.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

from clawgym_env.errors import SandboxError
from clawgym_env.sandboxes import cgroups
from clawgym_env.sandboxes.base import HOME, PORT, WORKSPACE, Limits, SandboxSpec
from clawgym_env.sandboxes.inside import wire

WATCHED = "watched from inside every 50 ms, the largest process is killed first (no control groups)"
COUNTED = "RLIMIT_NPROC of the sandbox's user namespace (no control groups)"
COVERED = (HOME, WORKSPACE, "/tmp", "/dev/shm")


@dataclass(slots=True)
class Bounds:
    """The means by which one sandbox is bound.

    Attributes:
        arguments: For the first process.
        group: The control group to enter, where there is one.
    """

    arguments: dict[str, str]
    group: cgroups.Group | None = None

    @contextmanager
    def entrances(self) -> Iterator[list[int]]:
        """Descriptors that the first process needs to enter the group; named in ``arguments``."""
        fds = self.group.open_entrances() if self.group is not None else []
        if fds:
            self.arguments["groups"] = ",".join(map(str, fds))
        try:
            yield fds
        finally:
            for fd in fds:
                os.close(fd)

    def counters(self) -> cgroups.Counters:
        """Counts of met limits."""
        return self.group.open_counters() if self.group is not None else cgroups.Counters()

    def remove(self) -> None:
        """Removes the group."""
        if self.group is not None:
            self.group.remove()


@dataclass(slots=True)
class Means:
    """What this machine offers to keep limits with; looked up once for a backend.

    Attributes:
        parents: Where control groups can be made.
        found: What was found, in words.
        counts_pids: Whether RLIMIT_NPROC bounds a sandbox alone.
    """

    counts_pids: bool
    parents: cgroups.Parents | None = field(init=False)
    found: str = field(init=False)

    def __post_init__(self) -> None:
        self.parents, self.found = cgroups.find()

    def limits(self) -> dict[str, str]:
        """Field of ``Limits`` -> how it is kept."""
        kept = {name: self.found for name in cgroups.LIMITS.values() if self._grouped(name)}
        kept.setdefault("memory_mb", WATCHED)
        if self.counts_pids:
            kept.setdefault("pids", COUNTED)
        return kept

    def bind(self, limits: Limits) -> Bounds:
        """Makes what is needed to keep the limits; ``Bounds.remove`` removes it.

        Raises:
            SandboxError: one cannot be kept here.
        """
        if limits.cpu is not None and not self._grouped("cpu"):
            raise SandboxError(f"Limits.cpu needs {cgroups.HOW_TO_GET} ({self.found}); or leave it out")
        arguments = {"wall_s": str(limits.wall_s)}
        for name, value in (("cpu_s", limits.cpu_s), ("file_bytes", limits.file_bytes)):
            if value is not None:
                arguments[name] = str(math.ceil(value))
        if limits.memory_mb is not None and not self._grouped("memory_mb"):
            arguments["watch_bytes"] = str(limits.memory_mb << 20)
        if limits.pids is not None and self.counts_pids and not self._grouped("pids"):
            arguments["pids"] = str(limits.pids)
        return Bounds(arguments, cgroups.make(self.parents, limits) if self.parents is not None else None)

    def _grouped(self, limit: str) -> bool:
        return self.parents is not None and self.parents.keeps(limit)


def check_spec(spec: SandboxSpec) -> None:
    """Refuses what cannot be.

    Raises:
        SandboxError: a limit is none, or a mount or port is impossible.
    """
    limits = spec.limits
    for name, least in (("cpu", 0.01), ("cpu_s", 0.01), ("memory_mb", 16), ("pids", 2), ("disk_mb", 1), ("inodes", 16)):
        value = getattr(limits, name)
        if value is not None and not value >= least:
            raise SandboxError(f"Limits.{name} must be at least {least}, not {value}")
    for mount in spec.mounts:
        if not mount.source.exists():
            raise SandboxError(f"cannot mount {mount.source} in a sandbox: it does not exist")
        if not mount.target.startswith("/") or ".." in mount.target.split("/") or set(mount.target) & set(":,\0"):
            raise SandboxError(f"cannot mount {mount.source} at {mount.target!r}: the target must be an absolute path")
    ports = set(spec.tool_ports)
    at_most = wire.MAX_LISTENERS - 1
    possible = all(1024 <= port < 65536 and port != PORT for port in ports)
    if not possible or not len(ports) == len(spec.tool_ports) <= at_most:
        raise SandboxError(f"tool_ports takes at most {at_most} different ports from 1024, and not {PORT}")


def is_covered(target: str) -> bool:
    """Whether a path lies below one of the places that are a sandbox's own."""
    return any(target == place or target.startswith(f"{place}/") for place in COVERED)


def init_arguments(settings: Mapping[str, str]) -> list[str]:
    """Arguments of ``init.py``."""
    return [f"{name}={value}" for name, value in settings.items()]
