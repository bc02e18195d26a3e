"""The generic harness: its settings, and what real programs make of them."""

from __future__ import annotations

import asyncio
import json
import sys
import textwrap
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gymnasium
import pytest
from hypothesis import given
from hypothesis import strategies as st

import clawgym_env  # noqa: F401 - registers the environments
from clawgym_env.dialect import Tolerance
from clawgym_env.engines.scripted import ScriptedEngine
from clawgym_env.errors import ConfigError
from clawgym_env.harnesses import CommandHarness, Harness, LaunchContext, get_harness
from clawgym_env.pool import open_runner
from clawgym_env.rollout import Rollout, RolloutSettings, RolloutSpec
from clawgym_env.sandboxes import ExecResult, Limits, SandboxSpec, get_backend
from clawgym_env.types import Status
from tests.rollout_world import PRELUDE, RENDERER, task

CONTEXT = LaunchContext("Do {model}.\n", "http://127.0.0.1:8080/rollout/7", "key-7", "policy", 4096, 99, 30.0)
SHOW = """
import json, os, sys
env = {k: v for k, v in os.environ.items() if k.startswith("MY_")}
print(json.dumps([sys.argv[1:], env, sys.stdin.read(), open(os.path.expanduser("~/.conf/agent.json")).read()]))
"""


def launched(harness: Harness, backend: str = "bubblewrap") -> ExecResult:
    """One launch without a model."""

    async def main() -> ExecResult:
        async with await get_backend(backend).create(SandboxSpec(mounts=tuple(harness.mounts()))) as box:
            launch = harness.launch(CONTEXT, box)
            for path, content in launch.files.items():
                await box.put(path, content)
            return await box.exec(launch.argv, env=launch.env, stdin=launch.stdin, timeout_s=30.0)

    return asyncio.run(main())


def rollout(source: str, *, limits: Limits | None = None, **settings: Any) -> Rollout:
    """One rollout of a program that is given on its command line."""

    async def main() -> Rollout:
        argv = ("/usr/bin/python3", "-c", PRELUDE + textwrap.dedent(source), "{base_url}")
        engine = ScriptedEngine(lambda request, turn: RENDERER.encode_reply("fine"))
        quick = RolloutSettings(timeout_s=20.0, limits=limits or Limits())
        async with open_runner(engine, RENDERER, get_backend("bubblewrap"), quick) as runner:
            harness = CommandHarness(argv=argv, **settings)
            return await runner.run(RolloutSpec("r0", task(), harness, "g"))

    return asyncio.run(main())


@pytest.mark.parametrize("backend", ["bubblewrap", "process"])
def test_settings_reach_the_program(backend: str, tmp_path: Path) -> None:
    program = tmp_path / "show.py"
    program.write_text(SHOW)
    tmp_path.chmod(0o755)
    harness = CommandHarness(
        argv=("/usr/bin/python3", "{agent}", "--url={openai_base_url}", "{instruction}", "{{model}}", "${model}"),
        env={"MY_KEY": "{api_key}", "MY_URL": "{base_url}/v1beta"},
        files={"~/.conf/agent.json": '{"model": "{model}", "limits": {"out": {max_tokens}, "all": {max_context}}}'},
        mounts={"agent": program},
        stdin="none",
    )
    result = launched(harness, backend)
    assert result.rc == 0, result.stderr
    argv, env, stdin, config = json.loads(result.stdout)
    assert argv == [f"--url={CONTEXT.base_url}/v1", "Do {model}.\n", "{model}", "${model}"]
    assert env == {"MY_KEY": "key-7", "MY_URL": f"{CONTEXT.base_url}/v1beta"}
    assert stdin == ""
    assert json.loads(config) == {"model": "policy", "limits": {"out": 99, "all": 4096}}


def test_a_program_is_found_on_the_path_and_reads_the_instruction() -> None:
    assert launched(CommandHarness(argv=("cat",))).stdout == b"Do {model}.\n"


class _Inside:
    """As much of a sandbox as filling in takes."""

    workspace, home = "/workspace", "/home/agent"


@given(st.text())
def test_nothing_in_a_task_is_read_as_a_placeholder(instruction: str) -> None:
    context = LaunchContext(instruction, "http://x", "key", "policy", 1, 1, 1.0)
    launch = CommandHarness(argv=("{instruction}{model}",)).launch(context, _Inside())  # type: ignore[arg-type]
    assert launch.argv == [instruction + "policy"]


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"argv": ("x", "{base_ur}")}, "{base_ur} stands for nothing; there are api_key, base_url"),
        ({"argv": ("x",), "env": {"A": "{Model}{modle}"}}, "{{modle}} for itself"),
        ({"argv": ("x",), "files": {"a": "{agent}"}}, "{agent} stands for nothing"),
        ({"argv": ("x",), "mounts": {"model": "/usr"}}, "model mean something else already"),
        ({"argv": ("x",), "mounts": {"Agent-1": "/usr"}}, "unlike Agent-1"),
        ({"argv": ("x",), "stdin": "file"}, "stdin"),
        ({"argv": ("x",), "name": "a/b"}, "name"),
        ({"argv": "my-agent --now"}, "argv"),
        ({"argv": ("x",), "shell": True}, "shell"),
        ({"argv": ("x",), "tolerates": ["anything"]}, "tolerates"),
    ],
)
def test_wrong_settings_are_refused_by_name(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        get_harness("command", **settings)
    assert says in str(caught.value)


def test_what_is_missing_is_said_before_a_rollout_begins() -> None:
    with pytest.raises(ConfigError, match="needs a command line"):
        gymnasium.make("ClawGym/Command-v0")
    with pytest.raises(ConfigError, match=r"mounts\.agent: there is no /nowhere"):
        gymnasium.make("ClawGym/Command-v0", harness_options={"argv": ["{agent}"], "mounts": {"agent": "/nowhere"}})


def test_the_environment_runs_a_command_line() -> None:
    source = PRELUDE + "open('answer.txt', 'w').write(ask(sys.stdin.read()))"
    argv = ["/usr/bin/python3", "-c", source, "{base_url}"]
    env = gymnasium.make("ClawGym/Command-Builtin-v0", harness_options={"argv": argv}, disable_env_checker=True)
    try:
        _, info = env.reset(options={"task_id": "builtin/count/1/train/00017"})
        assert "piano" in info["instruction"]
        inner: Any = env.unwrapped
        _, reward, terminated, truncated, info = env.step(inner.encode("3"))
        assert (terminated, truncated, info["status"]) == (True, False, "completed")
        assert reward in (0.0, 1.0)
    finally:
        env.close()


@pytest.mark.parametrize(
    ("source", "success", "status", "says"),
    [
        ("ask()", (0,), Status.COMPLETED, ""),
        ("ask(); sys.exit(3)", (0,), Status.HARNESS_FAILED, "mine ended with exit code 3 and said nothing"),
        ("ask(); sys.exit(3)", (0, 3), Status.COMPLETED, ""),
        ("ask(); sys.exit('no more')", (0,), Status.HARNESS_FAILED, "exit code 1: no more"),
        ("ask(); os.kill(os.getpid(), 9)", (0,), Status.HARNESS_CRASHED, "mine was killed by signal 9"),
        ("sys.exit(0)", (0,), Status.NO_CALLS, "exited 0"),
    ],
)
def test_what_an_exit_means(source: str, success: Sequence[int], status: Status, says: str) -> None:
    done = rollout(source, success=frozenset(success), name="mine")
    assert (done.status, done.harness) == (status, "mine")
    assert says in done.detail


def test_a_flood_a_leftover_and_a_stray_are_contained() -> None:
    source = """
        ask()
        for _ in range(3000):
            os.write(1, b'x' * 10000)
        if os.fork() == 0:
            os.setsid()
            os.execvp('sleep', ['sleep', '7351234.25'])
        refused = 0
        for place in ('/usr/evil', '/opt/evil', '/etc/passwd'):
            try:
                open(place, 'w')
            except OSError:
                refused += 1
        sys.exit(refused)
    """
    done = rollout(source, success=frozenset({3}), limits=Limits(output_bytes=4096))
    assert done.status is Status.COMPLETED, done.detail
    left = [p for p in Path("/proc").glob("[0-9]*/cmdline") if b"7351234.25" in _read(p)]
    assert left == []


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


def test_tolerances_are_settings() -> None:
    harness = get_harness("command", argv=["x"], tolerates=["rewritten arguments"])
    assert harness.info.dialect.tolerates == {Tolerance.REWRITTEN_ARGUMENTS}


def test_a_harness_of_anyone_s_is_named_by_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("somebodys_agent")
    module.mine = lambda greeting="hi": CommandHarness(argv=("echo", greeting))  # type: ignore[attr-defined]
    module.wrong = lambda: object()  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "somebodys_agent", module)
    assert get_harness("somebodys_agent:mine", greeting="ho").argv == ("echo", "ho")  # type: ignore[attr-defined]
    for name, says in [
        ("somebodys_agent:yours", "cannot be imported"),
        ("nobodys_agent:mine", "No module named 'nobodys_agent'"),
        ("somebodys_agent:wrong", "object lacks info, mounts, launch, exit_error"),
        ("somebodys_agent:", "unknown harness"),
    ]:
        with pytest.raises(ConfigError, match=says):
            get_harness(name)
    with pytest.raises(ConfigError, match="volume"):
        get_harness("somebodys_agent:mine", volume=11)
