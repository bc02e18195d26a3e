"""Which committed call does a request continue? A proposal from messages alone.

Invariants:
    1. This only proposes. Harnesses do not echo byte for byte, so messages are compared as the harness's dialect
       allows; whether the tokens agree is decided by the renderer and the tree.
    2. The call proposed is the one whose history is the longest prefix of the request, whatever the order in which
       calls arrived. Where a harness kept the ids that we minted, they say which of several like answers it means; else
       it means an exact one before one that differs, and the latest of equal ones.
    3. Messages are kept in a trie, each once. A request costs one pass over its messages, however long the rollout is.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from clawgym_env.dialect import Dialect, Tolerance
from clawgym_env.proxy.echoes import arrange, differences, stabilise, unmistakable
from clawgym_env.types import Message, Role, ToolSpec

#: A shorter answer without tool calls is not recognised outside its own history: too many say the same.
TELLING_LENGTH = 16

_NOTHING: frozenset[Tolerance] = frozenset()
_TRIMMED = frozenset({Tolerance.TRIMMED_TEXT})
_Key = tuple[Role, str | None, str]


class _Node:
    """A message below those that came before it.

    Attributes:
        message: As it was told or said first.
        calls: Committed calls that said it.
        replies: Assistant messages that follow, in order of arrival.
        others: Other messages that follow.
        last: The latest of these.
        echo: How this was told last, and in what that differs, as it will be told so again; ``None`` where Python's
            equality does not do for it.
    """

    __slots__ = ("calls", "echo", "last", "message", "others", "parent", "replies")

    def __init__(self, message: Message, parent: _Node | None) -> None:
        self.message = message
        self.parent = parent
        self.calls: list[int] = []
        self.replies: list[_Node] = []
        self.others: dict[_Key, _Node] = {}
        self.last: _Node | None = None
        self.echo = (message, _NOTHING) if _plain(message) else None


#: A next step: where to, and what has to be overlooked.
_Option = tuple[_Node, frozenset[Tolerance]]


@dataclass(frozen=True, slots=True, eq=False)
class Tip:
    """Where a request's answer belongs: below ``tail``, which comes after a node of the trie (``None``: is all).

    Attributes:
        seen: What was overlooked on the way to the node.
    """

    node: _Node | None
    seen: frozenset[Tolerance]
    tail: tuple[Message, ...]
    tools: tuple[ToolSpec, ...]


@dataclass(frozen=True, slots=True)
class Proposal:
    """What a request seems to continue.

    Attributes:
        messages: The request's messages as the policy is to see them.
        parent: The call whose history, answer included, is the longest prefix of the request; ``None`` where there is
            none.
        shared: How many of the messages are that history.
        tolerated: What had to be overlooked to say so.
        arranged: The part of it that holds without a parent too: ``messages`` were put in order.
        stabilised: Names of the rewrites that changed a message.
        history: Calls whose answers are in that history, in order.
        answers: Calls whose answers were recognised in what comes after it, in order.
        tip: What :meth:`History.commit` adds the answer to.
    """

    messages: tuple[Message, ...]
    parent: int | None
    shared: int
    tolerated: frozenset[Tolerance]
    arranged: frozenset[Tolerance]
    stabilised: tuple[str, ...]
    history: tuple[int, ...]
    answers: tuple[int, ...]
    tip: Tip | None

    @classmethod
    def nothing(cls, messages: tuple[Message, ...]) -> Proposal:
        """What a request to a frozen model continues."""
        return cls(messages, None, 0, _NOTHING, _NOTHING, (), (), (), None)

    def from_scratch(self) -> Proposal:
        """The same request where the parent's tokens cannot be kept."""
        answers = self.history + self.answers
        return replace(self, parent=None, shared=0, tolerated=self.arranged, history=(), answers=answers)


@dataclass(slots=True, eq=False)
class _Walk:
    """A way through the trie along a request, taken ``at`` messages far.

    Attributes:
        seen: What was overlooked on the way.
        calls: Committed calls whose answers lie on it.
        shared: Messages up to the last of these answers; ``tolerated`` is what was overlooked up to there.
    """

    node: _Node
    at: int = 0
    seen: frozenset[Tolerance] = _NOTHING
    calls: tuple[int, ...] = ()
    shared: int = 0
    tolerated: frozenset[Tolerance] = _NOTHING


class History:
    """What the committed calls of one rollout looked like as messages.

    Attributes:
        continued: Calls whose answers a later committed call's request told, in whatever context.
    """

    def __init__(self, dialect: Dialect | None = None) -> None:
        self._dialect = dialect or Dialect()
        self._trims = Tolerance.TRIMMED_TEXT in self._dialect.tolerates
        self._roots: dict[tuple[str, ...], list[tuple[tuple[ToolSpec, ...], _Node]]] = {}
        self._minted: dict[str, tuple[_Node, int]] = {}
        self._telling: dict[str, int] = {}
        self._as_told: set[int] = set()
        self.continued: set[int] = set()

    def propose(self, tools: tuple[ToolSpec, ...], messages: tuple[Message, ...]) -> Proposal:
        """Matches a request against the committed calls; changes nothing that a later proposal depends on."""
        steady, stabilised = stabilise(messages, self._dialect.stabilise)
        told, arranged = arrange(steady, self._dialect.tolerates)
        root = self._root(tools)
        if root is None:
            tip = Tip(None, _NOTHING, told, tools)
            return Proposal(told, None, 0, arranged, arranged, stabilised, (), tuple(self._recognised(told)), tip)
        walk = self._longest(root, told)
        return Proposal(
            messages=told,
            parent=walk.calls[-1] if walk.calls else None,
            shared=walk.shared,
            tolerated=arranged | walk.tolerated,
            arranged=arranged,
            stabilised=stabilised,
            history=walk.calls,
            answers=tuple(self._recognised(told[walk.shared :])),
            tip=Tip(walk.node, walk.seen, told[walk.at :], tools),
        )

    def commit(self, call_id: int, proposal: Proposal, reply: Message) -> None:
        """Remembers a call."""
        self.continued.update(proposal.history, proposal.answers)
        if proposal.tip is None:
            return
        node = self._grow(proposal.tip)
        said = next((r for r in node.replies if differences(r.message, reply) == _NOTHING), None)
        if said is None:
            said = _Node(reply, node)
            node.replies.append(said)
        said.calls.append(call_id)
        if proposal.parent is None and proposal.tip.seen:
            self._as_told.add(call_id)
        for call in reply.tool_calls:
            self._minted[call.id] = said, call_id
        text = reply.content.strip()
        if not reply.tool_calls and len(text) >= TELLING_LENGTH:
            self._telling[text] = call_id

    def _root(self, tools: tuple[ToolSpec, ...]) -> _Node | None:
        alike = self._roots.get(tuple(t.name for t in tools), ())
        return next((root for known, root in alike if known == tools), None)

    def _longest(self, root: _Node, messages: tuple[Message, ...]) -> _Walk:
        """The way that leads to the last answer told; of several, the longest; of these, the first tried."""
        best = _Walk(root)
        branches: list[tuple[_Walk, _Option | None]] = [(best, None)]
        while branches:
            walk, turn = branches.pop()
            branches += self._follow(walk, turn, messages)
            if (walk.shared, walk.at) > (best.shared, best.at):
                best = walk
        return best

    def _follow(
        self, walk: _Walk, turn: _Option | None, messages: tuple[Message, ...]
    ) -> list[tuple[_Walk, _Option | None]]:
        """Goes as far as the trie does, the likeliest way.

        Args:
            turn: The first step, where it is not to be the likeliest.

        Returns:
            Where else one could have turned, likeliest last.
        """
        branches: list[tuple[_Walk, _Option | None]] = []
        node, seen, calls = walk.node, walk.seen, list(walk.calls)
        at, end = walk.at, len(messages)
        while at < end:
            message = messages[at]
            new = _NOTHING
            if turn is not None:
                (child, new), turn = turn, None
            elif message.role == "assistant":
                only = node.replies[0] if len(node.replies) == 1 else None
                if only is not None and only.echo is not None and _equal(message, only.echo[0]):
                    child, new = only, only.echo[1]
                else:
                    options = self._options(node, message)
                    if not options:
                        break
                    child, new = options[0]
                    for option in reversed(options[1:]):
                        here = _Walk(node, at, seen, tuple(calls), walk.shared, walk.tolerated)
                        branches.append((here, option))
            else:
                found = self._other(node, message)
                if found is None:
                    break
                child = found
                if child.message.content != message.content:
                    new = _TRIMMED
            node = child
            at += 1
            if new:
                seen |= new
            if node.calls:
                calls.append(node.calls[0] if len(node.calls) == 1 else self._call(node, message))
                if calls[-1] in self._as_told:  # it was rendered from scratch, as the harness tells its history
                    seen = _NOTHING
                walk.shared, walk.tolerated = at, seen
        walk.node, walk.at, walk.seen, walk.calls = node, at, seen, tuple(calls)
        return branches

    def _options(self, node: _Node, message: Message) -> list[_Option]:
        """Answers below a node that an assistant message may be the echo of, likeliest first."""
        if message.tool_calls and len(node.replies) > 1:
            known = self._minted.get(message.tool_calls[0].id)
            if known is not None and known[0].parent is node:
                overlooked = self._overlooked(known[0], message)
                if overlooked is not None:
                    return [(known[0], overlooked)]
        known_ways = [(reply, self._overlooked(reply, message)) for reply in reversed(node.replies)]
        options: list[_Option] = [(reply, overlooked) for reply, overlooked in known_ways if overlooked is not None]
        if len(options) > 1:
            options.sort(key=lambda option: (not option[0].calls, bool(option[1]), -_latest(option[0])))
        return options

    def _overlooked(self, node: _Node, message: Message) -> frozenset[Tolerance] | None:
        """In what a message differs from a node's, where all of that is tolerated."""
        if node.echo is not None and _equal(message, node.echo[0]):
            return node.echo[1]
        found = differences(node.message, message)
        if found is None or not found <= self._dialect.tolerates:
            return None
        if node.echo is not None:
            node.echo = message, found
        return found

    def _call(self, node: _Node, message: Message) -> int:
        """Which of the calls that said the same a message means."""
        if message.tool_calls:
            known = self._minted.get(message.tool_calls[0].id)
            if known is not None and known[0] is node:
                return known[1]
        return node.calls[-1]

    def _other(self, node: _Node, message: Message) -> _Node | None:
        last = node.last
        if last is not None:
            was = last.message
            if was.content == message.content and was.role == message.role and was.name == message.name:
                return last
        return node.others.get(self._key(message))

    def _key(self, message: Message) -> _Key:
        return message.role, message.name, message.content.strip() if self._trims else message.content

    def _grow(self, tip: Tip) -> _Node:
        """The node of a request's last message, made where it is missing."""
        node = tip.node or self._root(tip.tools)
        if node is None:
            node = _Node(Message("system"), None)
            self._roots.setdefault(tuple(t.name for t in tip.tools), []).append((tip.tools, node))
        for message in tip.tail:
            told = message.role == "assistant"
            if told:
                child = next((r for r in node.replies if differences(r.message, message) == _NOTHING), None)
            else:
                child = self._other(node, message)
            if child is None:
                child = _Node(message, node)
                if told:
                    node.replies.append(child)
                else:
                    node.others[self._key(message)] = node.last = child
            node = child
        return node

    def _recognised(self, messages: Sequence[Message]) -> Iterator[int]:
        """Calls whose answers appear among messages that continue nothing."""
        for message in messages:
            if message.role != "assistant":
                continue
            if message.tool_calls:
                known = self._minted.get(message.tool_calls[0].id)
                call = known[1] if known is not None else None
            else:
                call = self._telling.get(message.content.strip())
            if call is not None:
                yield call


def _equal(message: Message, other: Message) -> bool:
    """Equality that knows the same object: what a request tells again was mostly read only once."""
    return message is other or message == other


def _plain(message: Message) -> bool:
    return all(isinstance(c.arguments, str) or unmistakable(c.arguments) for c in message.tool_calls)


def _latest(node: _Node) -> int:
    return node.calls[-1] if node.calls else -1
