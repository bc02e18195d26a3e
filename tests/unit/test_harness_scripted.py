"""The scripted harness, its agent, and how harnesses are chosen by name."""

from __future__ import annotations

import asyncio

import pytest

from clawgym_env.errors import ConfigError
from clawgym_env.harnesses import HARNESSES, Harness, LaunchContext, ScriptedHarness, get_harness
from clawgym_env.harnesses.scripted_agent import MAX_TURNS
from clawgym_env.sandboxes import ExecResult, SandboxSpec, get_backend
from tests.chat_server import ChatServer, call, say


def rollout(server: ChatServer, backend: str = "process") -> tuple[ExecResult, dict[str, bytes]]:
    async def main() -> tuple[ExecResult, dict[str, bytes]]:
        harness = ScriptedHarness()
        async with await get_backend(backend).create(SandboxSpec(mounts=tuple(harness.mounts()))) as sandbox:
            context = LaunchContext("Write a.", f"{sandbox.base_url}/r/1", "key", "policy", 4096, 99, 30.0)
            launch = harness.launch(context, sandbox)
            async with await asyncio.start_server(server.serve, sock=sandbox.listener):
                result = await sandbox.exec(launch.argv, env=launch.env, stdin=launch.stdin, timeout_s=30.0)
            return result, await sandbox.collect()

    return asyncio.run(main())


@pytest.mark.parametrize("backend", ["bubblewrap", "process"])
def test_writes_files_until_the_model_stops(backend: str) -> None:
    server = ChatServer([call("write_file", path="d/a.txt", content="ä\n"), say("Done.")])
    result, workspace = rollout(server, backend)
    assert (result.rc, result.stdout, result.stderr) == (0, b"", b"")
    assert workspace == {"d/a.txt": "ä\n".encode()}
    first, second = server.requests
    assert server.asked[0][0] == "/r/1/v1/chat/completions"
    assert server.asked[0][1]["authorization"] == "Bearer key"
    assert (first["model"], first["max_tokens"]) == ("policy", 99)
    assert "stream" not in first
    assert [tool["function"]["name"] for tool in first["tools"]] == ["write_file", "finish"]
    assert first["messages"][1] == {"role": "user", "content": "Write a."}
    assert second["messages"][:2] == first["messages"]
    assert second["messages"][2]["tool_calls"] == call("write_file", path="d/a.txt", content="ä\n")["tool_calls"]
    assert second["messages"][3] == {"role": "tool", "tool_call_id": "call_1", "content": "wrote 2 characters"}


def test_requests_are_the_same_bytes_every_time_and_everywhere() -> None:
    asked = []
    for backend in ("process", "bubblewrap", "process"):
        server = ChatServer([call("write_file", path="x", content="1"), call("finish")])
        assert rollout(server, backend)[0].rc == 0
        asked.append([body for _, _, body in server.asked])
    assert asked[0] == asked[1] == asked[2]
    assert len(asked[0]) == 2


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (call("write_file", path="../x", content=""), "error: path is outside the workspace"),
        (call("write_file", path="/tmp/x", content=""), "error: path is outside the workspace"),
        (call("write_file", path=".", content=""), "error: path is outside the workspace"),
        (call("write_file", path="x"), "error: path and content must be strings"),
        (call("write_file", path="a\0b", content=""), "error: embedded null byte"),
        (call("rm"), "error: unknown tool rm"),
        ({"tool_calls": [{"function": {"name": "finish", "arguments": "{"}}]}, None),
        (
            {"tool_calls": [{"id": "c", "function": {"name": "x", "arguments": "{"}}]},
            "error: arguments are not valid JSON",
        ),
        (
            {"tool_calls": [{"id": "c", "function": {"name": "x", "arguments": "1"}}]},
            "error: arguments are not a JSON object",
        ),
    ],
)
def test_bad_calls_are_answered_not_fatal(answer: dict[str, object], said: str | None) -> None:
    server = ChatServer([{"role": "assistant", **answer}, say("Done.")])
    result, workspace = rollout(server)
    assert result.rc == 0, result.stderr
    assert workspace == {}
    if said is None:
        assert len(server.asked) == 1
    else:
        assert server.requests[1]["messages"][-1]["content"] == said


def test_endless_model_is_cut_off() -> None:
    server = ChatServer([call("write_file", path="x", content="1")])
    result, _ = rollout(server)
    assert result.rc == 1
    assert len(server.asked) == MAX_TURNS
    assert ScriptedHarness().exit_error(result) == f"scripted agent: the model did not finish within {MAX_TURNS} turns"


def test_refused_request_is_one_line_and_exit_code_one() -> None:
    result, _ = rollout(ChatServer([500]))
    assert result.rc == 1
    assert result.stderr.count(b"\n") == 1
    error = ScriptedHarness().exit_error(result)
    assert error is not None
    assert "status 500" in error
    assert "refused on purpose" in error


@pytest.mark.parametrize("name", ["pi", "scripted"])
def test_exit_errors(name: str) -> None:
    harness = get_harness(name)
    assert isinstance(harness, Harness)
    assert harness.info.name == name
    assert harness.exit_error(ExecResult(0, b"", b"warning")) is None
    assert "signal 11" in (harness.exit_error(ExecResult(-11, b"", b"")) or "")
    assert harness.exit_error(ExecResult(2, b"", b"first\nlast\n")) == "last"
    assert "exit code 3" in (harness.exit_error(ExecResult(3, b"", b"")) or "")


def test_names_and_settings_are_checked() -> None:
    assert set(HARNESSES) >= {"pi", "scripted", "command"}
    with pytest.raises(ConfigError, match="did you mean scripted"):
        get_harness("scriptd")
    with pytest.raises(ConfigError, match=r"unknown harness .* There are .*\bpi, "):
        get_harness("zzz")
    with pytest.raises(ConfigError, match="thinking"):
        get_harness("pi", thinking="a lot")
    with pytest.raises(ConfigError, match="colour"):
        get_harness("scripted", colour="red")
