"""Runs a freshly installed harness once, against canned answers on loopback.

Invariant: no network and no model: the run proves that the harness works here, and leaves its compiled code behind.
It is an ordinary launch in a process sandbox, so that it takes the very code paths that rollouts take.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping
from dataclasses import replace
from urllib.parse import parse_qsl, urlsplit

import orjson

from clawgym_env.errors import HarnessError, SandboxError, WireError
from clawgym_env.harnesses.base import Harness, LaunchContext, Shell
from clawgym_env.sandboxes.base import SandboxSpec
from clawgym_env.sandboxes.process import ProcessBackend
from clawgym_env.types import ChatRequest, Message
from clawgym_env.wire import anthropic_messages, gemini, openai_chat, openai_responses
from clawgym_env.wire.base import Reply, Usage, Wire

TIMEOUT_S = 120.0
COMMAND = "echo warm > warm.txt"
GEMINI_PATH = re.compile(r"/models/(?P<model>[^/:]+):(?P<method>\w+)$")
WIRES: Mapping[str, Wire] = {
    "/v1/chat/completions": openai_chat,
    "/v1/responses": openai_responses,
    "/v1/messages": anthropic_messages,
}


def run_once(harness: Harness) -> None:
    """Launches a harness, has its shell tool write a file, and checks that it did.

    Raises:
        HarnessError: it does not run here.
    """
    try:
        asyncio.run(_run_once(harness))
    except SandboxError as error:
        raise HarnessError(f"{harness.info.name} could not be tried: {error}") from error


async def _run_once(harness: Harness) -> None:
    async with await ProcessBackend().create(SandboxSpec(mounts=tuple(harness.mounts()))) as sandbox:
        context = LaunchContext("Warm up.", sandbox.base_url, "warm-up", "policy", 131_072, 8_192, TIMEOUT_S)
        launch = harness.launch(context, sandbox)
        for path, content in launch.files.items():
            await sandbox.put(path, content)
        canned = _Canned(harness.info.shell)
        server = await asyncio.start_server(canned.serve, sock=sandbox.listener, limit=1 << 20)
        async with server:
            result = await sandbox.exec(launch.argv, env=launch.env, stdin=launch.stdin, timeout_s=TIMEOUT_S)
        if (await sandbox.collect()).get("warm.txt") != b"warm\n":
            said = (result.stderr or result.stdout).decode(errors="replace").strip()[-500:]
            why = "; ".join(x for x in (harness.exit_error(result), canned.refused, said) if x)
            raise HarnessError(f"{harness.info.name} does not run here (exit code {result.rc}): {why}")


class _Canned:
    """Answers the first request that offers the shell with a call of it, and the others with the end.

    Attributes:
        refused: What was wrong with a request, for a person.
    """

    def __init__(self, shell: Shell | None) -> None:
        self._shell = shell
        self._called = False
        self._answered = 0
        self.refused: str | None = None

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection, one request."""
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            length = re.search(rb"content-length: *(\d+)", head, re.IGNORECASE)
            body = await reader.readexactly(int(length[1]) if length else 0)
            status, kind, answer = self._answer(head.split()[1].decode("latin-1"), body)
            lines = [b"HTTP/1.1 %d X" % status, b"connection: close", b"content-type: " + kind]
            writer.write(b"\r\n".join([*lines, b"content-length: %d" % len(answer), b"", answer]))
            await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError):
            return
        finally:
            writer.close()

    def _answer(self, target: str, body: bytes) -> tuple[int, bytes, bytes]:
        """Status, content type and body of an answer."""
        wire, params = _wire(target)
        if wire is None:
            return 404, b"application/json", b"{}"
        try:
            request = wire.parse_request(body, params)
        except WireError as error:
            self.refused = f"a request was refused: {error}"
            return error.status, b"application/json", orjson.dumps(wire.render_error(error))
        self._answered += 1
        reply = Reply(self._answered, 0, request, self._message(request), "stop", Usage(1, 1, 0))
        if not request.stream:
            return 200, b"application/json", orjson.dumps(wire.render_reply(reply))
        return 200, wire.stream_type(request), b"".join([*wire.stream_deltas(reply), *wire.stream_end(reply)])

    def _message(self, request: ChatRequest) -> Message:
        shell, offered = self._shell, [tool.name for tool in request.tools]
        if shell is None or shell.tool not in offered:
            if offered and shell is not None:
                self.refused = f"it offers {', '.join(offered)}, and no {shell.tool!r} as HarnessInfo.shell says"
            return Message("assistant", "Done.")
        if self._called:
            said = shell.last("Done.")
            return replace(said, tool_calls=tuple(replace(call, id="end") for call in said.tool_calls))
        self._called = True
        return Message("assistant", tool_calls=(replace(shell.call(COMMAND), id="call1x0"),))


def _wire(target: str) -> tuple[Wire | None, Mapping[str, str]]:
    """The wire that a request's path belongs to, and what the path says."""
    parts = urlsplit(target)
    of_gemini = GEMINI_PATH.search(parts.path)
    if of_gemini is not None:
        return gemini, dict(parse_qsl(parts.query)) | of_gemini.groupdict()
    return next((wire for end, wire in WIRES.items() if parts.path.endswith(end)), None), {}
