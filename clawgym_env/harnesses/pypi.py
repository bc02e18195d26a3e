"""Harnesses that come from PyPI: a folder of packages of their own, run by the Python that ClawGym runs on.

Where a package needs a newer one, it is run by another of this machine (``python.py``).

Invariants:
    1. Nothing of the user's environment is written or read: packages go into one folder, and the program is started in
       isolated mode with that folder alone on its path (no user site, no site-packages, no ``PYTHONPATH`` that the
       agent's own commands would inherit).
    2. Wheels only, so that no build script runs. Where the package has a lock file, what is in it is installed and
       nothing else, in those versions. pip checks every archive against the index's hash; that of the package itself
       must also be the one that is written here, whatever index pip is set to use.
    3. The interpreter is seen at its own path in a sandbox: what it was built with holds nowhere else.
"""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from clawgym_env.errors import HarnessError
from clawgym_env.harnesses.fetching import Progress, run_installer
from clawgym_env.harnesses.python import OLDEST_PYTHON, Python, find_python, running_python
from clawgym_env.sandboxes.base import Mount

#: Lock files that ship with this package: ``name==version ; marker`` lines of ``uv pip compile --universal``.
LOCKS = Path(__file__).with_name("locks")
SITE = "site"
REPORT = "pip-report.json"
LAUNCHER = "run.py"
#: Started with the name of a console script of the package or the path of a script, and its arguments.
LAUNCHER_SOURCE = '''"""Runs a console script of the packages beside this file, or a script that imports them."""
import site
import sys
from importlib.metadata import distribution
from runpy import run_path

site.addsitedir(__file__.rpartition("/")[0] + "/{site}")
sys.argv[:] = sys.argv[1:]
if sys.argv[0].endswith(".py"):
    run_path(sys.argv[0], run_name="__main__")
    sys.exit()
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
        entry: Its console script; empty for a library.
        install_mb: Size on disk, roughly.
        lock: File that pins everything that is to be installed, without hashes (mirrors differ in what they hold);
            ``None`` pins the package alone.
        proprietary: Why it is installed by an explicit command only; empty under an open licence.
        integrity: Package -> hash of its wheel, as ``sha256:`` and hexadecimal digits.
        oldest_python: Python that it runs on, at least; ``below_python`` is the first that is too new for it.
    """

    package: str
    version: str
    entry: str
    install_mb: int
    lock: Path | None = None
    proprietary: str = ""
    integrity: Mapping[str, str] = field(default_factory=dict)
    oldest_python: tuple[int, int] = OLDEST_PYTHON
    below_python: tuple[int, int] | None = None

    @property
    def folder_name(self) -> str:
        """Wheels are chosen for a Python: another one is another install.

        Raises:
            HarnessNotInstalled: there is no suitable Python.
        """
        return f"{self.version}-{self.python().tag}-{platform.machine()}"

    def python(self) -> Python:
        """What it runs on.

        Raises:
            HarnessNotInstalled: there is no suitable Python.
        """
        return find_python(self.oldest_python, self.below_python)

    def program(self, folder: str) -> str:
        """What starts it, where ``folder`` is the install as seen from where it runs."""
        return f"{folder}/{LAUNCHER}"

    def command(self, folder: str, script: str = "") -> list[str]:
        """The beginning of a command line that runs it; its arguments follow.

        Args:
            folder: The install as seen from where it runs.
            script: Path there of a script that is run with its packages, in place of ``entry``.
        """
        return [str(self.python().executable), "-I", "-S", self.program(folder), script or self.entry]

    def node(self) -> None:
        """It needs none."""
        return

    def fetch(self, folder: Path, cache: Path, progress: Progress) -> None:
        """Runs pip for a folder that is yet to be made, and compiles what it installed.

        Raises:
            HarnessError: there is no pip, it failed, or what it fetched is not what was published under this version.
        """
        if importlib.util.find_spec("pip") is None:
            raise HarnessError(f"{sys.executable} has no pip: run {sys.executable} -m ensurepip")
        folder.mkdir(parents=True)
        spec = f"{self.package}=={self.version}"
        wanted = [spec] if self.lock is None else ["--no-deps", "--requirement", str(self.lock)]
        command = [
            *(sys.executable, "-m", "pip", *self._other_python(), "install", "--no-user", "--only-binary", ":all:"),
            *("--no-input", "--compile"),
            *("--disable-pip-version-check", "--no-warn-script-location", "--quiet"),
            *("--report", str(folder / REPORT)),
            *("--cache-dir", str(cache / "pip"), "--target", str(folder / SITE), *wanted),
        ]
        env = {name: value for name, value in os.environ.items() if name not in MISLEADING}
        with TemporaryDirectory(dir=folder) as beside:  # pip unpacks there: progress can be seen, and moving is cheap
            failed = run_installer(command, folder, env | {"TMPDIR": beside}, self.install_mb, progress)
        if failed is not None:
            raise HarnessError(f"pip could not install {spec}: {failed}")
        self._check_report(folder)
        (folder / LAUNCHER).write_text(LAUNCHER_SOURCE.format(site=SITE, package=self.package))

    def _other_python(self) -> Sequence[str]:
        """Options that have this pip run by the harness's Python, which may have none."""
        python = self.python()
        return () if python == running_python() else ("--python", str(python.executable))

    def versions(self, folder: Path) -> dict[str, str]:
        """Version of the package by what lies in its folder; empty where it is not there."""
        found = [d.version for d in metadata.distributions(name=self.package, path=[str(folder / SITE)])]
        return {self.package: found[0] if found else ""}

    def _check_report(self, folder: Path) -> None:
        """Compares what pip says that it installed with what is wanted."""
        report: dict[str, Any] = json.loads((folder / REPORT).read_text())
        versions: dict[str, str] = {}
        hashes: dict[str, str] = {}
        for item in report["install"]:
            name, archive = _normal(item["metadata"]["name"]), item["download_info"].get("archive_info", {})
            versions[name] = item["metadata"]["version"]
            digest = archive.get("hashes", {}).get("sha256") or archive.get("hash", "").removeprefix("sha256=")
            hashes[name] = f"sha256:{digest}"
        if versions.get(_normal(self.package)) != self.version:
            raise HarnessError(f"{self.lock} does not pin {self.package}=={self.version}")
        for name, wanted in self.integrity.items():
            found = hashes.get(_normal(name), "none")
            if found != wanted:
                raise HarnessError(
                    f"the index's {name} {self.version} is not the one that was published: its wheel has the hash "
                    f"{found}, not {wanted}; look at your pip index setting"
                )


def _normal(name: str) -> str:
    """A distribution's name as indexes compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def interpreter_mounts(package: PythonPackage | None = None) -> Sequence[Mount]:
    """The folder of the interpreter that runs a package, where a sandbox does not show it anyway.

    Raises:
        HarnessNotInstalled: there is no suitable Python.
    """
    prefix = (running_python() if package is None else package.python()).prefix
    return () if prefix.is_relative_to("/usr") else (Mount(prefix, str(prefix)),)
