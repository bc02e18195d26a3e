"""Runs a package manager, and says from time to time how far it is.

Invariant: the package manager asks nothing, and what it complains of is kept.
"""

from __future__ import annotations

import os
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

Progress = Callable[[str], None]

PROGRESS_S = 5.0
SAID_CHARACTERS = 2000


def run_installer(
    command: Sequence[str], folder: Path, env: Mapping[str, str], install_mb: int, progress: Progress
) -> str | None:
    """Runs an installer that fills a folder.

    Args:
        progress: Called with a line every few seconds.

    Returns:
        ``None``, or the end of what it complained of.
    """
    with tempfile.TemporaryFile() as log:
        began = time.monotonic()
        process = subprocess.Popen(
            command, cwd=folder, env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=log, umask=0o022
        )
        try:
            while True:
                try:
                    rc = process.wait(PROGRESS_S)
                    break
                except subprocess.TimeoutExpired:
                    so_far, passed = folder_mb(folder), time.monotonic() - began
                    progress(f"... {so_far} of about {install_mb} MB after {passed:.0f} s")
        except BaseException:
            process.kill()
            process.wait()
            raise
        if rc == 0:
            return None
        log.seek(0)
        said = log.read().decode(errors="replace").strip()
    return said[-SAID_CHARACTERS:] or f"exit code {rc}"


def folder_mb(folder: Path) -> int:
    """Size of a folder's files on disk."""
    blocks = 0
    for place, _, names in os.walk(folder):
        for name in names:
            try:
                blocks += (Path(place) / name).lstat().st_blocks
            except FileNotFoundError:
                continue
    return blocks * 512 >> 20
