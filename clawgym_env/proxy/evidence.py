"""What texts say about where a request came from: quoted summaries, told histories, tasks handed on in tool calls.

Invariant: pure, and bounded by the length of the texts; a few lines stand for a text, so that a harness may cut it, tag
it, or put a heading over it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from clawgym_env.types import Message

#: A text shorter than this occurs anywhere by chance.
MIN_TEXT = 8
_LINE = re.compile(rf"\S.{{{MIN_TEXT - 1},59}}")
_TAG = re.compile(r"</?[A-Za-z][\w-]*>")
_SUMMARY = re.compile(r"summar|compact|condens|compress|handoff|hand-off|snapshot|checkpoint", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Opening:
    """How a conversation begins: what tells one agent from another.

    Attributes:
        system: Its system prompt.
        users: What the user side says before the first answer.
        tools: Names of the tools that are offered.
    """

    system: str
    users: tuple[str, ...]
    tools: frozenset[str]

    @classmethod
    def of(cls, messages: Sequence[Message], tools: Iterable[str]) -> Opening:
        """The opening of a whole request."""
        body = next((i for i, m in enumerate(messages) if m.role != "system"), len(messages))
        answer = next((i for i, m in enumerate(messages) if m.role in ("assistant", "tool")), len(messages))
        system = "\n".join(m.content for m in messages[:body])
        return cls(system, tuple(m.content.strip() for m in messages[body:answer]), frozenset(tools))

    def alike(self, other: Opening) -> bool:
        """Whether both are one agent's, whatever it is told to do."""
        return self.tools == other.tools and self.bears_prompt_of(other)

    def bears_prompt_of(self, other: Opening) -> bool:
        """Whether the system prompts are the same but for a line or so, such as a date."""
        if self.system == other.system:
            return True
        mine, theirs = set(self.system.splitlines()), set(other.system.splitlines())
        size = sum(map(len, mine | theirs))
        return sum(map(len, mine & theirs)) >= 0.9 * size


def told(messages: Iterable[Message]) -> str:
    """What the harness says in a request, the policy's own turns left out."""
    return "\n".join(m.content for m in messages if m.role in ("system", "user"))


def probe(text: str) -> str:
    """A line that stands for a text; empty where there is none long enough."""
    found = _LINE.search(text)
    return found[0].rstrip() if found else ""


def quotes(text: str, reply: str) -> bool:
    """Whether a text holds a good part of an earlier reply, whatever was put around it."""
    lines = [line.strip() for line in _TAG.sub("\n", reply).splitlines()]
    longest = sorted((line for line in lines if len(line) >= MIN_TEXT), key=len, reverse=True)[:20]
    size = sum(map(len, longest))
    return size >= 2 * MIN_TEXT and sum(len(line) for line in longest if line in text) >= 0.3 * size


def retells(text: str, history: Iterable[str]) -> float:
    """Share of a history's probes that a text holds; 0 where that is only one, or there are none."""
    probes = list(history)
    found = sum(p in text for p in probes)
    return found / len(probes) if found >= 2 else 0.0


def asks_for_summary(messages: Sequence[Message]) -> bool:
    """Whether the system prompt or the last turn speaks of summing up."""
    ends = [m for m in messages if m.role == "system"] + [m for m in messages[-1:] if m.role == "user"]
    return any(_SUMMARY.search(text) for m in ends for text in (m.content[:2000], m.content[-2000:]))


def hands_on(arguments: Iterable[str], opening: Opening) -> tuple[int, bool]:
    """How well a tool call's arguments explain that a conversation was begun.

    Returns:
        Length of the common text, 0 where the conversation owes them nothing; and whether the arguments hold a whole
        user message, which leaves the least doubt.
    """
    whole = "\n".join(opening.users)
    best = (0, False)
    for text in arguments:
        held = max((len(u) for u in opening.users if len(u) >= MIN_TEXT and u in text), default=0)
        put = len(text) if whole.endswith(text) or (text in whole and len(text) >= 0.3 * len(whole)) else 0
        best = max(best, (max(held, put), held > 0))
    return best


def texts_of(arguments: Mapping[str, Any] | str) -> list[str]:
    """The texts within tool arguments that are long enough to be told apart."""
    return [t for t in (s.strip() for s in _strings(arguments)) if len(t) >= MIN_TEXT]


def _strings(value: object) -> Iterator[str]:
    stack = [value]
    while stack:
        at = stack.pop()
        if isinstance(at, str):
            yield at
        elif isinstance(at, Mapping):
            stack.extend(at.values())
        elif isinstance(at, list):
            stack.extend(at)
