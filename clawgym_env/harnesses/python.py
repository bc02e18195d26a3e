"""Finds a Python that is new enough for a harness, where the one that runs ClawGym is not.

Invariant: a Python that is returned was run, and said itself what it is. The one that runs this goes first, then those
on PATH, then pyenv's; no shim is ever returned, since a sandbox shows the real program alone.
"""

from __future__ import annotations

import functools
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from clawgym_env.errors import HarnessNotInstalled

#: Oldest that ClawGym itself runs on.
OLDEST_PYTHON = (3, 11)
#: Minor versions that are looked for by name.
NEWEST_MINOR = 19
PROBE_SCRIPT = (
    "import json, os, sys; json.dump([sys.version_info[:3], os.path.realpath(sys.executable), "
    "os.path.realpath(sys.base_prefix), sys.implementation.cache_tag], sys.stdout)"
)


@dataclass(frozen=True, slots=True)
class Python:
    """A Python that is new enough.

    Attributes:
        executable: The real program, no shim.
        prefix: Folder of what belongs to it.
        tag: Its name in compiled files, ``cpython-312``: packages are chosen for it.
    """

    executable: Path
    prefix: Path
    version: tuple[int, int, int]
    tag: str


@functools.lru_cache(maxsize=8)
def find_python(oldest: tuple[int, int] = OLDEST_PYTHON, below: tuple[int, int] | None = None) -> Python:
    """The first that suits of: the one that runs this, those on PATH, and pyenv's; of several the oldest.

    Args:
        oldest: Major and minor version that it must have at least.
        below: The first that is too new; ``None`` takes any.

    Raises:
        HarnessNotInstalled: there is none.
    """
    own = running_python()
    if _suits(own, oldest, below):
        return own
    for candidate in _candidates(oldest):
        found = _probe_python(candidate)
        if found is not None and _suits(found, oldest, below):
            return found
    wanted = f">= {_dotted(oldest)}" + (f" and < {_dotted(below)}" if below is not None else "")
    raise HarnessNotInstalled(
        f"no Python {wanted} here (this is {_dotted(own.version)}): put a python{_dotted(oldest)} on PATH, or run: "
        f"pyenv install {_dotted(oldest)}"
    )


def running_python() -> Python:
    """The one that runs this."""
    executable, prefix = Path(sys.executable).resolve(), Path(sys.base_prefix).resolve()
    return Python(executable, prefix, sys.version_info[:3], str(sys.implementation.cache_tag))


def _suits(python: Python, oldest: tuple[int, int], below: tuple[int, int] | None) -> bool:
    return python.version[:2] >= oldest and (below is None or python.version[:2] < below)


def _candidates(oldest: tuple[int, int]) -> Iterator[str]:
    """Programs that might be one, from the oldest version on in each place."""
    names = [f"python{oldest[0]}.{minor}" for minor in range(oldest[1], NEWEST_MINOR + 1)]
    yield from (found for name in [*names, "python3"] if (found := shutil.which(name)) is not None)
    versions = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv") / "versions"
    installed = sorted(versions.glob("*/bin"), key=lambda folder: _numbers(folder.parent.name))
    for name in names:
        yield from (str(folder / name) for folder in installed if (folder / name).exists())


def _numbers(name: str) -> list[int]:
    return [int(part) for part in re.findall(r"\d+", name)]


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))


def _probe_python(program: str) -> Python | None:
    """What a Python says of itself; ``None`` when it does not run."""
    try:
        done = subprocess.run(
            [program, "-I", "-S", "-c", PROBE_SCRIPT],
            capture_output=True,
            text=True,
            timeout=30.0,
            stdin=subprocess.DEVNULL,
        )
        (major, minor, micro), executable, prefix, tag = json.loads(done.stdout)
    except (OSError, ValueError, subprocess.TimeoutExpired):
        return None
    return Python(Path(executable), Path(prefix), (major, minor, micro), tag)
