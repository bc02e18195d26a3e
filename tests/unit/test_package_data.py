"""What a wheel of ClawGym holds beside its modules."""

from __future__ import annotations

import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from clawgym_env.harnesses.packages import PACKAGES
from clawgym_env.harnesses.pypi import LOCKS, PythonPackage

ROOT = Path(__file__).parents[2]
LOCKED = {name: package for name, package in PACKAGES.items() if isinstance(package, PythonPackage)}
PIN = re.compile(r"[a-z0-9][a-z0-9.-]*==[\w.!+]+( ; \S.*)?")


def test_a_wheel_has_every_file_of_the_packages(tmp_path: Path) -> None:
    build = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(tmp_path)]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("clawgym-*.whl")
    inside = set(zipfile.ZipFile(wheel).namelist())
    ours = [p.relative_to(ROOT) for part in ("clawgym_env", "torchrl_ext") for p in (ROOT / part).rglob("*.*")]
    wanted = {str(path) for path in ours if path.suffix != ".pyc" and (ROOT / path).is_file()}
    assert len(wanted) > 80
    assert wanted - inside == set()


@pytest.mark.parametrize("name", LOCKED)
def test_a_lock_pins_everything_without_hashes(name: str) -> None:
    package = LOCKED[name]
    assert package.lock is not None and package.lock.parent == LOCKS
    lines = [line for line in package.lock.read_text().splitlines() if not line.startswith("#")]
    assert [line for line in lines if not PIN.fullmatch(line)] == []
    assert f"{package.package}=={package.version}" in lines
    assert package.package in package.integrity, "the hash of the harness's own wheel belongs into its entry"
    assert all(re.fullmatch("sha256:[0-9a-f]{64}", value) for value in package.integrity.values())


def test_no_lock_is_left_over() -> None:
    assert {path.name for path in LOCKS.iterdir()} == {p.lock.name for p in LOCKED.values() if p.lock is not None}
