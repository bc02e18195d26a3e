"""How one harness speaks at the model boundary: what it changes in what it echoes, and what its headers say.

Invariant: a dialect is declared by the harness's module, and the default is safe: it overlooks only what cannot turn
one answer into another. Whatever is overlooked is recorded, since the policy's context then differs from what the
harness believes. Key order, spacing and ids of tool calls, cache marks and one text told as a list are no differences.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Literal

from clawgym_env.types import CallKind, Message


class Tolerance(StrEnum):
    """A difference between what was sampled or told before and what a later request tells of it."""

    TRIMMED_TEXT = "trimmed text"
    """White space around a text is gone, or new."""
    INSERTED_ARGUMENTS = "inserted arguments"
    """Tool arguments hold more than was sampled, at any depth: defaults."""
    REWRITTEN_ARGUMENTS = "rewritten arguments"
    """Tool arguments are others; recognised by the call's id alone."""
    DROPPED_REASONING = "dropped reasoning"
    """The thinking is gone."""
    PARTIAL_REASONING = "partial reasoning"
    """One piece of the thinking is left."""
    REORDERED_RESULTS = "reordered results"
    """Results of parallel calls do not come in the order of their calls; the policy sees them in that order."""
    SPLIT_CALLS = "split calls"
    """Parallel calls of one answer come as several, with results in between; the policy sees one answer."""
    DROPPED_TEXT = "dropped text"
    """The text beside tool calls is gone."""
    RENAMED_CALLS = "renamed calls"
    """A tool call has another name; recognised by its id alone."""


SAFE: frozenset[Tolerance] = frozenset(Tolerance) - {
    Tolerance.REWRITTEN_ARGUMENTS,
    Tolerance.DROPPED_TEXT,
    Tolerance.RENAMED_CALLS,
}


@dataclass(frozen=True, slots=True)
class Rewrite:
    """Takes what changes from request to request out of texts: a billing line, a nonce, a clock.

    Attributes:
        name: What it takes out, for the ledger.
        replacement: As :func:`re.sub` takes it.
        role: Whose texts it is applied to.
    """

    name: str
    pattern: re.Pattern[str]
    replacement: str = ""
    role: Literal["system", "user"] = "system"


@dataclass(frozen=True, slots=True)
class Hints:
    """What one request says of itself: its headers, or a line in its texts.

    Attributes:
        retry: It repeats an earlier request whose answer did not arrive.
        agent: Name of the sub-agent that asks.
        parent: Name of the agent that started it.
        kind: What the call is for.
    """

    retry: bool = False
    agent: str | None = None
    parent: str | None = None
    kind: CallKind | None = None


@dataclass(frozen=True, slots=True)
class Dialect:
    """See the module's invariant.

    Attributes:
        tolerates: Differences that do not keep a request from continuing a call.
        stabilise: Applied in order to every text of their role, before anything else is done with a request.
        retry_header: Counts retries from 0. The official SDKs send the default's.
        kind_header: Its values are looked up in ``kinds``; one that is not there says nothing.
        agent_text: Its last match in texts of user and system names the agent that asks (group 1); a header goes first.
    """

    tolerates: frozenset[Tolerance] = SAFE
    stabilise: tuple[Rewrite, ...] = ()
    retry_header: str | None = "x-stainless-retry-count"
    agent_header: str | None = None
    parent_header: str | None = None
    kind_header: str | None = None
    kinds: Mapping[str, CallKind] = field(default_factory=dict)
    agent_text: re.Pattern[str] | None = None

    def hints(self, headers: Mapping[str, str], messages: Sequence[Message] = ()) -> Hints:
        """Reads a request's headers and, where the dialect says so, its texts.

        Args:
            headers: Names in lower case.
            messages: As they came.
        """
        count = _value(headers, self.retry_header)
        kind = _value(headers, self.kind_header)
        return Hints(
            retry=count is not None and count.isdecimal() and int(count) > 0,
            agent=_value(headers, self.agent_header) or _named(messages, self.agent_text),
            parent=_value(headers, self.parent_header),
            kind=None if kind is None else self.kinds.get(kind),
        )


def _value(headers: Mapping[str, str], name: str | None) -> str | None:
    return None if name is None else headers.get(name.lower(), "").strip() or None


def _named(messages: Sequence[Message], pattern: re.Pattern[str] | None) -> str | None:
    if pattern is None:
        return None
    texts = (message.content for message in reversed(messages) if message.role in ("user", "system"))
    return next((found[-1] for text in texts if (found := pattern.findall(text))), None)
