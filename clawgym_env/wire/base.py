"""What every wire shares: the parsed reply, the contract of a wire module, and readers for request fields.

Invariant: a wire is a module of pure functions, JSON <-> types. The streamed and the unstreamed answer carry the same
message, because both are made from one parsed :class:`Reply`. A request field that would change the meaning and cannot
be honoured is refused by name; harmless ones are recorded in ``ChatRequest.extra``.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import orjson

from clawgym_env.errors import ContextOverflow, WireError
from clawgym_env.types import ChatRequest, FinishReason, Message

#: Levels that we may put around what a client sent, and brackets that a text may open before its depth is looked at.
_MARGIN, _LEVELS = 40, 150
#: Requests whose messages a memo keeps.
_REMEMBERED = 3

T = TypeVar("T")

#: Key under which arguments that are no JSON object are shown on a wire that takes objects only.
RAW_ARGUMENTS = "raw_arguments"


@dataclass(frozen=True, slots=True)
class Usage:
    """Truthful token counts; harnesses decide on compaction by them.

    Attributes:
        prompt_tokens: The whole prompt, cached part included.
        cached_tokens: Part of the prompt whose KV was reused.
    """

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class Reply:
    """One parsed answer, ready for its wire.

    Attributes:
        number: Counts the rollout's calls from 1; ids on the wire are made of it.
        created: Seconds since the epoch.
        request: What was asked, for the parts of it that the answer repeats.
        stop_text: The stop sequence of the request that ended the answer, where one did.
    """

    number: int
    created: int
    request: ChatRequest
    message: Message
    finish_reason: FinishReason
    usage: Usage
    stop_text: str | None = None

    @property
    def runs_tools(self) -> bool:
        """Whether the harness should run the tool calls: those of a truncated answer are not to be trusted."""
        return bool(self.message.tool_calls) and self.finish_reason != "length"


class Memo:
    """What a rollout's requests told before: a harness tells its whole history again with each call.

    Lists are compared as they came, by Python's equality, so that only what is new is read. The latest few are kept, as
    agents of one rollout take turns; each is one request's messages.
    """

    def __init__(self) -> None:
        self._known: list[tuple[list[Any], list[Any]]] = []

    def read(self, told: list[Any], read: Callable[[Any, int], T]) -> list[T]:
        """What ``read(item, position)`` gives for each item.

        Raises:
            WireError: an item is nested too deeply, or whatever ``read`` raises.
        """
        shared, at = 0, None
        for k, (known, _) in enumerate(self._known):
            length = _common_prefix(known, told)
            if length > shared:
                shared, at = length, k
        check_depth(told[shared:])
        out: list[T] = self._known.pop(at)[1][:shared] if at is not None else []
        out += [read(item, i) for i, item in enumerate(told[shared:], shared)]
        self._known.insert(0, (told, out))
        del self._known[_REMEMBERED:]
        return out


def _common_prefix(one: list[Any], other: list[Any]) -> int:
    length = min(len(one), len(other))
    if one[:length] == other[:length]:
        return length
    return next(i for i in range(length) if one[i] != other[i])


class Wire(Protocol):
    """A wire module.

    Attributes:
        IN_STREAM: Error codes that a streaming client expects as an event rather than as an HTTP status.
    """

    IN_STREAM: frozenset[str]

    def parse_request(self, body: bytes, params: Mapping[str, str], memo: Memo | None = None) -> ChatRequest:
        """Reads a request.

        Args:
            params: Path and query parameters, for APIs that put the model there.
            memo: What this wire has read for the same rollout.

        Raises:
            WireError: malformed, or asking for something that cannot be honoured; ``param`` names the field.
        """
        ...

    def render_reply(self, reply: Reply) -> dict[str, Any]:
        """The unstreamed response body."""
        ...

    def stream_type(self, request: ChatRequest) -> bytes:
        """Content type of a streamed answer."""
        ...

    def keep_alive(self, request: ChatRequest) -> bytes:
        """What keeps a waiting client's stream open; no event that a client acts on."""
        ...

    def stream_deltas(self, reply: Reply) -> Iterable[bytes]:
        """Events that carry the message, before those that end it."""
        ...

    def stream_end(self, reply: Reply) -> Iterable[bytes]:
        """The terminal events; the call must be committed before the first of them is sent."""
        ...

    def render_error(self, error: WireError) -> dict[str, Any]:
        """The API's error body."""
        ...

    def stream_error(self, error: WireError, request: ChatRequest | None, sent: Reply | None = None) -> Iterable[bytes]:
        """How an error ends a stream whose headers have gone out.

        Args:
            sent: The answer whose ``stream_deltas`` have gone out as well.
        """
        ...

    def overflow(self, error: ContextOverflow) -> WireError:
        """The refusal that makes this API's harnesses compact."""
        ...


class CountingWire(Wire, Protocol):
    """A wire whose API counts prompt tokens."""

    def parse_count_request(self, body: bytes, params: Mapping[str, str]) -> ChatRequest:
        """Reads a request whose prompt is to be counted; as ``parse_request``."""
        ...

    def render_token_count(self, tokens: int) -> dict[str, Any]:
        """The answer to it."""
        ...


def load_object(body: bytes, told: str) -> dict[str, Any]:
    """Reads a JSON object.

    Args:
        told: The field that holds the messages; how deep these are is looked at where they are read (:class:`Memo`).

    Raises:
        WireError: it is none, or nested too deeply.
    """
    try:
        data = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        data = _load_leniently(body, str(error))
    if not isinstance(data, dict):
        raise WireError("the request body must be a JSON object", code="invalid_json")
    check_depth({key: value for key, value in data.items() if key != told})
    return data


def check_depth(data: Any) -> None:
    """Sees to it that what was read can be written again, inside of something else: orjson writes some 250 levels.

    Raises:
        WireError: it is nested too deeply.
    """
    if not _shallow(data):
        raise WireError("the request is nested too deeply", code="too_deep")


def _shallow(data: Any) -> bool:
    for _ in range(_MARGIN):
        data = [data]
    try:
        orjson.dumps(data)
    except TypeError:
        return False
    return True


def _load_leniently(body: bytes, problem: str) -> Any:
    # A harness that cuts a tool's output in mid-emoji sends half a surrogate pair, which UTF-8 cannot hold.
    try:
        text = json.dumps(json.loads(body), ensure_ascii=False)
        return orjson.loads(text.encode("utf-16", "surrogatepass").decode("utf-16", "replace"))
    except (ValueError, RecursionError):
        raise WireError(f"the request body is not valid JSON: {problem}", code="invalid_json") from None


def check_fields(
    data: Mapping[str, Any],
    *,
    read: Collection[str],
    harmless: Collection[str],
    neutral: Mapping[str, Sequence[Any]],
    where: str = "",
) -> dict[str, Any]:
    """Fields that are recorded and not acted on.

    Args:
        read: Fields that the caller reads itself.
        harmless: Fields that may be left alone whatever they say.
        neutral: Field -> values that ask for nothing.
        where: Path of ``data`` in the body, ending in a dot where it is not empty.

    Raises:
        WireError: any other field.
    """
    extra = {}
    for key, value in data.items():
        if key in read:
            continue
        if key in harmless or value is None or value in neutral.get(key, ()):
            extra[key] = value
        else:
            name = where + key
            raise WireError(f"{name} cannot be honoured by this endpoint", param=name, code="unsupported_parameter")
    return extra


_KINDS: Mapping[type, str] = {list: "an array", dict: "an object", str: "a string", bool: "true or false"}


def expect(data: Mapping[str, Any], key: str, kind: type, where: str = "") -> Any:
    """A field that must be there.

    Raises:
        WireError: it is missing or of another type.
    """
    value = optional(data, key, kind, where)
    if value is None:
        raise WireError(f"{where}{key} must be given, as {_KINDS[kind]}", param=where + key)
    return value


def optional(data: Mapping[str, Any], key: str, kind: type, where: str = "") -> Any:
    """A field of one type, or ``None``.

    Raises:
        WireError: it is of another type.
    """
    value = data.get(key)
    if value is not None and not isinstance(value, kind):
        raise WireError(f"{where}{key} must be {_KINDS[kind]}", param=where + key)
    return value


def number(data: Mapping[str, Any], key: str, low: float, high: float, where: str = "") -> float | None:
    """A number in [low, high], or ``None``.

    Raises:
        WireError: it is something else.
    """
    value = data.get(key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise WireError(f"{where}{key} must be a number", param=where + key)
    if not low <= value <= high:
        raise WireError(f"{where}{key} must lie in [{low:g}, {high:g}]", param=where + key)
    return float(value)


def integer(data: Mapping[str, Any], key: str, low: int = 1, where: str = "") -> int | None:
    """An integer of at least ``low``, or ``None``.

    Raises:
        WireError: it is something else.
    """
    value = data.get(key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or value < low:
        raise WireError(f"{where}{key} must be an integer of at least {low}", param=where + key)
    return value


def strings(data: Mapping[str, Any], key: str, where: str = "") -> tuple[str, ...]:
    """A string or a list of strings, empty ones left out.

    Raises:
        WireError: it is something else.
    """
    value = data.get(key)
    if value is None:
        return ()
    listed = [value] if isinstance(value, str) else value
    if not isinstance(listed, list) or not all(isinstance(v, str) for v in listed):
        raise WireError(f"{where}{key} must be a string or an array of strings", param=where + key)
    return tuple(v for v in listed if v)


def schema(data: Any, where: str) -> Mapping[str, Any]:
    """A tool's JSON schema; nothing stands for an empty one.

    Raises:
        WireError: it is not an object.
    """
    if data is None or data == []:
        return {}
    if not isinstance(data, dict):
        raise WireError("a tool's parameters must be a JSON schema object", param=where)
    return data


def join_text(parts: Iterable[str], *, sampled: bool) -> str:
    """One text from the blocks of a message.

    Blocks that a harness wrote are paragraphs of their own; those of the policy's own answer are pieces of one text.
    """
    return ("" if sampled else "\n").join(parts)


def unsupported_part(kind: object, where: str) -> WireError:
    """The refusal of an image, a sound or a file."""
    return WireError(f"this text policy cannot take a content part of type {kind!r}", param=where)


def parse_arguments(text: str) -> Mapping[str, Any] | str:
    """Tool arguments from JSON text; the text itself where it is no object."""
    try:
        parsed = orjson.loads(text)
    except orjson.JSONDecodeError:
        return text
    if not isinstance(parsed, dict) or (text.count("{") + text.count("[") > _LEVELS and not _shallow(parsed)):
        return text
    return parsed


def arguments_text(arguments: Mapping[str, Any] | str) -> str:
    """Tool arguments as JSON text, or the model's own text where it did not parse."""
    return arguments if isinstance(arguments, str) else orjson.dumps(arguments).decode()


def arguments_object(arguments: Mapping[str, Any] | str) -> Mapping[str, Any]:
    """Tool arguments as an object: text that did not parse goes under a key that no tool has, so that none runs it."""
    return {RAW_ARGUMENTS: arguments} if isinstance(arguments, str) else arguments


def original_arguments(arguments: Mapping[str, Any]) -> Mapping[str, Any] | str:
    """Inverse of :func:`arguments_object`."""
    raw = arguments.get(RAW_ARGUMENTS)
    return raw if isinstance(raw, str) and len(arguments) == 1 else arguments
