"""Gemini's contents <-> messages, for :mod:`clawgym_env.wire.gemini`.

The API lets clients drop the ids of function calls, and its harnesses drop thoughts. So every answer carries both once
more, in the ``thoughtSignature`` that clients must send back, and what comes back is read from there where it is
missing.

Keys are read in snake case and in camel case at every level, as protobuf's JSON form has it: the official Python client
mixes both in one body.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Iterable, Iterator, Mapping
from itertools import groupby
from typing import Any

import orjson

from clawgym_env.errors import WireError
from clawgym_env.types import Message, ToolCall
from clawgym_env.wire import base
from clawgym_env.wire.base import Memo, arguments_object, original_arguments

#: A part and its path in the body.
Placed = tuple[str, dict[str, Any]]

_OURS = b"clawgym1:"


def camel(data: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of one level in camel case."""
    return {re.sub(r"_([a-z])", lambda m: m[1].upper(), key): value for key, value in data.items()}


def as_object(data: Any, where: str) -> dict[str, Any]:
    """An object, its keys in camel case.

    Raises:
        WireError: it is none.
    """
    if not isinstance(data, dict):
        raise WireError(f"{where} must be an object", param=where)
    return camel(data)


def signature_of(message: Message) -> str:
    """What the client must send back: the ids of a turn's calls, and its reasoning.

    In the standard alphabet, with padding: pi drops signatures of any other form. The official Python client sends
    them back in the URL-safe one.
    """
    content = {"ids": [c.id for c in message.tool_calls], "reasoning": message.reasoning}
    return base64.b64encode(_OURS + orjson.dumps(content)).decode()


def read_signature(text: object) -> tuple[list[str], str | None] | None:
    """Inverse of :func:`signature_of`: ids and reasoning; ``None`` for signatures that are not ours."""
    if not isinstance(text, str):
        return None
    standard = text.replace("-", "+").replace("_", "/").rstrip("=")
    try:
        data = base64.b64decode(standard + "=" * (-len(standard) % 4), validate=True)
        content = orjson.loads(data.removeprefix(_OURS)) if data.startswith(_OURS) else None
    except (binascii.Error, ValueError):
        return None
    if not isinstance(content, dict):
        return None
    ids, reasoning = content.get("ids"), content.get("reasoning")
    if not isinstance(ids, list) or not all(isinstance(i, str) for i in ids) or not isinstance(reasoning, str | None):
        return None
    return ids, reasoning


def render_parts(message: Message, *, thoughts: bool) -> list[dict[str, Any]]:
    """The parts of an answer, never none.

    The signature is where the API puts it: with the first call, or with the text where there is none.

    Args:
        thoughts: Whether the reasoning is to be a part of its own.
    """
    signature = {"thoughtSignature": signature_of(message)} if message.tool_calls or message.reasoning else {}
    parts: list[dict[str, Any]] = []
    if message.reasoning is not None and thoughts:
        parts.append({"text": message.reasoning, "thought": True})
    if not message.tool_calls:
        parts.append({"text": message.content, **signature})
    elif message.content:
        parts.append({"text": message.content})
    for i, call in enumerate(message.tool_calls):
        function = {"id": call.id, "name": call.name, "args": arguments_object(call.arguments)}
        parts.append({"functionCall": function, **({} if i else signature)})
    return parts


def read_system(data: Any) -> list[Message]:
    """The system message of a ``systemInstruction``: a content, parts, or text; none where it says nothing.

    Raises:
        WireError: it holds something else than text.
    """
    if isinstance(data, str):
        data = {"text": data}
    elif isinstance(data, dict):
        content = as_object(data, "systemInstruction")
        base.check_fields(content, read={"parts"}, harmless={"role"}, neutral={}, where="systemInstruction.")
        data = content.get("parts")
    texts = []
    for where, part in _part_list(data, "systemInstruction.parts"):
        kind = _kind(part, where)
        if kind == "text":
            texts.append(_text(part, where))
        elif kind is not None:
            raise base.unsupported_part(kind, where)
    text = base.join_text(texts, sampled=False)
    return [Message("system", text)] if text else []


def read_contents(data: Any, memo: Memo) -> list[Message]:
    """The messages of ``contents``; there is at least one.

    Raises:
        WireError: there is none, or one that cannot be read.
    """
    contents = [data] if isinstance(data, dict) else data
    if not isinstance(contents, list) or not contents:
        raise WireError("contents is not specified: it must be an array with at least one content", param="contents")
    turns = memo.read(contents, lambda content, i: _content(content, f"contents[{i}]"))
    messages: list[Message] = []
    unanswered: list[ToolCall] = []
    for sampled, group in groupby(turns, key=lambda turn: turn[0]):
        if sampled:
            # Clients keep each chunk of a streamed answer in their history as a content of its own. Two answers cannot
            # follow each other: a request never ends with one.
            turn = _model_turn(part for _, parts in group for part in parts)
            messages.append(turn)
            unanswered = list(turn.tool_calls)
        else:
            for _, parts in group:
                messages += _user_turn(parts, unanswered)
    return messages


def _content(data: Any, where: str) -> tuple[bool, list[Placed]]:
    """Whether a content is the model's, and its parts."""
    content = as_object(data, where)
    base.check_fields(content, read={"role", "parts"}, harmless=(), neutral={}, where=f"{where}.")
    role = content.get("role") or "user"
    if role not in ("user", "model", "function"):
        raise WireError("Please use a valid role: user, model.", param=f"{where}.role")
    return role == "model", _part_list(content.get("parts"), f"{where}.parts")


def _part_list(data: Any, where: str) -> list[Placed]:
    """Parts with their paths; one part may stand for a list of one."""
    listed = [data] if isinstance(data, dict) else data or []
    if not isinstance(listed, list):
        raise WireError(f"{where} must be an array of parts", param=where)
    return [(f"{where}[{j}]", as_object(part, f"{where}[{j}]")) for j, part in enumerate(listed)]


_BESIDE_DATA = frozenset({"thought", "thoughtSignature", "partMetadata", "mediaResolution"})
_KINDS = frozenset({"text", "functionCall", "functionResponse"})


def _kind(part: Mapping[str, Any], where: str) -> str | None:
    """What a part holds; ``None`` where it holds nothing."""
    kinds = [key for key, value in part.items() if value is not None and key not in _BESIDE_DATA]
    for kind in kinds:
        if kind not in _KINDS:
            raise base.unsupported_part(kind, where)
    if len(kinds) > 1:
        raise WireError(f"{where} must hold one of {', '.join(kinds)}", param=where)
    return kinds[0] if kinds else None


def _text(part: Mapping[str, Any], where: str) -> str:
    return str(base.expect(part, "text", str, f"{where}."))


def _model_turn(parts: Iterable[Placed]) -> Message:
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[ToolCall] = []
    minted: Iterator[str] = iter(())
    signed: str | None = None
    for where, part in parts:
        signature = read_signature(part.get("thoughtSignature"))
        if signature is not None:
            minted, signed = iter(signature[0]), signature[1]
        kind = _kind(part, where)
        if kind == "text":
            (thoughts if part.get("thought") is True else texts).append(_text(part, where))
        elif kind == "functionCall":
            calls.append(_call(part[kind], f"{where}.{kind}", next(minted, "")))
        elif kind is not None:
            raise WireError(f"a {kind} must be in a content of role user", param=where)
    reasoning = base.join_text(thoughts, sampled=True) or signed or None
    return Message("assistant", base.join_text(texts, sampled=True), reasoning, tuple(calls))


def _call(data: Any, where: str, minted: str) -> ToolCall:
    call = as_object(data, where)
    base.check_fields(call, read={"id", "name", "args"}, harmless=(), neutral={}, where=f"{where}.")
    arguments = base.optional(call, "args", dict, f"{where}.") or {}
    name = base.expect(call, "name", str, f"{where}.")
    return ToolCall(name, original_arguments(arguments), base.optional(call, "id", str, f"{where}.") or minted)


def _user_turn(parts: Iterable[Placed], unanswered: list[ToolCall]) -> list[Message]:
    """Function responses as tool messages, and the texts between them as user messages."""
    messages: list[Message] = []
    for is_result, group in groupby(parts, key=lambda placed: _kind(placed[1], placed[0]) == "functionResponse"):
        if is_result:
            messages += [_result(part["functionResponse"], f"{w}.functionResponse", unanswered) for w, part in group]
        else:
            messages.append(Message("user", base.join_text(_said(group), sampled=False)))
    told = [m for m in messages if m.role == "tool" or m.content]
    return told or [Message("user")]


def _said(parts: Iterable[Placed]) -> Iterator[str]:
    for where, part in parts:
        kind = _kind(part, where)
        if kind == "functionCall" or (kind == "text" and part.get("thought") is True):
            raise WireError("calls and thoughts must be in a content of role model", param=where)
        if kind == "text":
            yield _text(part, where)


def _result(data: Any, where: str, unanswered: list[ToolCall]) -> Message:
    """A function response; one without an id answers the earliest call of its name that has no answer yet."""
    result = as_object(data, where)
    read, harmless = {"id", "name", "response", "parts"}, {"willContinue", "scheduling"}
    base.check_fields(result, read=read, harmless=harmless, neutral={}, where=f"{where}.")
    if result.get("parts"):
        raise base.unsupported_part("functionResponse.parts", f"{where}.parts")
    response = base.optional(result, "response", dict, f"{where}.")
    call_id = base.optional(result, "id", str, f"{where}.") or ""
    name = base.optional(result, "name", str, f"{where}.")
    call = next((c for c in unanswered if (c.id == call_id if call_id else c.name == name)), None)
    if call is not None:
        unanswered.remove(call)
        call_id = call.id
    failed = response is not None and response.keys() == {"error"}
    return Message("tool", _result_text(response), tool_call_id=call_id, is_error=failed)


def _result_text(response: Mapping[str, Any] | None) -> str:
    if response is None:
        return ""
    value: Any = response
    if len(response) == 1 and not response.keys().isdisjoint({"output", "result", "error"}):
        (value,) = response.values()
    return value if isinstance(value, str) else orjson.dumps(value).decode()
