"""Which Python runs a harness that needs a newer one than ClawGym does."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from clawgym_env.doctor import check_machine
from clawgym_env.errors import HarnessError, HarnessNotInstalled
from clawgym_env.harnesses import get_harness, install
from clawgym_env.harnesses.packages import OPENHANDS
from clawgym_env.harnesses.pypi import PythonPackage, interpreter_mounts
from clawgym_env.harnesses.python import find_python, running_python

OWN = sys.version_info[:2]
NEXT, AFTER = (OWN[0], OWN[1] + 1), (OWN[0], OWN[1] + 2)


@pytest.fixture(autouse=True)
def nothing_but_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No Python is on PATH, and pyenv has none."""
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setenv("PYENV_ROOT", str(tmp_path / "pyenv"))
    monkeypatch.setenv("CLAWGYM_CACHE", str(tmp_path / "cache"))
    find_python.cache_clear()
    yield
    find_python.cache_clear()


def fake_python(program: Path, version: tuple[int, int], prefix: str = "/elsewhere") -> Path:
    """A program that answers the probe as a Python of that version would."""
    program.parent.mkdir(parents=True, exist_ok=True)
    tag = f"cpython-{version[0]}{version[1]}"
    said = f'[[{version[0]}, {version[1]}, 3], "{program}", "{prefix}", "{tag}"]'
    program.write_text(f"#!/bin/sh\necho '{said}'\n")
    program.chmod(0o755)
    return program


def name(version: tuple[int, int]) -> str:
    return f"python{version[0]}.{version[1]}"


def package(oldest: tuple[int, int]) -> PythonPackage:
    return PythonPackage("thing", "1.0", "", 1, oldest_python=oldest)


def test_the_one_that_runs_this_is_taken_where_it_suits(tmp_path: Path) -> None:
    fake_python(tmp_path / "bin" / name(OWN), OWN)
    found = find_python(OWN)
    assert found == running_python() == find_python()
    assert found.version == sys.version_info[:3] and found.tag == sys.implementation.cache_tag
    source = "import sys; print(sys.version_info[:3], sys.base_prefix)"
    said = subprocess.run([found.executable, "-I", "-c", source], capture_output=True, text=True, check=True).stdout
    assert said == f"{found.version} {found.prefix}\n"


def test_those_on_path_go_before_pyenv_s_and_old_ones_before_new_ones(tmp_path: Path) -> None:
    later = fake_python(tmp_path / "bin" / name(AFTER), AFTER)
    fake_python(tmp_path / "pyenv" / "versions" / "9.9.9" / "bin" / name(NEXT), NEXT)
    assert find_python(NEXT).executable == later
    find_python.cache_clear()
    found = fake_python(tmp_path / "bin" / name(NEXT), NEXT)
    assert find_python(NEXT).executable == found
    assert find_python(NEXT).version == (*NEXT, 3)


def test_pyenv_s_are_found_where_its_shims_lead_nowhere(tmp_path: Path) -> None:
    shim = tmp_path / "bin" / name(NEXT)
    shim.write_text("#!/bin/sh\necho 'pyenv: command not found' >&2; exit 127\n")
    shim.chmod(0o755)
    real = fake_python(tmp_path / "pyenv" / "versions" / f"{NEXT[0]}.{NEXT[1]}.1" / "bin" / name(NEXT), NEXT)
    assert find_python(NEXT).executable == real


def test_one_that_is_not_what_its_name_says_is_passed_over(tmp_path: Path) -> None:
    fake_python(tmp_path / "bin" / name(NEXT), OWN)
    with pytest.raises(HarnessNotInstalled):
        find_python(NEXT)


def test_versions_are_bounded_above(tmp_path: Path) -> None:
    fake_python(tmp_path / "bin" / name(AFTER), AFTER)
    with pytest.raises(HarnessNotInstalled) as caught:
        find_python(NEXT, AFTER)
    assert f"no Python >= {NEXT[0]}.{NEXT[1]} and < {AFTER[0]}.{AFTER[1]} here" in str(caught.value)
    assert find_python(NEXT).version[:2] == AFTER
    assert find_python((3, 0), NEXT) == running_python()


def test_a_package_is_run_by_its_own_python(tmp_path: Path) -> None:
    real = fake_python(tmp_path / "bin" / name(NEXT), NEXT)
    newer, ours = package(NEXT), package(OWN)
    assert newer.folder_name == f"1.0-cpython-{NEXT[0]}{NEXT[1]}-{platform.machine()}" != ours.folder_name
    assert newer.command("/f", "/s.py") == [str(real), "-I", "-S", "/f/run.py", "/s.py"]
    assert ours.command("/f")[0] == str(running_python().executable)
    (mount,) = interpreter_mounts(newer)
    assert (mount.source, mount.target) == (Path("/elsewhere"), "/elsewhere")
    assert interpreter_mounts(ours) == interpreter_mounts()
    find_python.cache_clear()
    fake_python(tmp_path / "bin" / name(NEXT), NEXT, prefix="/usr/local")  # a sandbox shows that anyway
    assert interpreter_mounts(newer) == ()


def test_pip_is_run_by_it(tmp_path: Path) -> None:
    """Our pip is handed over: the other Python need not have one."""
    log = tmp_path / "log"
    real = fake_python(tmp_path / "bin" / name(NEXT), NEXT)
    real.write_text(real.read_text() + f'echo "$@" >> {log}\nexit 3\n')
    with pytest.raises(HarnessError, match=r"pip could not install thing==1\.0"):
        package(NEXT).fetch(tmp_path / "folder", tmp_path / "cache", print)
    (call,) = (line for line in log.read_text().splitlines() if " install " in line)
    assert f"--target {tmp_path}/folder/site thing==1.0" in call


def test_it_is_said_wherever_one_looks_that_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(install.PACKAGES, "openhands", replace(OPENHANDS, oldest_python=(3, 99)))
    says = "no Python >= 3.99 here"
    assert says in install.state("openhands") and "pyenv install 3.99" in install.state("openhands")
    for look in (install.install, install.ensure):
        with pytest.raises(HarnessNotInstalled, match=says):
            look("openhands", print)
    with pytest.raises(HarnessNotInstalled, match=says):
        get_harness("openhands").mounts()
    assert not Path(os.environ["CLAWGYM_CACHE"]).exists()
    (check,) = (c for c in check_machine() if c.name == "harness openhands")
    assert check.state == "warning" and says in check.detail
