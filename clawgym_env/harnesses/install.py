"""Puts pinned harnesses into a cache of our own, away from the user's Python and Node.

Invariants:
    1. A folder that ``installed`` names is complete. An install happens in a sibling folder under a file lock and is
       renamed into place with a record of what it is; then the program runs once, which proves it and, for JavaScript,
       fills V8's compile cache, for every rollout to read.
    2. What is run is what was installed: ``require`` compares the folder with its record, and refuses one that changed.
    3. A harness under a proprietary licence is fetched by ``install`` alone, which only a person's command calls.

The settings of npm and pip are the user's; only their download caches are ours, so that a broken install resumes.
``CLAWGYM_CACHE`` moves the cache from its place below ``XDG_CACHE_HOME``.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from clawgym_env.errors import ConfigError, HarnessError, HarnessNotInstalled
from clawgym_env.harnesses.fetching import Progress
from clawgym_env.harnesses.node import OLDEST_NODE as OLDEST_NODE
from clawgym_env.harnesses.node import Node as Node
from clawgym_env.harnesses.node import find_node as find_node
from clawgym_env.harnesses.npm import NpmPackage as NpmPackage
from clawgym_env.harnesses.packages import PACKAGES as PACKAGES
from clawgym_env.harnesses.packages import Package as Package
from clawgym_env.sandboxes.base import AGENT_UID

COMPILE_CACHE = "compile-cache"
RECORD = ".clawgym.json"


def cache_folder() -> Path:
    """Where harnesses are kept."""
    own = os.environ.get("CLAWGYM_CACHE")
    if own:
        return Path(own).expanduser().absolute()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache").absolute() / "clawgym"


def package_of(name: str) -> Package:
    """The package of a harness.

    Raises:
        ConfigError: that harness needs no install, or does not exist.
    """
    if name not in PACKAGES:
        raise ConfigError(f"no harness {name!r} to install; there are {', '.join(sorted(PACKAGES))}")
    return PACKAGES[name]


def folder_of(name: str) -> Path:
    """Where a harness lies once it is installed.

    Raises:
        HarnessNotInstalled: it needs another Python than there is.
    """
    return cache_folder() / "harnesses" / name / package_of(name).folder_name


def installed(name: str) -> Path | None:
    """The folder of an installed harness."""
    folder = folder_of(name)
    return folder if folder.is_dir() else None


def state(name: str) -> str:
    """Where a harness is, or what is the matter, for a person."""
    try:
        folder = installed(name)
    except HarnessNotInstalled as error:
        return f"no: {error}"
    if folder is None:
        others = folder_of(name).parent.glob("[!.]*")
        found = ", ".join(sorted(other.name for other in others if other.is_dir()))
        return f"no (there is {found})" if found else "no"
    changed = _changed(name, folder)
    return str(folder) if changed is None else f"changed: {changed}"


def require(name: str) -> Path:
    """The folder of a harness that must be there, as it was installed.

    Raises:
        HarnessNotInstalled: with the command that installs it.
        HarnessError: it was changed after its install, by an update of its own or by hand.
    """
    folder = installed(name)
    if folder is None:
        raise HarnessNotInstalled(f"{name} is not in {cache_folder()}; install it with: clawgym harness install {name}")
    changed = _changed(name, folder)
    if changed is not None:
        raise HarnessError(f"{name}: {changed}; install it again with: clawgym harness install {name}")
    return folder


def ensure(name: str, progress: Progress) -> Path:
    """Installs a harness unless it is there, ready for the Node of today.

    Raises:
        HarnessNotInstalled: it is missing and proprietary: only a person may install it; or there is no Python for it.
        HarnessError: it was changed after its install; there is no suitable Node; its package manager failed, or the
            program does not run.
    """
    package = package_of(name)
    if installed(name) is None and package.proprietary:
        command = f"clawgym harness install {name}"
        raise HarnessNotInstalled(f"{name} is not installed. {package.proprietary}: if you accept that, run: {command}")
    if installed(name) is not None:
        folder = require(name)
        if _is_warm(package, folder) or not os.access(folder, os.W_OK):
            return folder  # one that is not ours to write works as well, only slower
    return install(name, progress)


def install(name: str, progress: Progress) -> Path:
    """Installs a harness, completes what an earlier try left, or replaces one that changed.

    Safe from several processes at once.

    Args:
        progress: Called with one line a step.

    Raises:
        HarnessError: there is no suitable Node, the package manager failed, or the program does not run.
    """
    package, folder = package_of(name), folder_of(name)
    package.node()  # say what is missing before anything is fetched
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise HarnessError(f"cannot write to {cache_folder()}: {error.strerror}; set CLAWGYM_CACHE") from error
    with _lock(folder.parent / ".lock", lambda: progress(f"waiting for another install of {name}")):
        changed = _changed(name, folder) if folder.is_dir() else None
        if changed is not None:
            progress(f"replacing {name}: {changed}")
            discarded = folder.with_name(f".{folder.name}.discarded")
            shutil.rmtree(discarded, ignore_errors=True)
            folder.rename(discarded)  # what runs from it goes on running
            shutil.rmtree(discarded, ignore_errors=True)
        if not folder.is_dir():
            progress(f"installing {name} {package.version} (about {package.install_mb} MB) into {folder}")
            _fetch(name, package, folder, progress)
        if not _is_warm(package, folder):
            progress(f"running {name} once")
            _warm_up(name, package, folder)
    progress(f"{name} {package.version} is ready")
    return folder


def _fetch(name: str, package: Package, folder: Path, progress: Progress) -> None:
    """Installs into a sibling folder and renames it into place."""
    unfinished = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(unfinished, ignore_errors=True)
    package.fetch(unfinished, cache_folder(), progress)
    record = {"harness": name, "package": package.package, **_facts(package, unfinished)}
    (unfinished / RECORD).write_text(json.dumps(record, indent=1) + "\n")
    unfinished.rename(folder)


def _facts(package: Package, folder: Path) -> dict[str, Any]:
    """What a folder holds, as far as it can be told at once."""
    program = package.program("")
    try:
        size = Path(f"{folder}{program}").stat().st_size
    except OSError:
        size = -1
    return {"versions": package.versions(folder), "program": program, "program_bytes": size}


def _changed(name: str, folder: Path) -> str | None:
    """In what an install differs from its record; ``None`` where in nothing."""
    try:
        record = json.loads((folder / RECORD).read_text())
    except (OSError, ValueError):
        return f"{folder} has no record of what was installed"
    facts = _facts(package_of(name), folder)
    for package, version in facts["versions"].items():
        was = record["versions"].get(package)
        if version != was:
            now = f"is version {version}" if version else "is gone"
            return f"{package} in {folder} {now}, and was {was} when it was installed"
    if facts["program_bytes"] != record["program_bytes"] or facts["program"] != record["program"]:
        return f"the program {folder}{facts['program']} is not the one that was installed"
    return None


def _warm_up(name: str, package: Package, folder: Path) -> None:
    """Runs the program once and keeps what V8 compiled, for our uid here and for the agent's in sandboxes."""
    from clawgym_env.harnesses import get_harness  # these need this module
    from clawgym_env.harnesses.warmup import run_once

    run_once(get_harness(name))
    for compiled in (folder / COMPILE_CACHE).glob(f"v*-{os.geteuid()}"):
        for file in compiled.iterdir():
            file.chmod(0o644)  # Node makes them private, and root's sandboxes run under another uid
        inside = compiled.with_name(f"{compiled.name.rsplit('-', 1)[0]}-{AGENT_UID}")
        if not inside.exists():
            inside.symlink_to(compiled.name)
    mark = _warm_mark(package, folder)
    mark.parent.mkdir(exist_ok=True)
    mark.touch()


def _is_warm(package: Package, folder: Path) -> bool:
    return _warm_mark(package, folder).exists()


def _warm_mark(package: Package, folder: Path) -> Path:
    """File that says that the program ran here, and that the compile cache holds this Node's code where it has one."""
    node = package.node()
    return folder / COMPILE_CACHE / f"warm-{node.version if node is not None else 'native'}"


@contextmanager
def _lock(path: Path, on_wait: Callable[[], None]) -> Iterator[None]:
    """Holds a file lock that the kernel drops with its owner."""
    with path.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            on_wait()
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
