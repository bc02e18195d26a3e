"""Harnesses that come from PyPI: a folder of packages of their own, run by the Python that ClawGym runs on.

Invariants:
    1. Nothing of the user's environment is written or read: packages go into one folder, and the program is started in
       isolated mode with that folder alone on its path (no user site, no site-packages, no ``PYTHONPATH`` that the
       agent's own commands would inherit).
    2. Wheels only, so that no build script runs. pip checks every archive against the index's hash; where the package
       has a lock file, every version and hash is the one that is written there.
    3. The interpreter is seen at its own path in a sandbox: what it was built with holds nowhere else.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from clawgym_env.errors import HarnessError
from clawgym_env.harnesses.fetching import Progress, run_installer
from clawgym_env.sandboxes.base import Mount

SITE = "site"
LAUNCHER = "run.py"
#: Started with the name of a console script of the package, and that script's arguments.
LAUNCHER_SOURCE = '''"""Runs a console script of the packages beside this file."""
import site
import sys
from importlib.metadata import distribution

site.addsitedir(__file__.rpartition("/")[0] + "/{site}")
sys.argv[:] = sys.argv[1:]
(script,) = distribution("{package}").entry_points.select(group="console_scripts", name=sys.argv[0])
sys.exit(script.load()())
'''
#: Settings of pip that would put the packages elsewhere.
MISLEADING = ("PIP_TARGET", "PIP_PREFIX", "PIP_USER", "PIP_ROOT", "PIP_REQUIRE_VIRTUALENV", "PYTHONPATH", "PYTHONHOME")


@dataclass(frozen=True, slots=True)
class PythonPackage:
    """A harness that pip installs.

    Attributes:
        package: Its name in the index.
        entry: Its console script.
        install_mb: Size on disk, roughly.
        lock: File of requirements with a hash each (``pip install --require-hashes``); ``None`` pins the package alone.
        proprietary: Why it is installed by an explicit command only; empty under an open licence.
    """

    package: str
    version: str
    entry: str
    install_mb: int
    lock: Path | None = None
    proprietary: str = ""

    @property
    def folder_name(self) -> str:
        """Wheels are chosen for a Python: another one is another install."""
        return f"{self.version}-{sys.implementation.cache_tag}-{platform.machine()}"

    def program(self, folder: str) -> str:
        """What starts it, where ``folder`` is the install as seen from where it runs."""
        return f"{folder}/{LAUNCHER}"

    def command(self, folder: str) -> list[str]:
        """The beginning of a command line that runs it; its arguments follow."""
        return [str(interpreter()), "-I", "-S", self.program(folder), self.entry]

    def node(self) -> None:
        """It needs none."""
        return

    def fetch(self, folder: Path, cache: Path, progress: Progress) -> None:
        """Runs pip for a folder that is yet to be made.

        Raises:
            HarnessError: there is no pip, or it failed.
        """
        if importlib.util.find_spec("pip") is None:
            raise HarnessError(f"{sys.executable} has no pip: run {sys.executable} -m ensurepip")
        folder.mkdir(parents=True)
        spec = f"{self.package}=={self.version}"
        wanted = [spec] if self.lock is None else ["--require-hashes", "--requirement", str(self.lock)]
        command = [
            *(sys.executable, "-m", "pip", "install", "--no-user", "--only-binary", ":all:", "--no-input"),
            *("--disable-pip-version-check", "--no-warn-script-location", "--quiet"),
            *("--cache-dir", str(cache / "pip"), "--target", str(folder / SITE), *wanted),
        ]
        env = {name: value for name, value in os.environ.items() if name not in MISLEADING}
        failed = run_installer(command, folder, env, self.install_mb, progress)
        if failed is not None:
            raise HarnessError(f"pip could not install {spec}: {failed}")
        (folder / LAUNCHER).write_text(LAUNCHER_SOURCE.format(site=SITE, package=self.package))

    def versions(self, folder: Path) -> dict[str, str]:
        """Version of the package by what lies in its folder; empty where it is not there."""
        found = [d.version for d in metadata.distributions(name=self.package, path=[str(folder / SITE)])]
        return {self.package: found[0] if found else ""}


def interpreter() -> Path:
    """The real program of the Python that runs this."""
    return Path(sys.executable).resolve()


def interpreter_mounts() -> Sequence[Mount]:
    """The interpreter's folder, where a sandbox does not show it anyway."""
    prefix = Path(sys.base_prefix).resolve()
    return () if prefix.is_relative_to("/usr") else (Mount(prefix, str(prefix)),)
