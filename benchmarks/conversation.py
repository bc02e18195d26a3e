"""A harness's side of a rollout: request bodies whose history grows by an answer and its tools' results."""

from __future__ import annotations

import json
import random
from typing import Any

from serving import Answer

_TEXT = (
    "error file line value test path name list count data index total order user node state config result build run "
    "line read write open close main src docs log json python return class def import from with for while if else"
)
WORDS = _TEXT.split()
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "bash",
            "description": "Runs a command.",
            "parameters": {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]},
        },
    }
]


def text(rng: random.Random, size: int) -> str:
    """Words of about ``size`` characters."""
    out: list[str] = []
    while size > 0:
        out.append(rng.choice(WORDS))
        size -= len(out[-1]) + 1
    return " ".join(out)


class Conversation:
    """What one rollout's harness has seen so far; ``shown`` is the size of a tool's result in characters."""

    def __init__(self, name: str, *, opening: int, shown: int, stream: bool = False) -> None:
        self.name = name
        self._stream = stream
        self._shown = shown
        self._rng = random.Random(name)
        self._messages: list[dict[str, Any]] = []
        self.restart(opening)

    def restart(self, opening: int) -> None:
        """Begins a history anew, as compaction does."""
        self._messages = [
            {"role": "system", "content": "You are an agent. " + text(self._rng, opening // 2)},
            {"role": "user", "content": text(self._rng, opening // 2)},
        ]

    def body(self) -> bytes:
        """The next request's body."""
        data = {"model": "policy", "messages": self._messages, "tools": TOOLS, "stream": self._stream}
        return json.dumps(data, separators=(",", ":")).encode()

    def hear(self, answer: Answer) -> None:
        """Takes an answer and runs its tools."""
        message = _streamed(answer.body) if self._stream else json.loads(answer.body)["choices"][0]["message"]
        self._messages.append({key: message[key] for key in ("role", "content", "tool_calls") if message.get(key)})
        for call in message.get("tool_calls") or []:
            result = text(self._rng, self._shown)
            self._messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})
        if not message.get("tool_calls"):
            self._messages.append({"role": "user", "content": text(self._rng, self._shown)})


def events(body: bytes) -> list[bytes]:
    """The server-sent events of a stream."""
    return [event for event in body.split(b"\n\n") if event.startswith(b"data:")]


def _streamed(body: bytes) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": "", "tool_calls": []}
    for event in events(body):
        data = event.removeprefix(b"data:").strip()
        choices = json.loads(data)["choices"] if data != b"[DONE]" else []
        for choice in choices:
            message["content"] += choice["delta"].get("content") or ""
            for call in choice["delta"].get("tool_calls", []):
                message["tool_calls"].append({key: value for key, value in call.items() if key != "index"})
    return message
