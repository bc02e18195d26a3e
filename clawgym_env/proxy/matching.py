"""Which committed call does a request continue? A proposal from messages alone.

Invariant: this only proposes. Harnesses do not echo byte for byte (``docs/harnesses.md``), so messages are compared in
a canonical form; whether the tokens agree is decided by the renderer and the tree.

A conversation's key is a hash chain over its tools and canonical messages, so that a call costs one pass over its
request and does not grow with the number of calls.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

import orjson

from clawgym_env.types import Message, ToolSpec
from clawgym_env.wire.openai_chat import tool_json


@dataclass(frozen=True, slots=True)
class Proposal:
    """What a request seems to continue.

    Attributes:
        parent: The call whose history, answer included, is the longest prefix of the request; ``None`` where there is
            none.
        shared: How many of the request's messages are that history.
        tolerated: What had to be overlooked to say so.
        tip: Key of the whole request, to which :meth:`History.commit` adds the answer.
    """

    parent: int | None
    shared: int
    tolerated: frozenset[str]
    tip: bytes


class History:
    """What the committed calls of one rollout looked like as messages."""

    def __init__(self) -> None:
        self._calls: dict[bytes, int] = {}
        self._minted: dict[str, Message] = {}

    def commit(self, call_id: int, tip: bytes, reply: Message) -> None:
        """Remembers a call; of several with equal messages the latest is the one a harness goes on with."""
        for call in reply.tool_calls:
            self._minted[call.id] = reply
        self._calls[_digest(tip, canonical(reply))] = call_id

    def propose(self, tools: Sequence[ToolSpec], messages: Sequence[Message]) -> Proposal:
        """Matches a request against the committed calls."""
        tolerated: set[str] = set()
        parent, shared = None, 0
        key = _digest(b"", [tool_json(t) for t in tools])
        for i, message in enumerate(messages, start=1):
            key = _digest(key, canonical(self._original(message, tolerated)))
            if key in self._calls:
                parent, shared = self._calls[key], i
        return Proposal(parent, shared, frozenset(tolerated if parent is not None else ()), key)

    def _original(self, message: Message, tolerated: set[str]) -> Message:
        """Our own answer in place of its echo, recognised by the call ids that we minted."""
        if message.role != "assistant" or not message.tool_calls:
            return message
        original = self._minted.get(message.tool_calls[0].id)
        if original is None or [c.id for c in original.tool_calls] != [c.id for c in message.tool_calls]:
            return message
        if canonical(original) != canonical(message):
            tolerated.add("echo of a tool call differs from what was sampled")
        return original


def canonical(message: Message) -> list[object]:
    """What identifies a message: role, trimmed text, tool names and parsed arguments; no ids, no reasoning."""
    calls = [[c.name, c.arguments if isinstance(c.arguments, str) else dict(c.arguments)] for c in message.tool_calls]
    return [message.role, message.content.strip(), calls]


def _digest(previous: bytes, value: object) -> bytes:
    data = orjson.dumps(value, option=orjson.OPT_SORT_KEYS)
    return blake2b(previous + data, digest_size=16).digest()
