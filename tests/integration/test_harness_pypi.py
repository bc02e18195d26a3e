"""A real package of PyPI, installed apart from the user's Python and run in a sandbox."""

from __future__ import annotations

import asyncio
import importlib.util
import subprocess
import sys
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import pytest

from clawgym_env.errors import HarnessError
from clawgym_env.harnesses.pypi import SITE, PythonPackage, interpreter_mounts
from clawgym_env.sandboxes import ExecResult, Mount, SandboxSpec, get_backend

TARGET = "/opt/clawgym/markdown"
LOCK = """\
colorama==0.4.6 ; sys_platform == 'win32'
markdown-it-py==3.0.0
mdurl==0.1.2
"""
HASH = "sha256:355216845c60bd96232cd8d8c40e8f9765cc86f46880e43a8fd22dc1a1a8cab1"


def package(lock: Path, text: str = LOCK, integrity: str = HASH) -> PythonPackage:
    lock.write_text(text)
    return PythonPackage("markdown-it-py", "3.0.0", "markdown-it", 1, lock, integrity={"Markdown_it.py": integrity})


@dataclass(frozen=True)
class Markdown:
    """markdown-it-py, whose console script turns Markdown into HTML, and where it was installed."""

    package: PythonPackage
    folder: Path


@pytest.fixture(scope="module")
def markdown(tmp_path_factory: pytest.TempPathFactory) -> Markdown:
    folder = tmp_path_factory.mktemp("pypi")
    wanted = package(folder / "lock.txt")
    with pytest.MonkeyPatch.context() as patch:
        # what would lead pip, or the program, elsewhere
        patch.setenv("PIP_USER", "1")
        patch.setenv("PIP_PREFIX", str(folder / "elsewhere"))
        patch.setenv("PYTHONPATH", str(folder / "elsewhere"))
        patch.setenv("PIP_NO_COMPILE", "1")
        wanted.fetch(folder / "install", folder / "cache", print)
    assert not (folder / "elsewhere").exists()
    return Markdown(wanted, folder / "install")


def run(markdown: Markdown, backend: str, *arguments: str) -> ExecResult:
    async def main() -> ExecResult:
        mount = Mount(markdown.folder, TARGET)
        spec = SandboxSpec(files={"a.md": b"# Title\n"}, mounts=(mount, *interpreter_mounts()), network="none")
        async with await get_backend(backend).create(spec) as sandbox:
            argv = [*markdown.package.command(sandbox.inside(mount)), *arguments]
            return await sandbox.exec(argv, timeout_s=30)

    return asyncio.run(main())


@pytest.mark.parametrize("backend", ["bubblewrap", "process"])
def test_it_runs_in_a_sandbox(markdown: Markdown, backend: str) -> None:
    result = run(markdown, backend, "a.md")
    assert (result.rc, result.stdout) == (0, b"<h1>Title</h1>\n"), result


def test_nothing_but_its_own_packages_is_on_its_path(markdown: Markdown) -> None:
    launcher = Path(markdown.package.program(str(markdown.folder)))
    probe = launcher.with_name("probe.py")
    probe.write_text(
        launcher.read_text().replace("(script,) =", "print(*sys.path, sep=chr(10)); sys.exit()\n(script,) =")
    )
    argv = [part.replace(launcher.name, probe.name) for part in markdown.package.command(str(markdown.folder))]
    found = subprocess.run(argv, capture_output=True, text=True, check=True).stdout.split()
    assert [path for path in found if "-packages" in path] == []
    assert found[-1] == str(markdown.folder / SITE)


def test_versions_are_those_of_its_folder(markdown: Markdown) -> None:
    assert markdown.package.versions(markdown.folder) == {"markdown-it-py": "3.0.0"}
    assert markdown.package.versions(markdown.folder / "nowhere") == {"markdown-it-py": ""}
    assert markdown.package.folder_name.startswith(f"3.0.0-{sys.implementation.cache_tag}-")


def test_it_is_compiled(markdown: Markdown) -> None:
    """A sandbox shows the install read-only: what is not compiled by then is compiled in every rollout."""
    sources = list((markdown.folder / SITE).rglob("*.py"))
    assert len(sources) > 20
    assert [s for s in sources if not Path(importlib.util.cache_from_source(s)).exists()] == []
    loads = "import sys, markdown_it; print(markdown_it.__cached__)"
    argv = [sys.executable, "-v", "-c", f"import sys; sys.path.insert(0, {str(markdown.folder / SITE)!r}); {loads}"]
    told = subprocess.run(argv, capture_output=True, text=True, check=True).stderr
    assert f"matches {markdown.folder / SITE}/markdown_it/__init__.py" in told


def test_an_archive_with_another_hash_is_refused(tmp_path: Path) -> None:
    with pytest.raises(HarnessError, match=r"Markdown_it.py 3.0.0 is not the one that was published.*sha256:355"):
        package(tmp_path / "lock.txt", integrity=HASH.replace("3552", "4552")).fetch(tmp_path / "x", tmp_path, print)


def test_what_the_lock_does_not_hold_is_not_installed(tmp_path: Path) -> None:
    package(tmp_path / "lock.txt", LOCK.replace("mdurl==0.1.2\n", "")).fetch(tmp_path / "x", tmp_path, print)
    found = {d.metadata["Name"] for d in metadata.distributions(path=[str(tmp_path / "x" / SITE)])}
    assert found == {"markdown-it-py"}


def test_a_lock_of_another_version_is_refused(tmp_path: Path) -> None:
    with pytest.raises(HarnessError, match=r"lock.txt does not pin markdown-it-py==3.0.0"):
        package(tmp_path / "lock.txt", "mdurl==0.1.2\n").fetch(tmp_path / "x", tmp_path, print)


def test_a_package_that_must_be_built_is_refused(tmp_path: Path) -> None:
    """Nothing of a package runs before it is asked to."""
    with pytest.raises(HarnessError, match=r"pip could not install docopt==0.6.2"):
        PythonPackage("docopt", "0.6.2", "docopt", 1).fetch(tmp_path / "x", tmp_path, print)
