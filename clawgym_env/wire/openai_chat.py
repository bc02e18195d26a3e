"""OpenAI Chat Completions: JSON <-> types, streamed and not. See :mod:`clawgym_env.wire.base` for the invariants."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from clawgym_env.errors import ContextOverflow, WireError
from clawgym_env.types import ChatRequest, Message, Role, ToolCall, ToolSpec
from clawgym_env.wire import base
from clawgym_env.wire.base import Memo, Reply, Usage, arguments_text, parse_arguments
from clawgym_env.wire.sse import COMMENT, DONE, data_event

IN_STREAM: frozenset[str] = frozenset()
INCLUDE_USAGE = "usage"

_HARMLESS = frozenset(
    {
        "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention",
        "parallel_tool_calls", "reasoning_effort", "verbosity", "chat_template_kwargs", "enable_thinking", "thinking",
        "min_p",
    }
)  # fmt: skip
_READ = frozenset(
    {
        "model", "messages", "tools", "tool_choice", "temperature", "top_p", "top_k", "max_tokens",
        "max_completion_tokens", "seed", "stop", "stream", "stream_options",
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
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "functions": ([],),
}


def parse_request(body: bytes, params: Mapping[str, str], memo: Memo | None = None) -> ChatRequest:
    """Reads a request body; see :class:`clawgym_env.wire.base.Wire`."""
    data = base.load_object(body, "messages")
    extra = base.check_fields(data, read=_READ, harmless=_HARMLESS, neutral=_NEUTRAL)
    messages = base.expect(data, "messages", list)
    if not messages:
        raise WireError("messages must not be empty", param="messages")
    tools = tuple(_tool(t, f"tools[{i}]") for i, t in enumerate(base.optional(data, "tools", list) or []))
    choice = data.get("tool_choice")
    if choice == "none":
        tools = ()
    elif choice not in (None, "auto"):
        raise WireError("only tool_choice 'auto' and 'none' can be honoured", param="tool_choice")
    usage = (base.optional(data, "stream_options", dict) or {}).get("include_usage")
    return ChatRequest(
        model=base.expect(data, "model", str),
        messages=tuple((memo or Memo()).read(messages, lambda m, i: _message(m, f"messages[{i}]"))),
        tools=tools,
        temperature=base.number(data, "temperature", 0.0, 2.0),
        top_p=base.number(data, "top_p", 0.0, 1.0),
        max_tokens=base.integer(data, "max_completion_tokens") or base.integer(data, "max_tokens"),
        top_k=base.integer(data, "top_k", low=-1),
        seed=base.integer(data, "seed", low=-(1 << 63)),
        stop=base.strings(data, "stop"),
        stream=bool(base.optional(data, "stream", bool)),
        wants=frozenset({INCLUDE_USAGE} if usage else ()),
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
    choice = {"index": 0, "message": message, "finish_reason": _finish_reason(reply), "logprobs": None}
    return {**_head(reply, "chat.completion"), "choices": [choice], "usage": _usage_json(reply.usage)}


def stream_type(request: ChatRequest) -> bytes:
    """Server-sent events."""
    return b"text/event-stream"


def keep_alive(request: ChatRequest) -> bytes:
    """A comment."""
    return COMMENT


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


def stream_end(reply: Reply) -> Iterator[bytes]:
    """The terminal events; the call must be committed before the first of them is sent."""
    yield _chunk(reply, {}, finish_reason=_finish_reason(reply))
    if INCLUDE_USAGE in reply.request.wants:
        yield data_event({**_head(reply, _CHUNK), "choices": [], "usage": _usage_json(reply.usage)})
    yield DONE


def render_error(error: WireError) -> dict[str, Any]:
    """The API's error body."""
    kind = "invalid_request_error" if error.status < 500 else "server_error"
    return {"error": {"message": str(error), "type": kind, "param": error.param, "code": error.code}}


def stream_error(error: WireError, request: ChatRequest | None, sent: Reply | None = None) -> Iterator[bytes]:
    """How an error ends a stream whose headers have gone out."""
    yield data_event(render_error(error))
    yield DONE


def overflow(error: ContextOverflow) -> WireError:
    """The refusal that makes harnesses compact."""
    return WireError(str(error), param="messages", code="context_length_exceeded")


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


_CHUNK = "chat.completion.chunk"


def _head(reply: Reply, kind: str) -> dict[str, Any]:
    return {"id": f"chatcmpl-{reply.number}", "object": kind, "created": reply.created, "model": reply.request.model}


def _chunk(reply: Reply, delta: dict[str, Any], finish_reason: str | None = None) -> bytes:
    choice = {"index": 0, "delta": delta, "finish_reason": finish_reason, "logprobs": None}
    return data_event({**_head(reply, _CHUNK), "choices": [choice]})


def _finish_reason(reply: Reply) -> str:
    if reply.finish_reason == "length":
        return "length"
    return "tool_calls" if reply.runs_tools else "stop"


def _usage_json(usage: Usage) -> dict[str, Any]:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }


def _tool(data: Any, where: str) -> ToolSpec:
    function = data.get("function") if isinstance(data, dict) else None
    if not isinstance(function, dict) or data.get("type") != "function" or not isinstance(function.get("name"), str):
        raise WireError("a tool must be {type: 'function', function: {name, ...}}", param=where)
    parameters = base.schema(function.get("parameters"), f"{where}.function.parameters")
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
        content=_text(data.get("content"), f"{where}.content", sampled=role == "assistant"),
        reasoning=reasoning if isinstance(reasoning, str) and reasoning else None,
        tool_calls=tuple(_tool_call(c, f"{where}.tool_calls[{i}]") for i, c in enumerate(calls)),
        tool_call_id=call_id if role == "tool" else None,
        name=data.get("name") if isinstance(data.get("name"), str) else None,
    )


def _text(content: Any, where: str, *, sampled: bool) -> str:
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
            raise base.unsupported_part(kind, f"{where}[{i}]")
    return base.join_text(out, sampled=sampled)


def _tool_call(data: Any, where: str) -> ToolCall:
    function = data.get("function") if isinstance(data, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise WireError("a tool call must be {id, type: 'function', function: {name, arguments}}", param=where)
    text = function.get("arguments")
    if not isinstance(text, str):
        raise WireError("tool arguments must be JSON text", param=f"{where}.function.arguments")
    return ToolCall(function["name"], parse_arguments(text), str(data.get("id") or ""))
