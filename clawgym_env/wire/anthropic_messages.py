"""Anthropic Messages: JSON <-> types, streamed and not. See :mod:`clawgym_env.wire.base` for the invariants.

The signature of a thinking block is the reasoning itself in base64: a client that sends the block back without its text
still gives the reasoning back. It is no secret and proves nothing; the signatures of other servers are ignored.

An answer without text and tool calls holds one empty text block. The API itself then sends no block at all, and clients
trip over that: the official SDK's ``get_final_text`` raises, and so does whoever reads ``content[0]``.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Iterator, Mapping
from typing import Any

from clawgym_env.errors import ContextOverflow, WireError
from clawgym_env.types import ChatRequest, Message, ToolCall, ToolSpec
from clawgym_env.wire import base
from clawgym_env.wire.base import Memo, Reply, Usage, arguments_object, arguments_text, original_arguments
from clawgym_env.wire.sse import named_event

IN_STREAM: frozenset[str] = frozenset()
#: First bytes of every signature of ours; a multiple of 3, so that they read alike in base64.
SIGNATURE_PREFIX = b"clawgym1:thinking:"
PREFILL = "This model does not support assistant message prefill. The conversation must end with a user message."

_READ = frozenset(
    {
        "model", "max_tokens", "messages", "system", "tools", "tool_choice", "temperature", "top_p", "top_k",
        "stop_sequences", "stream",
    }
)  # fmt: skip
_HARMLESS = frozenset(
    {
        "metadata", "thinking", "service_tier", "betas", "anthropic_beta", "anthropic_version", "context_management",
        "output_config", "speed", "cache_control", "diagnostics", "inference_geo", "user_profile_id", "workspace_id",
        "billing_policy", "fallbacks",
    }
)  # fmt: skip
#: Fields that are refused unless they hold the value that asks for nothing.
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {"mcp_servers": ([],)}
_OUTPUT_HARMLESS = frozenset({"effort", "task_budget"})
_CHOICE_HARMLESS = frozenset({"disable_parallel_tool_use"})


def parse_request(body: bytes, params: Mapping[str, str], memo: Memo | None = None) -> ChatRequest:
    """Reads a request body; see :class:`clawgym_env.wire.base.Wire`."""
    data = base.load_object(body, "messages")
    request = _request(data, memo or Memo())
    if request.max_tokens is None:
        raise WireError("max_tokens: Field required", param="max_tokens")
    if data["messages"][-1]["role"] == "assistant":
        raise WireError(PREFILL)
    return request


def parse_count_request(body: bytes, params: Mapping[str, str]) -> ChatRequest:
    """Reads the body of ``count_tokens``: a request that samples nothing, so it needs no limit and may end anywhere.

    Raises:
        WireError: as :func:`parse_request`.
    """
    return _request(base.load_object(body, "messages"), Memo())


def render_token_count(tokens: int) -> dict[str, Any]:
    """The response body of ``count_tokens``."""
    return {"input_tokens": tokens}


def render_reply(reply: Reply) -> dict[str, Any]:
    """The unstreamed response body."""
    return {**_head(reply), "content": _blocks(reply.message), **_stop(reply), "usage": _usage_json(reply.usage)}


def stream_type(request: ChatRequest) -> bytes:
    """Server-sent events."""
    return b"text/event-stream"


def keep_alive(request: ChatRequest) -> bytes:
    """A ping, which clients skip wherever it stands, also before ``message_start``."""
    return _event("ping")


def stream_deltas(reply: Reply) -> Iterator[bytes]:
    """Events that carry the message, before those that end it."""
    usage = {**_usage_json(reply.usage), "output_tokens": 0}
    open_end = dict.fromkeys(_stop(reply))
    yield _event("message_start", message={**_head(reply), "content": [], **open_end, "usage": usage})
    for i, block in enumerate(_blocks(reply.message)):
        yield _event("content_block_start", index=i, content_block={**block, **_OPENING[block["type"]]})
        for delta in _deltas(block):
            yield _event("content_block_delta", index=i, delta=delta)
        yield _event("content_block_stop", index=i)


def stream_end(reply: Reply) -> Iterator[bytes]:
    """The terminal events; the call must be committed before the first of them is sent."""
    yield _event("message_delta", delta=_stop(reply), usage=_usage_json(reply.usage))
    yield _event("message_stop")


_ERROR_TYPES: Mapping[int, str] = {
    401: "authentication_error",
    402: "billing_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    504: "timeout_error",
    529: "overloaded_error",
}


def render_error(error: WireError) -> dict[str, Any]:
    """The API's error body."""
    kind = _ERROR_TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    body: dict[str, Any] = {"type": kind, "message": _located(error)}
    if error.code is not None:
        body["details"] = {"error_code": error.code}
    return {"type": "error", "error": body, "request_id": None}


def stream_error(error: WireError, request: ChatRequest | None, sent: Reply | None = None) -> Iterator[bytes]:
    """How an error ends a stream whose headers have gone out."""
    yield named_event("error", render_error(error))


def overflow(error: ContextOverflow) -> WireError:
    """The refusal that makes Claude Code compact; it reads the numbers, so nothing stands around them."""
    return WireError(
        f"prompt is too long: {error.prompt_tokens} tokens > {error.max_prompt} maximum",
        code="context_length_exceeded",
    )


def _event(kind: str, **fields: Any) -> bytes:
    return named_event(kind, {"type": kind, **fields})


def _located(error: WireError) -> str:
    """The API's messages begin with the path of the field, with dots: ``messages.3.content.0: ...``."""
    text = str(error)
    if error.param is None:
        return text
    path = re.sub(r"\[(\d+)\]", r".\1", error.param)
    return text if error.param in text or path in text else f"{path}: {text}"


def _head(reply: Reply) -> dict[str, Any]:
    return {"id": f"msg_{reply.number}", "type": "message", "role": "assistant", "model": reply.request.model}


def _stop(reply: Reply) -> dict[str, Any]:
    reason = "end_turn"
    if reply.finish_reason == "length":
        reason = "max_tokens"
    elif reply.runs_tools:
        reason = "tool_use"
    elif reply.stop_text is not None:
        reason = "stop_sequence"
    stopped_by = reply.stop_text if reason == "stop_sequence" else None
    return {"stop_reason": reason, "stop_sequence": stopped_by, "stop_details": None}


def _usage_json(usage: Usage) -> dict[str, int]:
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
    }


def _blocks(message: Message) -> list[dict[str, Any]]:
    out: list[dict[str, Any]] = []
    if message.reasoning is not None:
        signature = _sign(message.reasoning)
        out.append({"type": "thinking", "thinking": message.reasoning, "signature": signature})
    if message.content or not message.tool_calls:
        out.append({"type": "text", "text": message.content})
    return out + [
        {"type": "tool_use", "id": c.id, "name": c.name, "input": arguments_object(c.arguments)}
        for c in message.tool_calls
    ]


#: What a block looks like before its deltas.
_OPENING: Mapping[str, Mapping[str, Any]] = {
    "thinking": {"thinking": "", "signature": ""},
    "text": {"text": ""},
    "tool_use": {"input": {}},
}


def _deltas(block: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    if block["type"] == "thinking":
        yield {"type": "thinking_delta", "thinking": block["thinking"]}
        yield {"type": "signature_delta", "signature": block["signature"]}
    elif block["type"] == "tool_use":
        yield {"type": "input_json_delta", "partial_json": arguments_text(block["input"])}
    elif block["text"]:
        yield {"type": "text_delta", "text": block["text"]}


def _sign(reasoning: str) -> str:
    return base64.urlsafe_b64encode(SIGNATURE_PREFIX + reasoning.encode()).decode()


def _signed(signature: str) -> str:
    """The reasoning that a signature of ours holds; nothing for anyone else's."""
    try:
        data = base64.b64decode(signature, altchars=b"-_", validate=True)
        return data[len(SIGNATURE_PREFIX) :].decode() if data.startswith(SIGNATURE_PREFIX) else ""
    except ValueError:
        return ""


def _request(data: Mapping[str, Any], memo: Memo) -> ChatRequest:
    extra = base.check_fields(data, read=_READ, harmless=_HARMLESS, neutral=_NEUTRAL)
    output = base.optional(data, "output_config", dict) or {}
    base.check_fields(output, read=(), harmless=_OUTPUT_HARMLESS, neutral={}, where="output_config.")
    tools = tuple(_tool(t, f"tools[{i}]") for i, t in enumerate(base.optional(data, "tools", list) or []))
    choice = base.optional(data, "tool_choice", dict) or {"type": "auto"}
    if choice.get("type") not in ("auto", "none"):
        raise WireError("only tool_choice types 'auto' and 'none' can be honoured", param="tool_choice")
    extra |= base.check_fields(choice, read={"type"}, harmless=_CHOICE_HARMLESS, neutral={}, where="tool_choice.")
    return ChatRequest(
        model=base.expect(data, "model", str),
        messages=_messages(data, memo),
        tools=() if choice["type"] == "none" else tools,
        temperature=base.number(data, "temperature", 0.0, 1.0),
        top_p=base.number(data, "top_p", 0.0, 1.0),
        max_tokens=base.integer(data, "max_tokens"),
        top_k=base.integer(data, "top_k", low=0),
        stop=base.strings(data, "stop_sequences"),
        stream=bool(base.optional(data, "stream", bool)),
        extra=extra,
    )


def _tool(data: Any, where: str) -> ToolSpec:
    if not isinstance(data, dict):
        raise WireError("a tool must be {name, description, input_schema}", param=where)
    if data.get("type") not in (None, "custom"):
        raise WireError(
            f"tools of type {data['type']!r} run at the API and cannot be offered here; only custom tools can",
            param=f"{where}.type",
        )
    name = base.expect(data, "name", str, f"{where}.")
    description = base.optional(data, "description", str, f"{where}.") or ""
    return ToolSpec(name, description, base.schema(data.get("input_schema"), f"{where}.input_schema"))


def _messages(data: Mapping[str, Any], memo: Memo) -> tuple[Message, ...]:
    turns = base.expect(data, "messages", list)
    if not turns:
        raise WireError("messages: at least one message is required", param="messages")
    system = _text(data.get("system"), "system")
    out = [Message("system", system)] if system else []
    for told in memo.read(turns, lambda turn, i: _turn(turn, f"messages[{i}]")):
        out += told
    return tuple(out)


def _turn(data: Any, where: str) -> list[Message]:
    if not isinstance(data, dict):
        raise WireError("a message must be a JSON object", param=where)
    role, content = data.get("role"), data.get("content")
    if role not in ("user", "assistant", "system"):
        raise WireError(f"unknown role {role!r}; it must be 'user', 'assistant' or 'system'", param=f"{where}.role")
    where = f"{where}.content"
    if content is None:
        raise WireError("content must be a string or a list of content blocks", param=where)
    if role == "system":
        return [Message("system", _text(content, where))]
    return _user(content, where) if role == "user" else [_assistant(content, where)]


def _user(content: Any, where: str) -> list[Message]:
    """Tool results in their order, and the remaining text as one message: last, unless all of it stands before them."""
    texts: list[str] = []
    results: list[Message] = []
    text_last = False
    for block, path in _parts(content, where):
        if block["type"] == "tool_result":
            call_id = base.expect(block, "tool_use_id", str, f"{path}.")
            text = _text(block.get("content"), f"{path}.content")
            failed = bool(base.optional(block, "is_error", bool, f"{path}."))
            results.append(Message("tool", text, tool_call_id=call_id, is_error=failed))
        elif block["type"] == "text":
            texts.append(base.expect(block, "text", str, f"{path}."))
            text_last = text_last or bool(results and texts[-1])
        else:
            raise _misfit(block["type"], "a user message", path)
    said = Message("user", base.join_text(texts, sampled=False))
    if not results:
        return [said]
    if not any(texts):
        return results
    return [*results, said] if text_last else [said, *results]


def _assistant(content: Any, where: str) -> Message:
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[ToolCall] = []
    for block, path in _parts(content, where):
        if block["type"] == "text":
            texts.append(base.expect(block, "text", str, f"{path}."))
        elif block["type"] == "thinking":
            thoughts.append(_thought(block, f"{path}."))
        elif block["type"] == "tool_use":
            calls.append(_tool_call(block, f"{path}."))
        elif block["type"] != "redacted_thinking":  # which holds no text
            raise _misfit(block["type"], "an assistant message", path)
    reasoning = base.join_text(thoughts, sampled=True)
    return Message("assistant", base.join_text(texts, sampled=True), reasoning or None, tuple(calls))


def _thought(block: Mapping[str, Any], where: str) -> str:
    shown: str = base.optional(block, "thinking", str, where) or ""
    return shown or _signed(base.optional(block, "signature", str, where) or "")


def _tool_call(block: Mapping[str, Any], where: str) -> ToolCall:
    arguments = original_arguments(base.expect(block, "input", dict, where))
    return ToolCall(base.expect(block, "name", str, where), arguments, base.expect(block, "id", str, where))


def _text(content: Any, where: str) -> str:
    """The text of content that may hold text only; nothing where there is none."""
    texts = []
    for block, path in _parts([] if content is None else content, where):
        if block["type"] != "text":
            raise _misfit(block["type"], "this place", path)
        texts.append(base.expect(block, "text", str, f"{path}."))
    return base.join_text(texts, sampled=False)


def _parts(content: Any, where: str) -> Iterator[tuple[dict[str, Any], str]]:
    """Content blocks and their paths; a string is one text block."""
    if isinstance(content, str):
        content = [{"type": "text", "text": content}]
    if not isinstance(content, list):
        raise WireError("content must be a string or a list of content blocks", param=where)
    for j, block in enumerate(content):
        path = f"{where}[{j}]"
        if not isinstance(block, dict) or not isinstance(block.get("type"), str):
            raise WireError("a content block must be an object with a type", param=path)
        yield block, path


_BLOCK_TYPES = frozenset({"text", "thinking", "redacted_thinking", "tool_use", "tool_result"})


def _misfit(kind: str, place: str, where: str) -> WireError:
    if kind in _BLOCK_TYPES:
        return WireError(f"{kind} blocks cannot stand in {place}", param=where)
    return base.unsupported_part(kind, where)
