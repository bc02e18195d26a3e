"""Anthropic's API as its wire's tests write it: requests, blocks, and what is read of them."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from clawgym_env.errors import WireError
from clawgym_env.types import ChatRequest, Message
from clawgym_env.wire import anthropic_messages as wire
from clawgym_env.wire.base import Reply, Usage

Json = dict[str, Any]
USER: Json = {"role": "user", "content": "hi"}
CACHE: Json = {"cache_control": {"type": "ephemeral"}}
SCHEMA: Json = {"type": "object", "properties": {"command": {"type": "string"}}}
BASH: Json = {"name": "bash", "description": "run", "input_schema": SCHEMA}


def text(value: str, **more: Any) -> Json:
    return {"type": "text", "text": value, **more}


def result(call_id: str, content: Any = "ok", **more: Any) -> Json:
    return {"type": "tool_result", "tool_use_id": call_id, "content": content, **more}


def use(call_id: str, name: str = "bash", **arguments: Any) -> Json:
    return {"type": "tool_use", "id": call_id, "name": name, "input": arguments}


def parse(**fields: Any) -> ChatRequest:
    body = {"model": "policy", "max_tokens": 64, "messages": [USER], **fields}
    return wire.parse_request(orjson.dumps(body), {})


def read(*messages: Json) -> tuple[Message, ...]:
    """Messages of a conversation, without the user message that a request must end with."""
    return parse(messages=[*messages, USER]).messages[:-1]


def refusal(**fields: Any) -> WireError:
    with pytest.raises(WireError) as caught:
        parse(**fields)
    assert caught.value.status == 400
    return caught.value


def reply(message: Message, finish: Any = "stop", stop_text: str | None = None) -> Reply:
    return Reply(7, 1_700_000_000, parse(), message, finish, Usage(11, 5, 3), stop_text)
