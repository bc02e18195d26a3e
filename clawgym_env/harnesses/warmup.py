"""Runs a freshly installed harness once, against canned answers on loopback.

Invariant: no network and no model: the run proves that the harness works here, and leaves its compiled code behind.
It is an ordinary launch in a process sandbox, so that it takes the very code paths that rollouts take.
"""

from __future__ import annotations

import asyncio
import json
import re

from clawgym_env.errors import HarnessError, SandboxError
from clawgym_env.harnesses.base import Harness, LaunchContext
from clawgym_env.sandboxes.base import SandboxSpec
from clawgym_env.sandboxes.process import ProcessBackend

TIMEOUT_S = 120.0
ARGUMENTS = '{"command": "echo warm > warm.txt"}'
TOOL_CALL = {"index": 0, "id": "call_1", "type": "function", "function": {"name": "bash", "arguments": ARGUMENTS}}
ANSWERS: tuple[dict[str, object], ...] = (
    {"role": "assistant", "tool_calls": [TOOL_CALL]},
    {"role": "assistant", "content": "Done."},
)


def run_once(harness: Harness) -> None:
    """Launches a harness whose tool ``bash`` writes a file, and checks that it did.

    Raises:
        HarnessError: it does not run here.
    """
    try:
        asyncio.run(_run_once(harness))
    except SandboxError as error:
        raise HarnessError(f"{harness.info.name} could not be tried: {error}") from error


async def _run_once(harness: Harness) -> None:
    async with await ProcessBackend().create(SandboxSpec(mounts=tuple(harness.mounts()))) as sandbox:
        context = LaunchContext("Warm up.", sandbox.base_url, "warm-up", "policy", 32768, 1024, TIMEOUT_S)
        launch = harness.launch(context, sandbox)
        for path, content in launch.files.items():
            await sandbox.put(path, content)
        server = await asyncio.start_server(_Canned().serve, sock=sandbox.listener)
        async with server:
            result = await sandbox.exec(launch.argv, env=launch.env, stdin=launch.stdin, timeout_s=TIMEOUT_S)
        if (await sandbox.collect()).get("warm.txt") != b"warm\n":
            said = (result.stderr or result.stdout).decode(errors="replace").strip()[-500:]
            raise HarnessError(f"{harness.info.name} does not run here (exit code {result.rc}): {said}")


class _Canned:
    """Answers the first request with a tool call and the others with text, as chat completions over SSE."""

    def __init__(self) -> None:
        self._asked = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection, one request."""
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            length = re.search(rb"content-length: *(\d+)", head, re.IGNORECASE)
            await reader.readexactly(int(length[1]) if length else 0)
            body = _events(ANSWERS[min(self._asked, 1)])
            self._asked += 1
            answer = (
                b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\ncontent-length: %d\r\n\r\n"
            )
            writer.write(answer % len(body) + body)
            await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError):
            return
        finally:
            writer.close()


def _events(delta: dict[str, object]) -> bytes:
    """One whole answer as server-sent events."""
    finish = "tool_calls" if "tool_calls" in delta else "stop"
    usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
    chunks: list[dict[str, object]] = [
        {"choices": [{"index": 0, "delta": delta, "finish_reason": None}]},
        {"choices": [{"index": 0, "delta": {}, "finish_reason": finish}]},
        {"choices": [], "usage": usage},
    ]
    common: dict[str, object] = {"id": "warm-up", "object": "chat.completion.chunk", "created": 0, "model": "policy"}
    lines = [json.dumps(common | chunk) for chunk in chunks]
    return "".join(f"data: {line}\n\n" for line in [*lines, "[DONE]"]).encode()
