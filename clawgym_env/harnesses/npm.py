"""Harnesses that come from npm: JavaScript programs, and native ones that lie in a package for their platform.

Invariants:
    1. No script of any package runs.
    2. npm checks every archive against the registry's own hash; those of the packages that are named here must also be
       the ones that are written here, whatever registry npm is set to use.
"""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from clawgym_env.errors import HarnessError
from clawgym_env.harnesses.fetching import Progress, run_installer
from clawgym_env.harnesses.node import OLDEST_NODE, Node, find_node

FLAGS = ("--ignore-scripts", "--no-audit", "--no-fund", "--omit=dev", "--include=optional", "--global=false")
CPUS: Mapping[str, str] = {"x86_64": "x64", "aarch64": "arm64"}


@dataclass(frozen=True, slots=True)
class NpmPackage:
    """A harness that npm installs.

    Attributes:
        package: Its name in the registry.
        entry: Its program, relative to the folder of ``host``.
        install_mb: Size on disk, roughly.
        native: Package that holds a native program, with ``{cpu}`` for npm's name of the processor; empty where the
            program is JavaScript of ``package`` itself.
        proprietary: Why it is installed by an explicit command only; empty under an open licence.
        integrity: Package -> hash of its archive, as npm writes it into a lock file.
        oldest_node: Node that it runs on, at least; ``below_node`` is the first that is too new for it.
    """

    package: str
    version: str
    entry: str
    install_mb: int
    native: str = ""
    proprietary: str = ""
    integrity: Mapping[str, str] = field(default_factory=dict)
    oldest_node: tuple[int, int] = OLDEST_NODE
    below_node: tuple[int, int] | None = None

    @property
    def folder_name(self) -> str:
        """Name of the folder of an install."""
        return self.version

    @property
    def host(self) -> str:
        """Name of the package that holds the program on this machine."""
        return self.native.format(cpu=cpu()) if self.native else self.package

    def program(self, folder: str) -> str:
        """The program, where ``folder`` is the install as seen from where it runs."""
        return f"{folder}/node_modules/{self.host}/{self.entry.format(machine=platform.machine())}"

    def node(self) -> Node | None:
        """What it runs on; ``None`` for native programs.

        Raises:
            HarnessError: there is no suitable Node.
        """
        return None if self.native else find_node(self.oldest_node, self.below_node)

    def fetch(self, folder: Path, cache: Path, progress: Progress) -> None:
        """Runs npm in a folder that is yet to be made.

        Raises:
            HarnessError: npm failed, or what it fetched is not what was published under this version.
        """
        node = self.node() or find_node()
        folder.mkdir(parents=True)
        (folder / "package.json").write_text('{"private": true}\n')
        spec = f"{self.package}@{self.version}"
        command = [*node.npm, "install", *FLAGS, "--loglevel=error", f"--cache={cache / 'npm'}", "--save-exact", spec]
        path = f"{node.executable.parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
        env = {**os.environ, "PATH": path, "npm_config_update_notifier": "false"}
        failed = run_installer(command, folder, env, self.install_mb, progress)
        if failed is not None:
            raise HarnessError(f"npm could not install {spec}: {failed}")
        self._check_integrity(folder)
        if not Path(self.program(str(folder))).is_file():
            raise HarnessError(f"{spec} has no program for {platform.system()} on {platform.machine()}")

    def versions(self, folder: Path) -> dict[str, str]:
        """Version of each package that this harness is, by what lies in its folder; empty for what is not there."""
        return {name: _version(folder / "node_modules" / name) for name in dict.fromkeys((self.package, self.host))}

    def _check_integrity(self, folder: Path) -> None:
        locked: dict[str, Any] = json.loads((folder / "package-lock.json").read_text())["packages"]
        for name in dict.fromkeys((self.package, self.host)):
            found = locked.get(f"node_modules/{name}", {}).get("integrity")
            wanted = self.integrity.get(name)
            if wanted is not None and found != wanted:
                raise HarnessError(
                    f"the registry's {name} {self.version} is not the one that was published: its archive has the hash "
                    f"{found}, not {wanted}; look at your npm registry setting"
                )


def cpu() -> str:
    """npm's name of this machine's processor."""
    machine = platform.machine()
    return CPUS.get(machine, machine)


def _version(package: Path) -> str:
    try:
        return str(json.loads((package / "package.json").read_text()).get("version", ""))
    except (OSError, ValueError):
        return ""
