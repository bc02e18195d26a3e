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

STAGE_SCRIPT = """set -e
stage=$1; shift
mount -t tmpfs -o mode=755,size=1m clawgym "$stage"
while [ "$1" != -- ]; do
  if [ -d "$1" ]; then mkdir -p "$stage/$2"; else : > "$stage/$2"; fi
  mount --bind "$1" "$stage/$2"
  shift 2
done
shift
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
        """Where an ordinary uid finds a program of a Python package, whose libraries lie beside the package."""
        if reachable_by_all(program):
            return program
        package = program.parent.parent
        root = str(len(self.binds))
        for path in (package, package.with_name(f"{package.name}.libs")):
            if path.is_dir():
                self.binds[path] = f"{root}/{path.name}"
        return self.folder / root / package.name / program.relative_to(package)

    def prefix(self) -> list[str]:
        """Command-line prefix that makes the names exist; empty when none is needed.

        Raises:
            SandboxUnavailable: the tools for it are missing.
        """
        if not self.binds:
            return []
        if not reachable_by_all(self.folder.parent):
            raise SandboxUnavailable(f"the uid that root drops to cannot pass {self.folder.parent}; set TMPDIR to /tmp")
        unshare = _tool("unshare", "mount", paths=self.binds)
        pairs = [part for source, name in self.binds.items() for part in (str(source), name)]
        shell = ["/bin/sh", "-c", STAGE_SCRIPT, "sh"]
        return [unshare, "--mount", "--propagation", "private", "--", *shell, str(self.folder), *pairs, "--"]


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


def reachable_by_all(path: Path) -> bool:
    """Whether any uid can get to ``path`` and read it, judged by its mode and those of its parents."""
    real = path.resolve()
    needed = stat.S_IROTH | (stat.S_IXOTH if real.is_dir() or os.access(real, os.X_OK) else 0)
    return real.stat().st_mode & needed == needed and all(
        parent.stat().st_mode & stat.S_IXOTH for parent in real.parents
    )


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
