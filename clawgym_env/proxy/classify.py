"""What each call of a rollout was for: the main agent's work, a sub-agent's, a summary of a history, something aside.

Invariants: pure over facts of calls; what the harness said in headers goes before what is guessed from structure, and a
guess says how sure it is. A call is judged knowing what came after it, so labels are final once a rollout has settled.
Names and numbers apart, they do not depend on how calls of different agents were interleaved.

Guessing looks at structure first: which answers a request tells, which tools it offers, whose system prompt it bears.
"""

from __future__ import annotations

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from typing import Literal

from clawgym_env.dialect import Hints
from clawgym_env.proxy.evidence import Opening, asks_for_summary, hands_on, probe, quotes, retells, texts_of, told
from clawgym_env.types import CallKind, Message

MAIN = "main"


@dataclass(frozen=True, slots=True)
class CallFacts:
    """What is known of a committed call.

    Attributes:
        call_id: 0, 1, ... in order of commitment.
        parent: The call it was matched to; ``None`` where it was rendered from scratch.
        messages: The messages since the parent's answer (all of them without a parent).
        tools: Names of the tools that were offered.
        answers: Calls whose answers appear among ``messages``.
        hints: What the request's headers said.
    """

    call_id: int
    parent: int | None
    messages: tuple[Message, ...]
    reply: Message
    tools: tuple[str, ...] = ()
    answers: tuple[int, ...] = ()
    hints: Hints = field(default_factory=Hints)


@dataclass(frozen=True, slots=True)
class Label:
    """What a call was for; the fields are those of :class:`clawgym_env.types.ModelCall`."""

    continues: int | None = None
    kind: CallKind = "main"
    agent: str = MAIN
    segment: int = 0
    spawned_by: int | None = None
    confidence: float = 1.0


def classify(calls: Sequence[CallFacts]) -> list[Label]:
    """Labels the calls of one rollout; call ``k`` is at position ``k``."""
    return _Classifier(calls).run() if calls else []


def answers_told(calls: Sequence[CallFacts]) -> list[set[int]]:
    """For each call the earlier ones whose answers its request tells, of those up to its parent's the parent's alone.

    An answer that was rewritten beyond recognition is known by its place: it stands where an earlier request ends.
    """
    ends: dict[tuple[int | None, int], int] = {}
    found = []
    for call in calls:
        above, key = call.parent, 0
        tells = {*call.answers} if above is None else {*call.answers, above}
        for message in call.messages:
            there = ends.get((above, key)) if message.role == "assistant" else None
            if there is None:
                key = _chain(key, message)
            else:
                above, key = there, 0
                tells.add(there)
        ends[above, key] = call.call_id
        found.append(tells)
    return found


@dataclass(slots=True, eq=False)
class _Agent:
    """One agent so far.

    Attributes:
        opening: How the first request of its latest segment begins; ``first`` is that call, ``latest`` its last call.
        texts: Probes of what was said in this segment after its opening, by which a summary of it is known.
    """

    name: str
    kind: Literal["main", "subagent"]
    opening: Opening
    first: int
    latest: int
    segment: int = 0
    spawned_by: int | None = None
    confidence: float = 1.0
    texts: dict[str, None] = field(default_factory=dict)


class _Classifier:
    """Goes through the calls in order; side calls become summaries when a later request quotes them.

    Attributes:
        tells: See ``answers_told``; ``continues`` is the last of a call's.
        root: The main agent's first call; ``main_name`` is what headers call that agent.
        handed: Call -> texts in its tool calls.
        open: Calls whose tool calls no request has answered yet.
        beside: Calls that were no agent's own work.
    """

    def __init__(self, calls: Sequence[CallFacts]) -> None:
        self.calls = calls
        self.tells = answers_told(calls)
        self.continues = [max(tells, default=None) for tells in self.tells]
        self.continued: set[int] = set().union(*self.tells)
        self.root = _main_root(calls, self.continued)
        self.main_name = calls[self.root].hints.agent
        self.labels: list[Label] = []
        self.digests = {c.call_id: _digest(c.messages) for c in calls if c.parent is None}
        self.twins: dict[tuple[tuple[str, ...], int], int] = {}
        self.handed: dict[int, list[str]] = {}
        self.open: set[int] = set()
        self.beside: list[int] = []
        self.agents = {MAIN: _Agent(MAIN, "main", _opening(calls[self.root]), self.root, self.root)}
        # Where sub-agents have names and the main agent has none, a call without a name is no sub-agent's.
        self.names_subagents = self.main_name is None and any(c.hints.agent is not None for c in calls)

    def run(self) -> list[Label]:
        """One label a call."""
        for call in self.calls:
            label = replace(self._label(call), continues=self.continues[call.call_id])
            self.labels.append(label)
            self._remember(call, label)
        return self.labels

    def _label(self, call: CallFacts) -> Label:
        if call.hints.kind is not None or call.hints.agent is not None:
            return self._hinted(call)
        base = self.continues[call.call_id]
        twin = self._twin(call)
        if twin is not None:
            return twin
        if call.call_id == self.root:
            return Label()
        if base is None:
            return self._begun(call, _opening(call))
        label = self.labels[base]
        agent = self.agents.get(label.agent)
        if agent is None or label.kind in ("side", "compaction") or call.parent == base == agent.latest:
            return label
        if call.parent is None and _is_aside(call, agent) and not _opening(call).bears_prompt_of(agent.opening):
            return self._aside(call)
        segment, sure = self._segment(call, agent)
        if call.parent is None and not _opening(call).alike(agent.opening):
            sure = min(sure, 0.8)
        return replace(label, segment=segment, confidence=min(sure, label.confidence))

    def _hinted(self, call: CallFacts) -> Label:
        """A call whose headers say whose it is; its place among that agent's calls is found by structure."""
        name = self._name(call)
        agent = self.agents.get(name)
        kind = call.hints.kind
        whose = agent or self.agents[MAIN]
        if kind is None and call.parent is None and call.call_id != self.root and _is_aside(call, whose):
            return replace(self._aside(call), agent=whose.name)
        if kind in ("side", "compaction"):
            about = kind == "compaction" and self._began(whose)
            return Label(None, kind, whose.name, whose.segment, whose.latest if about else self._spawner(call)[0])
        if agent is None:
            parent = MAIN if call.hints.parent in (None, self.main_name) else str(call.hints.parent)
            spawner, _ = self._spawner(call, parent)
            if spawner is None:
                spawner = self._told(call, parent)
            if spawner is None and parent in self.agents and self._began(self.agents[parent]):
                spawner = self.agents[parent].latest
            return Label(None, "subagent", name, 0, spawner)
        segment = 0
        if self._began(agent):
            twin = self._twin(call)
            segment = twin.segment if twin is not None else self._segment(call, agent)[0]
        return Label(None, agent.kind, name, segment, agent.spawned_by)

    def _name(self, call: CallFacts) -> str:
        """Whose call it is by its headers."""
        hints, base = call.hints, self.continues[call.call_id]
        if hints.kind == "main" or (hints.kind != "subagent" and hints.agent in (None, self.main_name)):
            return MAIN
        if hints.agent is not None and hints.agent != self.main_name:
            return hints.agent
        known = base is not None and self.labels[base].kind == "subagent"
        return self.labels[base].agent if known and base is not None else self._new_name()

    def _begun(self, call: CallFacts, opening: Opening) -> Label:
        """A request that tells no answer of ours."""
        agents = [a for a in self.agents.values() if self._began(a) and (a.name == MAIN or not self.names_subagents)]
        alike = [a for a in agents if a.opening.alike(opening)]
        same = [a for a in alike if a.opening.users == opening.users or self._quoted(call, a)]
        if same:
            return self._restarted(call, _latest(same))
        spawner, sure = self._spawner(call)
        if spawner is not None and (sure or (opening.tools and not alike)) and not self.names_subagents:
            return Label(None, "subagent", self._new_name(), 0, spawner, 0.95)
        main = self.agents[MAIN]
        if not self._began(main) or _is_aside(call, main):
            return self._aside(call)
        known = [a for a in agents if a.opening.tools == opening.tools and _knows_task(call, a)]
        whose = [a for a in agents if self._quoted(call, a)] or known or alike
        if whose:
            return self._restarted(call, _latest(whose))
        lone = not call.reply.tool_calls and call.call_id not in self.continued
        if self.open and not self.names_subagents and (opening.tools or not lone):
            return Label(None, "subagent", self._new_name(), 0, max(self.open), 0.7)
        if lone:
            return self._aside(call)
        if self.names_subagents or opening.tools == main.opening.tools:
            return self._restarted(call, main)
        return Label(None, "subagent", self._new_name(), 0, None, 0.6)

    def _restarted(self, call: CallFacts, agent: _Agent) -> Label:
        segment, sure = self._segment(call, agent)
        return Label(None, agent.kind, agent.name, segment, agent.spawned_by, min(sure, agent.confidence))

    def _segment(self, call: CallFacts, agent: _Agent) -> tuple[int, float]:
        """The segment of an agent's request, and how sure that is.

        It is that of the answers it tells, whatever became of what lies between them, unless the request leaves out one
        of them in the middle or has a summary in their place.
        """
        base = self.continues[call.call_id]
        if call.parent == base == agent.latest:
            return agent.segment, 1.0
        if self._summarised(call, agent):
            return agent.segment + 1, 0.9
        if base is None or self.labels[base].agent != agent.name:
            if self._answer_was_deleted(call, agent):
                return agent.segment, 0.9
            return agent.segment + 1, 0.9 if _knows_task(call, agent) else 0.6
        segment, at = self.labels[base].segment, base
        while at != call.parent and (self.labels[at].agent, self.labels[at].segment) == (agent.name, segment):
            if at not in self.tells[call.call_id]:
                return agent.segment + 1, 0.9
            above = self.continues[at]
            if above is None:
                break
            at = above
        return segment, 0.95

    def _answer_was_deleted(self, call: CallFacts, agent: _Agent) -> bool:
        """Whether a request repeats the one that the segment began with, answer left out, and perhaps adds to it."""
        first = self.calls[agent.first]
        if call.parent is not None or first.parent is not None or self.continues[agent.latest] is not None:
            return False
        size = len(first.messages)
        same = _digest(call.messages[:size]) == self.digests[agent.first]
        return same and all(m.role != "assistant" for m in call.messages[size:])

    def _summarised(self, call: CallFacts, agent: _Agent) -> bool:
        """Whether a request has a summary in place of an agent's history; the calls that made it are labelled so."""
        found = self._quoted(call, agent)
        parts = list(found)
        while parts:  # a summary may be made of summaries of parts
            part = parts.pop()
            more = [k for k in self._quoted(self.calls[part], agent) if k < part and self.labels[k].kind == "side"]
            parts += more
            if self.calls[part].hints.kind is None:
                about = agent.latest if part != agent.latest else self.continues[part]
                self.labels[part] = Label(self.continues[part], "compaction", agent.name, agent.segment, about, 0.95)
        return bool(found)

    def _quoted(self, call: CallFacts, agent: _Agent) -> list[int]:
        """Calls whose answers a request tells as something else: side calls, and the agent's own last call."""
        text = told(call.messages)
        before = "\n".join((agent.opening.system, *agent.opening.users))
        beside = [k for k in self.beside if agent.first <= k < call.call_id]
        last = [agent.latest] if agent.latest not in self.continued and agent.latest < call.call_id else []
        return [
            k
            for k in sorted({*beside, *last})
            if not self.calls[k].reply.tool_calls
            and quotes(text, self.calls[k].reply.content)
            and not quotes(before, self.calls[k].reply.content)  # as a title repeats the task
        ]

    def _aside(self, call: CallFacts) -> Label:
        """A call beside an agent's work: a summary where it retells the agent's history, else a side call."""
        text = "\n".join(m.content for m in call.messages)
        began = [a for a in self.agents.values() if self._began(a)]
        share, agent = max(((retells(text, a.texts), a) for a in began), key=lambda x: x[0], default=(0.0, None))
        if agent is not None and share >= 0.3 and asks_for_summary(call.messages):
            return Label(None, "compaction", agent.name, agent.segment, agent.latest, 0.7)
        spawner, _ = self._spawner(call)
        owner = self.labels[spawner] if spawner is not None else Label()
        return Label(None, "side", owner.agent, owner.segment, spawner, 0.6 if call.tools else 0.8)

    def _told(self, call: CallFacts, agent: str) -> int | None:
        """The call of an agent that handed on the longest text in what a conversation begins with, however little."""
        begins = "\n".join(_opening(call).users)
        found = (
            (len(text), k)
            for k, texts in self.handed.items()
            if self.labels[k].agent == agent
            for text in texts
            if text in begins
        )
        return max(found, default=(0, None))[1]

    def _spawner(self, call: CallFacts, agent: str | None = None) -> tuple[int | None, bool]:
        """The call whose tool calls handed on what a conversation begins with; whether they hold a whole message of it.

        Args:
            agent: Whose calls are looked at; ``None`` for all.
        """
        opening = _opening(call)
        best: tuple[int, bool, int] = (0, False, -1)
        sure = False
        for k, texts in self.handed.items():
            if agent is None or self.labels[k].agent == agent:
                length, whole = hands_on(texts, opening)
                if length and (length, k in self.open, k) > best:
                    best, sure = (length, k in self.open, k), whole
        return (best[2], sure) if best[0] else (None, False)

    def _twin(self, call: CallFacts) -> Label | None:
        """The label of an earlier call with the very same request."""
        twin = self.twins.get((call.tools, self.digests[call.call_id])) if call.parent is None else None
        return None if twin is None else self.labels[twin]

    def _began(self, agent: _Agent) -> bool:
        return agent.name != MAIN or self.root < len(self.labels)

    def _new_name(self) -> str:
        return f"sub{sum(a.kind == 'subagent' for a in self.agents.values()) + 1}"

    def _remember(self, call: CallFacts, label: Label) -> None:
        number = call.call_id
        if call.parent is None:
            self.twins[call.tools, self.digests[number]] = number
        self.open -= self.tells[number]
        if call.reply.tool_calls:
            self.open.add(number)
            self.handed[number] = [t for c in call.reply.tool_calls for t in texts_of(c.arguments)]
        if label.kind not in ("main", "subagent"):
            self.beside.append(number)
            return
        agent = self.agents.get(label.agent)
        if agent is None:
            kind: Literal["main", "subagent"] = "subagent" if label.kind == "subagent" else "main"
            agent = _Agent(label.agent, kind, _opening(call), number, number, 0, label.spawned_by, label.confidence)
            self.agents[label.agent] = agent
        elif label.segment > agent.segment:
            agent.opening, agent.first, agent.segment, agent.texts = _opening(call), number, label.segment, {}
        agent.latest = number
        said = (*call.messages[_opening_size(call) :], call.reply)
        agent.texts |= dict.fromkeys(p for m in said if m.role != "system" and (p := probe(m.content)))


def _main_root(calls: Sequence[CallFacts], continued: AbstractSet[int]) -> int:
    """The main agent's first call: the first, or the first with tools where a lone call without any came before."""
    said = next((c.call_id for c in calls if c.hints.kind == "main"), None)
    if said is not None:
        return said
    first = calls[0]
    if first.hints.kind is None and (first.tools or first.reply.tool_calls or first.call_id in continued):
        return 0
    others = (c.call_id for c in calls if c.parent is None and c.tools and c.hints.kind is None)
    return next(others, 0)


def _is_aside(call: CallFacts, agent: _Agent) -> bool:
    """Whether a request leaves out the tools of an agent that has some, and is answered without any."""
    return not call.tools and bool(agent.opening.tools) and not call.reply.tool_calls


def _knows_task(call: CallFacts, agent: _Agent) -> bool:
    """Whether a request still tells what the agent was asked to do."""
    task = probe(agent.opening.users[-1]) if agent.opening.users else ""
    return bool(task) and task in told(call.messages)


def _latest(agents: Sequence[_Agent]) -> _Agent:
    return max(agents, key=lambda a: a.latest)


def _opening(call: CallFacts) -> Opening:
    return Opening.of(call.messages, call.tools)


def _opening_size(call: CallFacts) -> int:
    """Messages of a request before the first turn of an agent; none where it goes on from a call."""
    if call.parent is not None:
        return 0
    return next((i for i, m in enumerate(call.messages) if m.role in ("assistant", "tool")), len(call.messages))


def _digest(messages: Sequence[Message]) -> int:
    """What tells lists of messages apart, within this process."""
    key = 0
    for message in messages:
        key = _chain(key, message)
    return key


def _chain(key: int, message: Message) -> int:
    calls = tuple((c.name, repr(c.arguments)) for c in message.tool_calls)
    return hash((key, message.role, message.content, calls))
