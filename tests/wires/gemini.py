"""Gemini's API as its wire's tests write it: requests, contents, and what is read of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson
import pytest

from clawgym_env.errors import WireError
from clawgym_env.types import ChatRequest, Message
from clawgym_env.wire import gemini as wire
from clawgym_env.wire.base import Reply, Usage

Json = dict[str, Any]
USER: Json = {"role": "user", "parts": [{"text": "hi"}]}
SCHEMA: Json = {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]}
BASH: Json = {"name": "bash", "description": "run", "parametersJsonSchema": SCHEMA}
STREAM = {"method": "streamGenerateContent", "alt": "sse"}


def parse(_params: Mapping[str, str] | None = None, **fields: Any) -> ChatRequest:
    params = {"model": "policy", "method": "generateContent", **(_params or {})}
    return wire.parse_request(orjson.dumps({"contents": [USER], **fields}), params)


def read(*contents: Json) -> tuple[Message, ...]:
    """Messages of a conversation, without the user message that a request must end with."""
    return parse(contents=[*contents, USER]).messages[:-1]


def refusal(_params: Mapping[str, str] | None = None, **fields: Any) -> WireError:
    with pytest.raises(WireError) as caught:
        parse(_params, **fields)
    assert caught.value.status == 400
    return caught.value


def call(name: str, _more: Json | None = None, **args: Any) -> Json:
    return {"functionCall": {"name": name, "args": args}, **(_more or {})}


def answer(name: str, response: Any, **more: Any) -> Json:
    return {"functionResponse": {"name": name, "response": response, **more}}


def model(*parts: Json) -> Json:
    return {"role": "model", "parts": list(parts)}


def user(*parts: Json) -> Json:
    return {"role": "user", "parts": list(parts)}


def reply(message: Message, finish: Any = "stop", cached: int = 3, **asked: Any) -> Reply:
    return Reply(7, 1_700_000_000, parse(**asked), message, finish, Usage(11, 5, cached))


def thoughts(**more: Any) -> Json:
    return {"generationConfig": {"thinkingConfig": {"includeThoughts": True}}, **more}
