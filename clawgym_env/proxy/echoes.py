"""What harnesses do to the messages they tell again: pure functions over messages.

Invariant: the policy sees a conversation in one form, whichever way it is told: system texts without what changes from
request to request, an answer's parallel calls in one message, and their results in the order of the calls (chat
templates show no ids, so the order alone says which result is whose).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from clawgym_env.dialect import Rewrite, Tolerance
from clawgym_env.types import Message, ToolCall
from clawgym_env.wire.base import parse_arguments

_MINTED = re.compile(r"call(\d+)x(\d+)")


def mint(number: int, index: int) -> str:
    """The id of a tool call: unique in the rollout; letters and digits only, as some harnesses strip the rest."""
    return f"call{number}x{index}"


def stabilise(
    messages: tuple[Message, ...], rewrites: Sequence[Rewrite]
) -> tuple[tuple[Message, ...], tuple[str, ...]]:
    """The messages with every rewrite applied to the texts of its role, and the names of those that changed any."""
    if not rewrites:
        return messages, ()
    names: dict[str, None] = {}
    out = list(messages)
    roles = {rewrite.role for rewrite in rewrites}
    for i, message in enumerate(messages):
        if message.role not in roles:
            continue
        text = message.content
        for rewrite in rewrites:
            if rewrite.role != message.role:
                continue
            text, times = rewrite.pattern.subn(rewrite.replacement, text)
            if times:
                names[rewrite.name] = None
        if text != message.content:
            out[i] = replace(message, content=text)
    return tuple(out), tuple(names)


def arrange(
    messages: tuple[Message, ...], tolerates: frozenset[Tolerance]
) -> tuple[tuple[Message, ...], frozenset[Tolerance]]:
    """The messages in the one form (see the module), as far as that is tolerated, and what was out of order."""
    out: list[Message] | None = None  # None: as the messages are, up to here
    found: set[Tolerance] = set()
    at, size = 0, len(messages)
    while at < size:
        end = at + 1
        if messages[at].tool_calls and _needs_care(messages, at):
            turn, end, what = _turn(messages, at, tolerates)
            if what and out is None:
                out = list(messages[:at])
            found |= what
            if out is not None:
                out += turn
        elif out is not None:
            out.append(messages[at])
        at = end
    return messages if out is None else tuple(out), frozenset(found)


def _needs_care(messages: tuple[Message, ...], at: int) -> bool:
    """Whether what follows an answer with tool calls may be out of order; quick, as it hardly ever is."""
    if at + 2 >= len(messages):
        return False
    second = messages[at + 2]
    if second.role == "tool":
        return True
    split = messages[at + 1] if messages[at + 1].tool_calls else second
    if not split.tool_calls:
        return False
    one, other = messages[at].tool_calls[0].id, split.tool_calls[0].id
    return one.startswith("call") and one.partition("x")[0] == other.partition("x")[0]


def _turn(
    messages: tuple[Message, ...], at: int, tolerates: frozenset[Tolerance]
) -> tuple[list[Message], int, set[Tolerance]]:
    """An answer with tool calls and what follows of its results, arranged; where that ends; what was out of order."""
    found: set[Tolerance] = set()
    answer = messages[at]
    results, end = _results(messages, at + 1)
    number = _number(answer) if Tolerance.SPLIT_CALLS in tolerates else None
    if number is not None:
        parts = [answer]
        ids = {call.id for call in answer.tool_calls}
        while end < len(messages) and _number(messages[end]) == number:
            part = messages[end]
            if not ids.isdisjoint(call.id for call in part.tool_calls):
                break  # the same answer told again
            ids.update(call.id for call in part.tool_calls)
            parts.append(part)
            more, end = _results(messages, end + 1)
            results += more
        if len(parts) > 1:
            answer = _joined(parts)
            found.add(Tolerance.SPLIT_CALLS)
    order = {call.id: i for i, call in enumerate(answer.tool_calls)}
    places = [order.get(r.tool_call_id or "", -1) for r in results]
    if -1 not in places and places != sorted(places) and (found or Tolerance.REORDERED_RESULTS in tolerates):
        results = [r for _, r in sorted(zip(places, results, strict=True), key=lambda pair: pair[0])]
        found = found or {Tolerance.REORDERED_RESULTS}
    return [answer, *results], end, found


def _results(messages: tuple[Message, ...], at: int) -> tuple[list[Message], int]:
    end = at
    while end < len(messages) and messages[end].role == "tool":
        end += 1
    return list(messages[at:end]), end


def _number(message: Message) -> int | None:
    """The number of the answer whose calls a message tells, where we minted all their ids for one answer."""
    numbers = set()
    for call in message.tool_calls:
        minted = _MINTED.fullmatch(call.id)
        numbers.add(int(minted[1]) if minted else None)
    return numbers.pop() if len(numbers) == 1 else None


def _joined(parts: Sequence[Message]) -> Message:
    """One answer from its parts; a text that every part repeats is told once."""
    calls = sorted((c for p in parts for c in p.tool_calls), key=lambda c: int(c.id.rpartition("x")[2]))
    reasoning = "".join(dict.fromkeys(p.reasoning for p in parts if p.reasoning))
    return replace(
        parts[0],
        content="".join(dict.fromkeys(p.content for p in parts)),
        reasoning=reasoning or None,
        tool_calls=tuple(calls),
    )


def differences(original: Message, echo: Message) -> frozenset[Tolerance] | None:
    """In what an assistant message differs from the one that it seems to be an echo of.

    Returns:
        Empty where it says exactly the same (ids and key order say nothing); ``None`` where it is another message.
    """
    if len(original.tool_calls) != len(echo.tool_calls):
        return None
    found: set[Tolerance] = set()
    if original.content != echo.content:
        said, told = original.content.strip(), echo.content.strip()
        if said == told:
            found.add(Tolerance.TRIMMED_TEXT)
        elif not told and original.tool_calls:
            found.add(Tolerance.DROPPED_TEXT)
        else:
            return None
    if original.reasoning != echo.reasoning:
        thought, told = (original.reasoning or "").strip(), (echo.reasoning or "").strip()
        if thought == told:
            found.add(Tolerance.TRIMMED_TEXT)
        elif not told:
            found.add(Tolerance.DROPPED_REASONING)
        elif told in thought:
            found.add(Tolerance.PARTIAL_REASONING)
        else:
            return None
    for said_call, told_call in zip(original.tool_calls, echo.tool_calls, strict=True):
        if not _same_call(said_call, told_call, found):
            return None
    return frozenset(found)


def _same_call(said: ToolCall, told: ToolCall, found: set[Tolerance]) -> bool:
    """Whether a call is the echo of another; adds in what it differs."""
    if said.name != told.name:
        if not said.id or said.id != told.id:
            return False
        found.add(Tolerance.RENAMED_CALLS)
    arguments = said.arguments
    if isinstance(arguments, str) and not isinstance(told.arguments, str):
        arguments = parse_arguments(arguments)  # kept as text, as parsers disagree on it; a wire has parsed its echo
    if same(arguments, told.arguments):
        return True
    if includes(told.arguments, arguments):
        found.add(Tolerance.INSERTED_ARGUMENTS)
    elif said.id and said.id == told.id:
        found.add(Tolerance.REWRITTEN_ARGUMENTS)
    else:
        return False
    return True


def same(one: Any, other: Any) -> bool:
    """Equality of JSON values: unlike Python's, true is not 1."""
    return bool(one == other) and (unmistakable(one) or _same_truths(one, other))


def unmistakable(value: Any) -> bool:
    """Whether Python's equality with a JSON value is JSON's: nothing in it is, or equals, a truth value."""
    if isinstance(value, dict):
        return all(isinstance(v, str) or unmistakable(v) for v in value.values())
    if isinstance(value, list):
        return all(map(unmistakable, value))
    return not isinstance(value, int | float) or value not in (0, 1)


def _same_truths(one: Any, other: Any) -> bool:
    """Whether equal values have truth values in the same places."""
    if isinstance(one, dict):
        return all(_same_truths(v, other[k]) for k, v in one.items())
    if isinstance(one, list):
        return all(map(_same_truths, one, other))
    return isinstance(one, bool) == isinstance(other, bool)


def includes(whole: Any, part: Any) -> bool:
    """Whether a JSON value is another with keys added to its objects."""
    if isinstance(part, dict):
        return isinstance(whole, dict) and all(k in whole and includes(whole[k], v) for k, v in part.items())
    if isinstance(part, list):
        return isinstance(whole, list) and len(whole) == len(part) and all(map(includes, whole, part))
    return same(whole, part)
