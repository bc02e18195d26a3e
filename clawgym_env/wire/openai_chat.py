"""OpenAI Chat Completions: JSON <-> types, streamed and not.

Invariant: pure. The streamed and the unstreamed answer carry the same message, because both are made from one parsed
:class:`Reply`. A request field that would change the meaning and cannot be honoured is refused by name; harmless ones
are recorded in ``ChatRequest.extra``.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import orjson

from clawgym_env.errors import WireError
from clawgym_env.types import ChatRequest, FinishReason, Message, Role, ToolCall, ToolSpec
from clawgym_env.wire.sse import DONE, data_event

_HARMLESS = frozenset(
    {
        "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention",
        "parallel_tool_calls", "reasoning_effort", "verbosity", "seed", "stream_options", "chat_template_kwargs",
        "enable_thinking", "thinking", "top_k", "min_p",
    }
)  # fmt: skip
_READ = frozenset(
    {
        "model", "messages", "tools", "tool_choice", "temperature", "top_p", "max_tokens", "max_completion_tokens",
        "stream",
    }
)  # fmt: skip
#: Fields that are refused unless they hold the value that asks for nothing.
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "n": (1,),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "logit_bias": ({},),
    "stop": ("", []),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "functions": ([],),
}


@dataclass(frozen=True, slots=True)
class Usage:
    """Truthful token counts; harnesses decide on compaction by them."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int

    def as_dict(self) -> dict[str, Any]:
        """The API's ``usage`` object."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }


@dataclass(frozen=True, slots=True)
class Reply:
    """One parsed answer, ready for the wire."""

    id: str
    created: int
    model: str
    message: Message
    finish_reason: FinishReason
    usage: Usage

    @property
    def wire_finish_reason(self) -> str:
        """``tool_calls`` only for calls that are whole: a truncated answer says ``length`` so that nothing runs."""
        if self.finish_reason == "length":
            return "length"
        return "tool_calls" if self.message.tool_calls else "stop"


def parse_request(body: bytes) -> ChatRequest:
    """Reads a request body.

    Raises:
        WireError: malformed, or asking for something that cannot be honoured; ``param`` names the field.
    """
    data = _load(body)
    if not isinstance(data, dict):
        raise WireError("the request body must be a JSON object", code="invalid_json")
    extra = _check_fields(data)
    messages = _expect(data, "messages", list)
    if not messages:
        raise WireError("messages must not be empty", param="messages")
    tools = tuple(_tool(t, f"tools[{i}]") for i, t in enumerate(_optional(data, "tools", list) or []))
    choice = data.get("tool_choice")
    if choice == "none":
        tools = ()
    elif choice not in (None, "auto"):
        raise WireError("only tool_choice 'auto' and 'none' can be honoured", param="tool_choice")
    return ChatRequest(
        model=_expect(data, "model", str),
        messages=tuple(_message(m, f"messages[{i}]") for i, m in enumerate(messages)),
        tools=tools,
        temperature=_number(data, "temperature", 0.0, 2.0),
        top_p=_number(data, "top_p", 0.0, 1.0),
        max_tokens=_limit(data),
        stream=bool(_optional(data, "stream", bool)),
        include_usage=bool((_optional(data, "stream_options", dict) or {}).get("include_usage")),
        extra=extra,
    )


def render_reply(reply: Reply) -> dict[str, Any]:
    """The unstreamed response body."""
    message: dict[str, Any] = {"role": "assistant", "content": reply.message.content or None}
    if reply.message.reasoning is not None:
        message["reasoning_content"] = reply.message.reasoning
    if reply.message.tool_calls:
        message["tool_calls"] = [_tool_call_json(c) for c in reply.message.tool_calls]
    elif message["content"] is None:
        message["content"] = ""
    return {
        "id": reply.id,
        "object": "chat.completion",
        "created": reply.created,
        "model": reply.model,
        "choices": [{"index": 0, "message": message, "finish_reason": reply.wire_finish_reason, "logprobs": None}],
        "usage": reply.usage.as_dict(),
    }


def stream_deltas(reply: Reply) -> Iterator[bytes]:
    """Events that carry the message, before the one that ends it."""
    only_calls = reply.message.tool_calls and not reply.message.content
    yield _chunk(reply, {"role": "assistant", "content": None if only_calls else ""})
    if reply.message.reasoning is not None:
        yield _chunk(reply, {"reasoning_content": reply.message.reasoning})
    if reply.message.content:
        yield _chunk(reply, {"content": reply.message.content})
    for i, call in enumerate(reply.message.tool_calls):
        yield _chunk(reply, {"tool_calls": [{"index": i, **_tool_call_json(call)}]})


def stream_end(reply: Reply, *, include_usage: bool) -> Iterator[bytes]:
    """The terminal events; the call must be committed before the first of them is sent."""
    yield _chunk(reply, {}, finish_reason=reply.wire_finish_reason)
    if include_usage:
        yield data_event({**_chunk_head(reply), "choices": [], "usage": reply.usage.as_dict()})
    yield DONE


def render_error(error: WireError) -> dict[str, Any]:
    """The API's error body."""
    kind = "invalid_request_error" if error.status < 500 else "server_error"
    return {"error": {"message": str(error), "type": kind, "param": error.param, "code": error.code}}


def stream_error(error: WireError) -> Iterator[bytes]:
    """How an error ends a stream whose headers have gone out."""
    yield data_event(render_error(error))
    yield DONE


def render_models(names: list[str], max_context: int) -> dict[str, Any]:
    """The body of ``GET /v1/models``."""
    return {
        "object": "list",
        "data": [
            {"id": n, "object": "model", "created": 0, "owned_by": "clawgym", "max_model_len": max_context}
            for n in names
        ],
    }


def arguments_text(arguments: Mapping[str, Any] | str) -> str:
    """Tool arguments as the API carries them: JSON text, or the model's own text where it did not parse."""
    return arguments if isinstance(arguments, str) else orjson.dumps(arguments).decode()


def message_json(message: Message) -> dict[str, Any]:
    """One message in the API's own form: the form of run records and of upstream requests."""
    out: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.reasoning is not None:
        out["reasoning_content"] = message.reasoning
    if message.tool_calls:
        out["tool_calls"] = [_tool_call_json(c) for c in message.tool_calls]
    if message.tool_call_id is not None:
        out["tool_call_id"] = message.tool_call_id
    if message.name is not None:
        out["name"] = message.name
    return out


def tool_json(tool: ToolSpec) -> dict[str, Any]:
    """One tool in the API's own form, which is also the form that chat templates are trained on."""
    function = {"name": tool.name, "description": tool.description, "parameters": tool.parameters}
    return {"type": "function", "function": function}


def _tool_call_json(call: ToolCall) -> dict[str, Any]:
    return {
        "id": call.id,
        "type": "function",
        "function": {"name": call.name, "arguments": arguments_text(call.arguments)},
    }


def _chunk_head(reply: Reply) -> dict[str, Any]:
    return {"id": reply.id, "object": "chat.completion.chunk", "created": reply.created, "model": reply.model}


def _chunk(reply: Reply, delta: dict[str, Any], finish_reason: str | None = None) -> bytes:
    choice = {"index": 0, "delta": delta, "finish_reason": finish_reason, "logprobs": None}
    return data_event({**_chunk_head(reply), "choices": [choice]})


def _check_fields(data: Mapping[str, Any]) -> dict[str, Any]:
    extra = {}
    for key, value in data.items():
        if key in _READ:
            continue
        if key in _HARMLESS or value is None or value in _NEUTRAL.get(key, ()):
            extra[key] = value
        else:
            raise WireError(f"{key} cannot be honoured by this endpoint", param=key, code="unsupported_parameter")
    return extra


def _load(body: bytes) -> Any:
    try:
        return orjson.loads(body)
    except orjson.JSONDecodeError as error:
        problem = str(error)
    # A harness that cuts a tool's output in mid-emoji sends half a surrogate pair, which UTF-8 cannot hold.
    try:
        text = json.dumps(json.loads(body), ensure_ascii=False)
        return orjson.loads(text.encode("utf-16", "surrogatepass").decode("utf-16", "replace"))
    except (ValueError, RecursionError):
        raise WireError(f"the request body is not valid JSON: {problem}", code="invalid_json") from None


_KINDS: Mapping[type, str] = {list: "an array", dict: "an object", str: "a string", bool: "true or false"}


def _expect(data: Mapping[str, Any], key: str, kind: type) -> Any:
    value = _optional(data, key, kind)
    if value is None:
        raise WireError(f"{key} must be given, as {_KINDS[kind]}", param=key)
    return value


def _optional(data: Mapping[str, Any], key: str, kind: type) -> Any:
    value = data.get(key)
    if value is not None and not isinstance(value, kind):
        raise WireError(f"{key} must be {_KINDS[kind]}", param=key)
    return value


def _number(data: Mapping[str, Any], key: str, low: float, high: float) -> float | None:
    value = data.get(key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise WireError(f"{key} must be a number", param=key)
    if not low <= value <= high:
        raise WireError(f"{key} must lie in [{low:g}, {high:g}]", param=key)
    return float(value)


def _limit(data: Mapping[str, Any]) -> int | None:
    for key in ("max_completion_tokens", "max_tokens"):
        value = data.get(key)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise WireError(f"{key} must be a positive integer", param=key)
        return value
    return None


def _tool(data: Any, where: str) -> ToolSpec:
    function = data.get("function") if isinstance(data, dict) else None
    if not isinstance(function, dict) or data.get("type") != "function" or not isinstance(function.get("name"), str):
        raise WireError("a tool must be {type: 'function', function: {name, ...}}", param=where)
    parameters = function.get("parameters") or {}
    if not isinstance(parameters, dict):
        raise WireError("a tool's parameters must be a JSON schema object", param=f"{where}.function.parameters")
    return ToolSpec(function["name"], str(function.get("description") or ""), parameters)


_ROLES: Mapping[str, Role] = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
}


def _message(data: Any, where: str) -> Message:
    if not isinstance(data, dict):
        raise WireError("a message must be a JSON object", param=where)
    role = _ROLES.get(str(data.get("role")))
    if role is None:
        raise WireError(f"unknown role {data.get('role')!r}", param=f"{where}.role")
    for key in ("function_call", "audio", "refusal"):
        if data.get(key):
            raise WireError(f"{key} cannot be honoured in a message", param=f"{where}.{key}")
    calls = data.get("tool_calls") or []
    if not isinstance(calls, list) or (calls and role != "assistant"):
        raise WireError("tool_calls must be a list, in an assistant message", param=f"{where}.tool_calls")
    reasoning = data.get("reasoning_content") or data.get("reasoning")
    call_id = data.get("tool_call_id")
    if role == "tool" and not isinstance(call_id, str):
        raise WireError("a tool message must name its tool_call_id", param=f"{where}.tool_call_id")
    return Message(
        role=role,
        content=_text(data.get("content"), f"{where}.content"),
        reasoning=reasoning if isinstance(reasoning, str) and reasoning else None,
        tool_calls=tuple(_tool_call(c, f"{where}.tool_calls[{i}]") for i, c in enumerate(calls)),
        tool_call_id=call_id if role == "tool" else None,
        name=data.get("name") if isinstance(data.get("name"), str) else None,
    )


def _text(content: Any, where: str) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise WireError("content must be a string or a list of parts", param=where)
    out = []
    for i, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind in ("text", "refusal") and isinstance(part.get(kind), str):
            out.append(part[kind])
        else:
            raise WireError(f"this text policy cannot take a content part of type {kind!r}", param=f"{where}[{i}]")
    return "".join(out)


def _tool_call(data: Any, where: str) -> ToolCall:
    function = data.get("function") if isinstance(data, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise WireError("a tool call must be {id, type: 'function', function: {name, arguments}}", param=where)
    text = function.get("arguments")
    if not isinstance(text, str):
        raise WireError("tool arguments must be JSON text", param=f"{where}.function.arguments")
    try:
        parsed = orjson.loads(text)
    except orjson.JSONDecodeError:
        parsed = text
    arguments = parsed if isinstance(parsed, dict) else text
    return ToolCall(function["name"], arguments, str(data.get("id") or ""))
