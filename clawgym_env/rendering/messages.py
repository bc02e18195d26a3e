"""What a chat family cannot hold, and what is made of it: system messages that move, tools that are refused.

Invariant: what a message becomes depends on nothing that comes after it, so it renders alike on later turns. What a
family can hold is found out by trying it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import orjson

from clawgym_env.errors import RenderingError
from clawgym_env.rendering.library import LIBRARY_ERRORS, Library, Spec
from clawgym_env.rendering.tokenizer import FastTokenizer
from clawgym_env.types import Message, TokenArray, ToolCall, ToolSpec
from clawgym_env.wire.openai_chat import tool_json

#: Checked sets of tools that are remembered: a rollout offers one or two, a run has a few harnesses.
KNOWN_SETS = 64

_LEAD, _ASKED, _SAID = Message("system", "probe a"), Message("user", "probe b"), Message("assistant", "probe c")
_AMID, _AGAIN = Message("system", "probe d"), Message("user", "probe e")


@dataclass(frozen=True, slots=True)
class Folding:
    """Which system messages a chat family cannot hold as they are.

    Attributes:
        leading: Several that open a conversation become one, joined by a newline.
        middle: One in mid-conversation becomes a user message with the same text.
    """

    leading: bool
    middle: bool

    @classmethod
    def of(cls, library: Library, tokenizer: FastTokenizer) -> Folding:
        """What makes the template fail, vanish, change its place, or differ when the next turn is added to it."""
        show = _Shown(library, tokenizer)
        held = show.in_order(_LEAD, _ASKED, _SAID, _AMID, _AGAIN) and show.in_order(_ASKED, _AMID, _SAID, _AGAIN)
        return cls(leading=not show.in_order(_LEAD, _AMID, _ASKED), middle=not held or not show.extends_alike(_AMID))

    def apply(self, messages: Sequence[Message], *, opening: bool) -> list[Message]:
        """The messages with what cannot be held in another place.

        Args:
            opening: Whether they open a conversation; messages that continue one have no leading part.
        """
        lead = next((i for i, m in enumerate(messages) if m.role != "system"), len(messages)) if opening else 0
        head, rest = list(messages[:lead]), messages[lead:]
        if self.leading and lead > 1:
            head = [replace(head[0], content="\n".join(m.content for m in head))]
        return head + [replace(m, role="user") if self.middle and m.role == "system" else m for m in rest]


def linked(messages: Sequence[Message], start: int = 0) -> list[Message]:
    """A conversation whose tool results name their tool, with call ids in the form ``functions.NAME:NUMBER``.

    Some chat formats show the names, and Kimi's the ids, in this form; harnesses send neither.

    Args:
        messages: The whole conversation.
        start: Where the part begins that is wanted.
    """
    known: dict[str, tuple[str, int]] = {}
    count = 0
    for message in messages[:start]:
        for call in message.tool_calls:
            known[call.id] = call.name, count
            count += 1
    out: list[Message] = []
    for message in messages[start:]:
        if message.tool_calls:
            calls = []
            for call in message.tool_calls:
                known[call.id] = call.name, count
                calls.append(ToolCall(call.name, call.arguments, _call_id(call.name, count)))
                count += 1
            message = replace(message, tool_calls=tuple(calls))
        elif message.role == "tool" and message.tool_call_id in known:
            name, number = known[message.tool_call_id]
            message = replace(message, tool_call_id=_call_id(name, number), name=name)
        out.append(message)
    return out


def _call_id(name: str, number: int) -> str:
    return f"functions.{name}:{number}"


class _Shown:
    """What a model sees of messages."""

    def __init__(self, library: Library, tokenizer: FastTokenizer) -> None:
        self._library, self._tokenizer = library, tokenizer

    def in_order(self, *messages: Message) -> bool:
        """Whether all texts are there, in their order, with a tool on offer and without."""
        for specs in ([tool_json(ToolSpec("probe"))], None):
            try:
                text = self._tokenizer.decode(self._library.prompt(messages, specs).tolist())
            except LIBRARY_ERRORS:
                return False
            places = [text.find(m.content) for m in messages]
            if places[0] < 0 or places != sorted(set(places)):
                return False
        return True

    def extends_alike(self, message: Message) -> bool:
        """Whether a message shows alike when it extends a history and when the whole is rendered."""
        prompt, answer = self._library.prompt([_LEAD, _ASKED]), self._library.answer(_SAID)
        bridged = self._library.bridge(prompt, answer, [message], None)
        whole = self._library.prompt([_LEAD, _ASKED, _SAID, message])
        return bridged is None or self._after(bridged) == self._after(whole)

    def _after(self, ids: TokenArray) -> str:
        return self._tokenizer.decode(ids.tolist()).partition(_SAID.content)[2]


class ToolSpecs:
    """Tools in the library's form, each set that a harness offers checked once."""

    def __init__(self, library: Library) -> None:
        self._library = library
        self._checked: set[bytes] = set()
        self._reads_calls = self._can_call("probe")

    def __call__(self, tools: Sequence[ToolSpec]) -> list[Spec] | None:
        """The tools in the library's form; ``None`` for none.

        Raises:
            RenderingError: one of them is a tool in no chat format; the message names it.
        """
        if not tools:
            return None
        specs = [tool_json(tool) for tool in tools]
        key = b"".join(map(_json, specs))
        if key not in self._checked:
            for tool, spec in zip(tools, specs, strict=True):
                self._check(tool.name, spec)
            if len(self._checked) >= KNOWN_SETS:
                self._checked.clear()
            self._checked.add(key)
        return specs

    def _check(self, name: str, spec: Spec) -> None:
        try:
            self._library.prompt([_ASKED], [spec])
        except LIBRARY_ERRORS as error:
            raise RenderingError(f"the chat template cannot hold the tool {name!r}: {error!r}") from error
        if self._reads_calls and not self._can_call(name):
            raise RenderingError(
                f"the policy's chat format cannot call a tool named {name!r}: name it with letters, digits, '_' and '-'"
            )

    def _can_call(self, name: str) -> bool:
        """Whether a call of a tool of that name is read as it was written."""
        call = ToolCall(name, {})
        try:
            answer = self._library.answer(*linked([Message("assistant", tool_calls=(call,))]))
            return self._library.parse(answer, self._library.prompt([_ASKED]), None).tool_calls == (call,)
        except (*LIBRARY_ERRORS, RenderingError):
            return False


def _json(spec: Spec) -> bytes:
    try:
        return orjson.dumps(spec)
    except TypeError as error:  # orjson's limits: 254 levels, 64-bit integers, valid Unicode
        raise RenderingError(f"the tool {spec['function']['name']!r} is no portable JSON: {error}") from error
