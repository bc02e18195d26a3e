"""The real pi on the real Node in real sandboxes, against canned answers on the passed listener."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from pathlib import Path

import pytest

from clawgym_env.harnesses import Harness, LaunchContext, get_harness, install
from clawgym_env.sandboxes import ExecResult, SandboxSpec, get_backend
from tests.chat_server import ChatServer, call, say

TASK = "@first --help: write 'größe' into a file\nand then stop."


@pytest.fixture(scope="module", autouse=True)
def pi_folder() -> Path:
    return install.ensure("pi", print)


def rollout(
    server: ChatServer,
    harness: Harness,
    *,
    backend: str = "bubblewrap",
    env: Mapping[str, str] | None = None,
    timeout_s: float = 60.0,
) -> tuple[ExecResult, dict[str, bytes]]:
    """One launch; its result and the workspace it left."""

    async def main() -> tuple[ExecResult, dict[str, bytes]]:
        spec = SandboxSpec(files={"given.txt": b"given\n"}, mounts=tuple(harness.mounts()))
        async with await get_backend(backend).create(spec) as sandbox:
            context = LaunchContext(TASK, f"{sandbox.base_url}/rollout/7", "key-7", "policy", 32768, 512, timeout_s)
            launch = harness.launch(context, sandbox)
            for path, content in launch.files.items():
                await sandbox.put(path, content)
            async with await asyncio.start_server(server.serve, sock=sandbox.listener):
                result = await sandbox.exec(
                    launch.argv, env={**launch.env, **(env or {})}, stdin=launch.stdin, timeout_s=timeout_s
                )
            await sandbox.kill_all()
            return result, await sandbox.collect()

    return asyncio.run(main())


@pytest.mark.parametrize("backend", ["bubblewrap", "process"])
def test_pi_calls_a_tool_in_the_workspace(backend: str) -> None:
    server = ChatServer([call("bash", command="cat given.txt; echo made > made.txt"), say("All done.")])
    harness = get_harness("pi")
    result, workspace = rollout(server, harness, backend=backend)
    assert harness.exit_error(result) is None
    assert result.stdout == b"All done.\n"
    assert workspace == {"given.txt": b"given\n", "made.txt": b"made\n"}
    assert [path for path, _, _ in server.asked] == ["/rollout/7/v1/chat/completions"] * 2
    assert {headers["authorization"] for _, headers, _ in server.asked} == {"Bearer key-7"}
    first, second = server.requests
    assert first["model"] == "policy"
    assert first["stream"] is True
    assert first["max_completion_tokens"] == 512
    assert "store" not in first
    assert [tool["function"]["name"] for tool in first["tools"]] == ["read", "bash", "edit", "write"]
    assert first["messages"][1]["content"] == [{"type": "text", "text": TASK}]
    assert second["messages"][:2] == first["messages"]
    assert second["messages"][-1]["content"] == "given\n"


def test_first_requests_are_the_same_bytes_and_name_fixed_paths() -> None:
    asked = []
    for _ in range(2):
        server = ChatServer([say("Nothing to do.")])
        rollout(server, get_harness("pi"))
        asked.append(server.asked[0][2])
    assert asked[0] == asked[1]
    system = json.loads(asked[0])["messages"][0]["content"]
    assert "/opt/clawgym/pi/node_modules/@earendil-works/pi-coding-agent/docs" in system
    assert "<cwd>\n/workspace\n</cwd>" in system
    assert str(install.cache_folder()) not in system


@pytest.mark.parametrize("backend", ["bubblewrap", "process"])
def test_compile_cache_is_read(backend: str) -> None:
    """Every module comes out of the cache that the install filled, for the agent's uid and at its paths."""
    server = ChatServer([call("bash", command="true"), say("Done.")])
    result, _ = rollout(server, get_harness("pi"), backend=backend, env={"NODE_DEBUG_NATIVE": "COMPILE_CACHE"})
    said = (result.stdout + result.stderr).decode(errors="replace")
    assert said.count("was accepted") >= 30
    assert "was not initialized" not in said
    assert "rejected" not in said


@pytest.mark.parametrize("status", [400, 429, 500])
def test_refused_request_ends_the_run_without_a_retry(status: int) -> None:
    server = ChatServer([status])
    harness = get_harness("pi")
    result, _ = rollout(server, harness)
    error = harness.exit_error(result)
    assert error is not None
    assert "refused on purpose" in error
    assert len(server.asked) == 1


def test_slow_answers_are_waited_for_and_timeouts_kill() -> None:
    patient = ChatServer([say("Late.")], delay_s=2.0)
    result, _ = rollout(patient, get_harness("pi"))
    assert result.stdout == b"Late.\n"
    stuck = ChatServer([say("Never.")], delay_s=60.0)
    harness = get_harness("pi")
    result, _ = rollout(stuck, harness, timeout_s=3.0)
    assert result.timed_out
    assert harness.exit_error(result) == "pi was killed by signal 9"


def test_settings_reach_pi() -> None:
    server = ChatServer([say("Fine.")])
    harness = get_harness(
        "pi", tools=("read", "bash"), thinking="low", extra_args=("--append-system-prompt", "BE KIND")
    )
    rollout(server, harness)
    (request,) = server.requests
    assert [tool["function"]["name"] for tool in request["tools"]] == ["read", "bash"]
    assert request["reasoning_effort"] == "low"
    assert "BE KIND" in request["messages"][0]["content"]


def test_installed_pi_is_found(pi_folder: Path) -> None:
    package = install.PACKAGES["pi"]
    manifest = pi_folder / "node_modules" / package.package / "package.json"
    assert json.loads(manifest.read_text())["version"] == package.version
    assert install.installed("pi") == pi_folder
    assert Path(package.program(str(pi_folder))).is_file()
