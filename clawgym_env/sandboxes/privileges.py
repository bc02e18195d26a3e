"""How root starts something without being root, and still shows it what only root can reach.

Invariant: what runs after ``drop_root``'s prefix has an ordinary uid and gid, no groups and can gain nothing by exec.
Paths that this uid cannot reach (a cache below /root) are bound to reachable names inside a mount namespace of that
process alone; the host's own mounts stay as they are.
"""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from clawgym_env.errors import SandboxUnavailable

# Arguments: the folder, the names of folders below it, those of files, pairs of source and name, "--", a command.
# The names are our own (digits and package names), so that splitting them at spaces is safe.
STAGE_SCRIPT = """set -e
mount -t tmpfs -o mode=755,size=1m clawgym "$1"
cd "$1"
mkdir -p . $2
for name in $3; do : > "$name"; done
shift 3
while [ "$1" != -- ]; do mount --bind "$1" "$2"; shift 2; done
shift
cd /
exec "$@"
"""


@dataclass
class Stage:
    """Reachable names for unreachable paths, below a folder that is covered in the new mount namespace.

    Attributes:
        folder: Existing folder whose parents everybody can pass.
        binds: Real path -> name below ``folder``.
    """

    folder: Path
    binds: dict[Path, str] = field(default_factory=dict)

    def place(self, path: Path) -> Path:
        """Where an ordinary uid finds ``path``."""
        if reachable_by_all(path):
            return path
        name = self.binds.setdefault(path.resolve(), str(len(self.binds)))
        return self.folder / name

    def place_program(self, program: Path) -> Path:
        """Where an ordinary uid finds a program, also one of a Python package with its libraries beside the package."""
        package = program.parent.parent
        libraries = package.with_name(f"{package.name}.libs")
        if reachable_by_all(program) or not libraries.is_dir():
            return self.place(program)
        root = str(len(self.binds))
        for path in (package, libraries):
            self.binds[path] = f"{root}/{path.name}"
        return self.folder / root / package.name / program.relative_to(package)

    def prefix(self) -> list[str]:
        """Command-line prefix that makes the names exist; empty when none is needed.

        Raises:
            SandboxUnavailable: the tools for it are missing.
        """
        if not self.binds:
            return []
        if not passable_by_all(self.folder):
            raise SandboxUnavailable(f"the uid that root drops to cannot pass {self.folder.parent}; set TMPDIR to /tmp")
        unshare = _tool("unshare", "mount", paths=self.binds)
        pairs = [part for source, name in self.binds.items() for part in (str(source), name)]
        folders = [name for source, name in self.binds.items() if source.is_dir()]
        files = [name for source, name in self.binds.items() if not source.is_dir()]
        shell = ["/bin/sh", "-c", STAGE_SCRIPT, "sh", str(self.folder), " ".join(folders), " ".join(files)]
        return [unshare, "--mount", "--propagation", "private", "--", *shell, *pairs, "--"]


def drop_root(uid: int, stage: Stage) -> tuple[list[str], dict[str, Any]]:
    """How to become ``uid``: a command-line prefix, or arguments of ``subprocess.Popen`` where setpriv is missing.

    Raises:
        SandboxUnavailable: setpriv is missing and ``stage`` needs root until the mounts are made.
    """
    setpriv = shutil.which("setpriv")
    if setpriv is None and not stage.binds:
        return [], {"user": uid, "group": uid, "extra_groups": []}
    setpriv = setpriv or _tool("setpriv", paths=stage.binds)
    ids = ["--reuid", str(uid), "--regid", str(uid), "--clear-groups"]
    return [*stage.prefix(), setpriv, *ids, "--no-new-privs", "--"], {}


def passable_by_all(path: Path) -> bool:
    """Whether any uid may pass the folders above ``path``, judged by their modes."""
    return all(parent.stat().st_mode & stat.S_IXOTH for parent in path.resolve().parents)


def reachable_by_all(path: Path) -> bool:
    """Whether any uid can get to ``path`` and read it, judged by its mode and those of its parents."""
    real = path.resolve()
    needed = stat.S_IROTH | (stat.S_IXOTH if real.is_dir() or os.access(real, os.X_OK) else 0)
    return real.stat().st_mode & needed == needed and passable_by_all(real)


def _tool(*names: str, paths: Sequence[Path] | dict[Path, str]) -> str:
    """Path of the first tool, all of which must be there."""
    found = [shutil.which(name) for name in names]
    if found[0] is None or None in found:
        shown = ", ".join(str(path) for path in paths)
        raise SandboxUnavailable(
            f"root starts sandboxes under an ordinary uid, which cannot reach {shown}; install util-linux "
            f"({', '.join(names)}) or move them to a folder that everybody can read "
            "(CLAWGYM_CACHE=/var/cache/clawgym for the harnesses)"
        )
    return found[0]
