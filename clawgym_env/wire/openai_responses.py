"""OpenAI Responses: JSON <-> types, streamed and not. See :mod:`clawgym_env.wire.base` for the invariants.

A conversation is a flat list of items. An assistant turn is a run of them - reasoning, then one message, then calls -
and whatever breaks that order begins the next turn.

A client that asks for ``encrypted_content`` is given the whole reasoning in it, so that one that keeps nothing else
(``store: false``) still gives the reasoning back. It is base64 and *not secret*: who holds it can read it, and the
summary shows the same text. Other servers' encrypted content cannot be read; there the summary stands in.

Calls of a truncated answer are shown but never ``done`` in a stream: Codex runs a call when its ``output_item.done``
comes in, without waiting to hear that the answer is incomplete.
"""

from __future__ import annotations

import base64
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from clawgym_env.errors import ContextOverflow, WireError
from clawgym_env.types import ChatRequest, Message, Role, ToolCall, ToolSpec
from clawgym_env.wire import base, openai_chat
from clawgym_env.wire.base import Memo, Reply, Usage, arguments_text, parse_arguments
from clawgym_env.wire.responses_tools import joined_name, name_fields, read_tools, tools_json
from clawgym_env.wire.sse import COMMENT, named_event

#: Codex makes room only where this comes as ``response.failed``; as an HTTP status it is any bad request to it.
IN_STREAM: frozenset[str] = frozenset({"context_length_exceeded"})
PREFILL = (
    "This model does not support assistant message prefill. The input must end with a user message or tool output."
)
ENCRYPTED_REASONING = "reasoning.encrypted_content"
#: First characters of every encrypted content of ours.
ENCRYPTED_PREFIX = "clawgym1."
_READ = frozenset(
    {
        "model", "input", "instructions", "tools", "text", "include", "temperature", "top_p", "max_output_tokens",
        "stream",
    }
)  # fmt: skip
_HARMLESS = frozenset(
    {
        "store", "metadata", "user", "safety_identifier", "prompt_cache_key", "prompt_cache_retention",
        "prompt_cache_options", "service_tier", "parallel_tool_calls", "reasoning", "stream_options", "client_metadata",
    }
)  # fmt: skip
#: Fields that are refused unless they hold the value that asks for nothing.
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "tool_choice": ("auto", "none"),
    "background": (False,),
    "truncation": ("disabled",),
    "top_logprobs": (0,),
    "context_management": ([],),
}
_STATEFUL = ("previous_response_id", "conversation")


def parse_request(body: bytes, params: Mapping[str, str], memo: Memo | None = None) -> ChatRequest:
    """Reads a request body; see :class:`clawgym_env.wire.base.Wire`."""
    data = base.load_object(body, "input")
    for key in _STATEFUL:
        if data.get(key) is not None:
            why = f"{key} cannot be honoured: nothing is stored here; send the whole conversation as input"
            raise WireError(why, param=key, code="unsupported_parameter")
    extra = base.check_fields(data, read=_READ, harmless=_HARMLESS, neutral=_NEUTRAL)
    text = base.optional(data, "text", dict)
    if text is not None:
        neutral = {"format": ({"type": "text"},)}
        extra["text"] = base.check_fields(text, read=(), harmless={"verbosity"}, neutral=neutral, where="text.")
    tools, recorded = read_tools(data)
    extra |= recorded
    return ChatRequest(
        model=base.expect(data, "model", str),
        messages=_messages(data, memo or Memo()),
        tools=() if extra.get("tool_choice") == "none" else tools,
        temperature=base.number(data, "temperature", 0.0, 2.0),
        top_p=base.number(data, "top_p", 0.0, 1.0),
        max_tokens=base.integer(data, "max_output_tokens"),
        stream=bool(base.optional(data, "stream", bool)),
        wants=_include(data),
        extra=extra,
    )


def render_reply(reply: Reply) -> dict[str, Any]:
    """The unstreamed response body."""
    truncated = reply.finish_reason == "length"
    return {
        **_reply_head(reply),
        "status": "incomplete" if truncated else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if truncated else None,
        "output": _items(reply),
        "usage": _usage_json(reply.usage),
    }


def stream_type(request: ChatRequest) -> bytes:
    """Server-sent events."""
    return b"text/event-stream"


def keep_alive(request: ChatRequest) -> bytes:
    """A comment."""
    return COMMENT


def stream_deltas(reply: Reply) -> Iterator[bytes]:
    """Events that carry the message, before the one that ends it."""
    return _numbered(_delta_events(reply))


def stream_end(reply: Reply) -> Iterator[bytes]:
    """The terminal event; the call must be committed before it is sent."""
    response = render_reply(reply)
    yield from _numbered([(response["status"], {"response": response})], _count(_delta_events(reply)))


def render_error(error: WireError) -> dict[str, Any]:
    """The API's error body."""
    return openai_chat.render_error(error)


def stream_error(error: WireError, request: ChatRequest | None, sent: Reply | None = None) -> Iterator[bytes]:
    """How an error ends a stream whose headers have gone out.

    The official client reads no failure without a ``created`` before it. Of the codes that the API has for a failure,
    ``invalid_prompt`` is the one after which Codex does not ask again.
    """
    code = "server_error" if error.status >= 500 else "invalid_prompt"
    failure = {"code": error.code if error.code in IN_STREAM else code, "message": str(error)}
    if sent is not None:
        failed = {**_reply_head(sent), "status": "failed", "error": failure}
        return _numbered([("failed", {"response": failed})], _count(_delta_events(sent)))
    head = _head("resp_0", 0, request or ChatRequest(model="", messages=()))
    failed = {**head, "status": "failed", "error": failure}
    return _numbered([("created", {"response": head}), ("failed", {"response": failed})])


def overflow(error: ContextOverflow) -> WireError:
    """The refusal that makes harnesses compact; they look for its words where they do not look at its code."""
    said = "Your input exceeds the context window of this model. Please adjust your input and try again."
    counted = f"({error.prompt_tokens} tokens; at most {error.max_prompt})"
    return WireError(f"{said} {counted}", param="input", code="context_length_exceeded")


def _head(ident: str, created: int, request: ChatRequest) -> dict[str, Any]:
    """A response before it has said anything."""
    return {
        "id": ident,
        "object": "response",
        "created_at": created,
        "status": "in_progress",
        "error": None,
        "incomplete_details": None,
        "metadata": request.extra.get("metadata"),
        "model": request.model,
        "output": [],
        "parallel_tool_calls": request.extra.get("parallel_tool_calls") is not False,
        "temperature": request.temperature,
        "top_p": request.top_p,
        "max_output_tokens": request.max_tokens,
        "tool_choice": request.extra.get("tool_choice") or "auto",
        "tools": tools_json(request),
        "usage": None,
    }


def _reply_head(reply: Reply) -> dict[str, Any]:
    return _head(f"resp_{reply.number}", reply.created, reply.request)


def _usage_json(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }


def _items(reply: Reply) -> list[dict[str, Any]]:
    """The answer's items; at least a message or a call, as some clients ask again where they find neither."""
    message, number = reply.message, reply.number
    status = "incomplete" if reply.finish_reason == "length" else "completed"
    items: list[dict[str, Any]] = []
    if message.reasoning is not None:
        summary = [{"type": "summary_text", "text": message.reasoning}]
        items.append({"type": "reasoning", "id": f"rs_{number}", "summary": summary})
        if ENCRYPTED_REASONING in reply.request.wants:
            items[0]["encrypted_content"] = _encrypt(message.reasoning)
    if message.content or not message.tool_calls:
        part = {"type": "output_text", "text": message.content, "annotations": [], "logprobs": []}
        items.append(
            {"type": "message", "id": f"msg_{number}", "role": "assistant", "status": status, "content": [part]}
        )
    offered = {t.name: t for t in reply.request.tools}
    for i, call in enumerate(message.tool_calls):
        tool = offered.get(call.name) or ToolSpec(call.name)
        said = {"status": status, "call_id": call.id, **name_fields(tool)}
        if tool.free_text:
            items.append({"type": "custom_tool_call", "id": f"ctc_{number}x{i}", **said, "input": _free_text(call)})
        else:
            arguments = arguments_text(call.arguments)
            items.append({"type": "function_call", "id": f"fc_{number}x{i}", **said, "arguments": arguments})
    return items


def _free_text(call: ToolCall) -> str:
    said = None if isinstance(call.arguments, str) else call.arguments.get("input")
    return said if isinstance(said, str) else arguments_text(call.arguments)


def _encrypt(reasoning: str) -> str:
    return ENCRYPTED_PREFIX + base64.urlsafe_b64encode(reasoning.encode()).decode()


def _decrypt(encrypted: str) -> str:
    """The reasoning in an encrypted content of ours; nothing for anyone else's."""
    if not encrypted.startswith(ENCRYPTED_PREFIX):
        return ""
    try:
        return base64.b64decode(encrypted[len(ENCRYPTED_PREFIX) :], altchars=b"-_", validate=True).decode()
    except ValueError:
        return ""


_Event = tuple[str, dict[str, Any]]


def _numbered(events: Iterable[_Event], start: int = 0) -> Iterator[bytes]:
    for number, (name, payload) in enumerate(events, start):
        name = f"response.{name}"
        yield named_event(name, {"type": name, "sequence_number": number, **payload})


def _count(events: Iterable[_Event]) -> int:
    return sum(1 for _ in events)


def _delta_events(reply: Reply) -> Iterator[_Event]:
    head = _reply_head(reply)
    yield "created", {"response": head}
    yield "in_progress", {"response": head}
    for i, item in enumerate(_items(reply)):
        yield from _item_events(item, i)


#: Kind of item -> how it begins, and the events and the key of its text.
_OPENING: Mapping[str, tuple[Mapping[str, Any], str, str]] = {
    "reasoning": ({"summary": []}, "reasoning_summary_text", "text"),
    "message": ({"content": [], "status": "in_progress"}, "output_text", "text"),
    "function_call": ({"arguments": "", "status": "in_progress"}, "function_call_arguments", "arguments"),
    "custom_tool_call": ({"input": "", "status": "in_progress"}, "custom_tool_call_input", "input"),
}
#: Kind of item with parts -> its list of parts, the events and the index of a part, and what its text events also hold.
_PARTS: Mapping[str, tuple[str, str, str, Mapping[str, Any]]] = {
    "reasoning": ("summary", "reasoning_summary_part", "summary_index", {}),
    "message": ("content", "content_part", "content_index", {"logprobs": []}),
}


def _item_events(item: Mapping[str, Any], index: int) -> Iterator[_Event]:
    kind = item["type"]
    opening, text_event, text_key = _OPENING[kind]
    begun = {**item, **opening}
    begun.pop("encrypted_content", None)
    yield "output_item.added", {"output_index": index, "item": begun}
    place = {"item_id": item["id"], "output_index": index}
    if kind in _PARTS:
        parts, part_event, part_index, more = _PARTS[kind]
        (part,) = item[parts]
        place[part_index] = 0
        yield f"{part_event}.added", {**place, "part": {**part, "text": ""}}
        yield from _text_events(text_event, text_key, part["text"], {**place, **more})
        yield f"{part_event}.done", {**place, "part": part}
    else:
        yield from _text_events(text_event, text_key, item[text_key], place, done=item["status"] == "completed")
        if item["status"] != "completed":
            return
    yield "output_item.done", {"output_index": index, "item": item}


def _text_events(name: str, key: str, text: str, place: Mapping[str, Any], *, done: bool = True) -> Iterator[_Event]:
    if text:
        yield f"{name}.delta", {**place, "delta": text}
    if done:
        yield f"{name}.done", {**place, key: text}


def _include(data: Mapping[str, Any]) -> frozenset[str]:
    included = base.strings(data, "include")
    for what in included:
        if what != ENCRYPTED_REASONING:
            raise WireError(f"{what!r} cannot be included", param="include", code="unsupported_parameter")
    return frozenset(included)


def _messages(data: Mapping[str, Any], memo: Memo) -> tuple[Message, ...]:
    items = data.get("input")
    if isinstance(items, str):
        items = [{"role": "user", "content": items}]
    if not isinstance(items, list) or not items:
        raise WireError("input must be a string or a list of items, and not empty", param="input")
    conversation = _Conversation()
    for item in memo.read(items, lambda item, i: _item(item, f"input[{i}]")):
        conversation.add(item)
    conversation.end_turn()
    messages = conversation.messages
    if not messages or messages[-1].role == "assistant":
        calls = messages[-1].tool_calls if messages else ()
        why = f"No tool output found for function call {calls[0].id}." if calls else PREFILL
        raise WireError(why, param="input")
    instructions = base.optional(data, "instructions", str)
    return tuple([Message("system", instructions), *messages] if instructions else messages)


_ROLES: Mapping[str, Role] = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
#: Kinds of part that hold text -> the key that holds it.
_TEXT_PARTS: Mapping[str, str] = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal"}
_REASONING_PARTS: Mapping[str, str] = {"summary_text": "text", "reasoning_text": "text", "text": "text"}


#: A message, a call, or a thought.
_Item = Message | ToolCall | str


@dataclass(slots=True)
class _Conversation:
    """Messages from items; the assistant turn that is still open is kept apart."""

    messages: list[Message] = field(default_factory=list)
    _thoughts: list[str] = field(default_factory=list)
    _said: str | None = None
    _calls: list[ToolCall] = field(default_factory=list)

    def add(self, item: _Item) -> None:
        if isinstance(item, ToolCall):
            self._calls.append(item)
        elif isinstance(item, str):
            self._end_spoken_turn()
            self._thoughts.append(item)
        elif item.role == "assistant":
            self._end_spoken_turn()
            self._said = item.content
        else:
            self.end_turn()
            self.messages.append(item)

    def end_turn(self) -> None:
        reasoning = base.join_text(self._thoughts, sampled=True) or None
        if reasoning is not None or self._said is not None or self._calls:
            self.messages.append(Message("assistant", self._said or "", reasoning, tuple(self._calls)))
        self._thoughts, self._said, self._calls = [], None, []

    def _end_spoken_turn(self) -> None:
        if self._said is not None or self._calls:
            self.end_turn()


def _item(item: Any, where: str) -> _Item:
    if not isinstance(item, dict):
        raise WireError("an item must be a JSON object", param=where)
    kind = item.get("type") or ("message" if "role" in item else None)
    at = f"{where}."
    if kind == "message":
        role = _ROLES.get(str(item.get("role")))
        if role is None:
            raise WireError(f"unknown role {item.get('role')!r}", param=f"{at}role")
        return Message(role, _text(item.get("content"), f"{at}content", sampled=role == "assistant"))
    if kind == "reasoning":
        return _reasoning(item, at)
    if kind == "function_call":
        return _call(item, parse_arguments(base.expect(item, "arguments", str, at)), at)
    if kind == "custom_tool_call":
        return _call(item, {"input": base.expect(item, "input", str, at)}, at)
    if kind in ("function_call_output", "custom_tool_call_output"):
        output = _text(item.get("output"), f"{at}output", sampled=False)
        return Message("tool", output, tool_call_id=base.expect(item, "call_id", str, at))
    raise WireError(f"an item of type {kind!r} cannot be honoured here", param=where)


def _call(item: Mapping[str, Any], arguments: Mapping[str, Any] | str, at: str) -> ToolCall:
    name = joined_name(base.optional(item, "namespace", str, at), base.expect(item, "name", str, at))
    return ToolCall(name, arguments, base.expect(item, "call_id", str, at))


def _reasoning(item: Mapping[str, Any], at: str) -> str:
    """The fullest text that an item holds."""
    encrypted = _decrypt(base.optional(item, "encrypted_content", str, at) or "")
    shown = [
        base.join_text(_parts(base.optional(item, key, list, at) or [], f"{at}{key}", _REASONING_PARTS), sampled=True)
        for key in ("content", "summary")
    ]
    return encrypted or shown[0] or shown[1]


def _text(content: Any, where: str, *, sampled: bool) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise WireError("content must be a string or a list of parts", param=where)
    return base.join_text(_parts(content, where, _TEXT_PARTS), sampled=sampled)


def _parts(parts: Sequence[Any], where: str, keys: Mapping[str, str]) -> Iterator[str]:
    for i, part in enumerate(parts):
        kind = part.get("type") if isinstance(part, dict) else None
        key = keys.get(kind) if isinstance(kind, str) else None
        if key is None or not isinstance(part.get(key), str):
            raise base.unsupported_part(kind, f"{where}[{i}]")
        yield part[key]
