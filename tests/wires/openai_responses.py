"""The Responses API as its wire's tests write it: requests, items, streams, and what is read of them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import orjson
import pytest
from openai.types.responses import ResponseStreamEvent
from pydantic import TypeAdapter

from clawgym_env.errors import WireError
from clawgym_env.types import ChatRequest, Message
from clawgym_env.wire import openai_responses as wire
from clawgym_env.wire.base import Reply, Usage

Json = dict[str, Any]
USER: Json = {"role": "user", "content": "hi"}
SCHEMA: Json = {"type": "object", "properties": {"command": {"type": "string"}}}
BASH: Json = {"type": "function", "name": "bash", "description": "run", "parameters": SCHEMA, "strict": False}
GRAMMAR: Json = {"type": "grammar", "syntax": "lark", "definition": "start: /.+/"}
PATCH: Json = {"type": "custom", "name": "apply_patch", "description": "edit", "format": GRAMMAR}
AGENTS: Json = {
    "type": "namespace",
    "name": "agents",
    "description": "Sub-agents.",
    "tools": [{**BASH, "name": "spawn", "description": "begin"}, {**BASH, "name": "wait"}, {**PATCH, "name": "tell"}],
}
ENCRYPTED = "reasoning.encrypted_content"
#: The whole stream of the SDK; its union is told apart by ``type``.
EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)


def parse(**fields: Any) -> ChatRequest:
    return wire.parse_request(orjson.dumps({"model": "policy", "input": [USER], **fields}), {})


def read(*items: Json) -> tuple[Message, ...]:
    """Messages of a conversation, without the user message that a request must end with."""
    return parse(input=[*items, USER]).messages[:-1]


def refusal(**fields: Any) -> WireError:
    with pytest.raises(WireError) as caught:
        parse(**fields)
    assert caught.value.status == 400
    return caught.value


def message(text: str, **more: Any) -> Json:
    part = {"type": "output_text", "text": text, "annotations": []}
    return {"type": "message", "role": "assistant", "content": [part], **more}


def thought(text: str, **more: Any) -> Json:
    return {"type": "reasoning", "id": "rs_9", "summary": [{"type": "summary_text", "text": text}], **more}


def call(ident: str, arguments: str = '{"command": "ls"}', **more: Any) -> Json:
    return {"type": "function_call", "call_id": ident, "name": "bash", "arguments": arguments, **more}


def output(ident: str, said: Any = "ok", kind: str = "function_call_output") -> Json:
    return {"type": kind, "call_id": ident, "output": said}


def reply(said: Message, finish: Any = "stop", **fields: Any) -> Reply:
    return Reply(7, 1_700_000_000, parse(tools=[BASH, PATCH], **fields), said, finish, Usage(11, 5, 3))


def events(raw: Iterable[bytes], start: int = 0) -> list[Json]:
    """Payloads of a stream, checked for its form."""
    out = []
    for number, event in enumerate(raw, start):
        name, data, *rest = event.split(b"\n")
        payload = orjson.loads(data.removeprefix(b"data: "))
        assert rest == [b"", b""] and name == b"event: " + payload["type"].encode()
        assert payload["sequence_number"] == number
        EVENT.validate_python(payload)
        out.append(payload)
    return out


def streamed(answer: Reply) -> list[Json]:
    deltas = list(wire.stream_deltas(answer))
    (end,) = wire.stream_end(answer)
    return events([*deltas, end])
