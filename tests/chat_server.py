"""A chat-completions endpoint with canned answers, served on a sandbox's listener."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any


def call(name: str, **arguments: object) -> dict[str, Any]:
    """An answer that calls one tool."""
    function = {"name": name, "arguments": json.dumps(arguments)}
    return {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "call_1", "type": "function", "function": function}],
    }


def say(text: str) -> dict[str, Any]:
    """An answer in text."""
    return {"role": "assistant", "content": text}


@dataclass
class ChatServer:
    """Answers request after request, the last answer again and again; an int answers with that HTTP status.

    Attributes:
        asked: (path, headers, body) of each request.
    """

    answers: Sequence[dict[str, Any] | int]
    delay_s: float = 0.0
    asked: list[tuple[str, dict[str, str], bytes]] = field(default_factory=list)

    @property
    def requests(self) -> list[dict[str, Any]]:
        return [json.loads(body) for _, _, body in self.asked]

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
            headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in head[1:])}
            body = await reader.readexactly(int(headers.get("content-length", "0")))
            answer = self.answers[min(len(self.asked), len(self.answers) - 1)]
            self.asked.append((head[0].split()[1], headers, body))
            await asyncio.sleep(self.delay_s)
            writer.write(_response(answer, stream=bool(json.loads(body).get("stream"))))
            await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError):
            return
        finally:
            writer.close()


def _response(answer: dict[str, Any] | int, *, stream: bool) -> bytes:
    if isinstance(answer, int):
        return _http(answer, "application/json", b'{"error": {"message": "refused on purpose", "type": "test"}}')
    finish = "tool_calls" if answer.get("tool_calls") else "stop"
    usage = {"prompt_tokens": 10, "completion_tokens": 2, "total_tokens": 12}
    common = {"id": "x", "created": 0, "model": "policy"}
    if not stream:
        choice = {"index": 0, "message": answer, "finish_reason": finish}
        whole = {**common, "object": "chat.completion", "choices": [choice], "usage": usage}
        return _http(200, "application/json", json.dumps(whole).encode())
    calls = [{"index": at, **item} for at, item in enumerate(answer.get("tool_calls") or [])]
    delta = {**answer, "tool_calls": calls} if calls else answer
    chunks: list[dict[str, Any]] = [
        {"choices": [{"index": 0, "delta": delta, "finish_reason": None}]},
        {"choices": [{"index": 0, "delta": {}, "finish_reason": finish}]},
        {"choices": [], "usage": usage},
    ]
    lines = [json.dumps({**common, "object": "chat.completion.chunk", **chunk}) for chunk in chunks]
    return _http(200, "text/event-stream", "".join(f"data: {line}\n\n" for line in [*lines, "[DONE]"]).encode())


def _http(status: int, kind: str, body: bytes) -> bytes:
    head = f"HTTP/1.1 {status} X\r\ncontent-type: {kind}\r\ncontent-length: {len(body)}\r\nconnection: close\r\n\r\n"
    return head.encode() + body
