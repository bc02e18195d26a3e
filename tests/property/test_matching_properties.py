"""Conversations of several agents through the matcher, in any order of arrival and with any tolerated retelling.

A drawn rollout is a plan: calls, each of which starts a conversation, goes on from the answer of an earlier one, or
samples a question again. What is proposed must be what was planned.
"""

from __future__ import annotations

import asyncio
import dataclasses
from dataclasses import dataclass
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from clawgym_env.dialect import SAFE, Dialect, Tolerance
from clawgym_env.engines.base import EngineRequest
from clawgym_env.proxy.echoes import arrange, differences, includes, mint, same
from clawgym_env.proxy.matching import History, Proposal
from clawgym_env.proxy.session import Session
from clawgym_env.rendering import ChatRenderer
from clawgym_env.types import ChatRequest, Generation, Message, TokenArray, ToolCall, ToolSpec
from tests.proxy_world import RENDERER

TEXTS = st.sampled_from(["", "a", "b", " a\n", "list the files", "Done."])
TOOLS = (ToolSpec("bash"),)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(0, 2) | st.sampled_from(["", "x"]),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from("abc"), inner, max_size=3),
    max_leaves=6,
)
OBJECTS = st.dictionaries(st.sampled_from("abc"), JSON, max_size=3)


@dataclass(frozen=True)
class Planned:
    """A call; ``after`` is the one whose answer it goes on from, ``like`` the one whose question it asks again."""

    agent: int
    after: int | None
    like: int | None
    told: tuple[str, ...]
    reply: Message


@st.composite
def plans(draw: st.DrawFn, *, named: bool) -> list[Planned]:
    """Random calls in an order that causality allows.

    Args:
        named: Answers are known by their ids and may be equal; else each has a text or arguments of its own.
    """
    calls: list[Planned] = []
    for k in range(draw(st.integers(1, 9))):
        kind = draw(st.sampled_from(["start", "continue", "continue", "again"])) if calls else "start"
        base = draw(st.integers(0, len(calls) - 1)) if kind != "start" else None
        own = "" if named else f" {k}"
        ids = [ToolCall("bash", {"command": draw(TEXTS) + own}, mint(k + 1, i)) for i in range(draw(st.integers(1, 2)))]
        thought = draw(st.none() | TEXTS) or None
        reply = Message("assistant", draw(TEXTS) + own, thought, tuple(ids) if named or draw(st.booleans()) else ())
        told = tuple(draw(st.lists(TEXTS, min_size=1, max_size=2)))
        if kind == "start":
            calls.append(Planned(draw(st.integers(0, 1)), None, None, told, reply))
        elif kind == "continue":
            calls.append(Planned(0, base, None, told, reply))
        else:
            calls.append(Planned(0, None, base, (), reply))
    return calls


def retold(draw: Any, reply: Message, *, named: bool) -> Message:
    """An answer as some harness tells it again."""
    if not named:
        reply = dataclasses.replace(reply, tool_calls=tuple(dataclasses.replace(c, id="x") for c in reply.tool_calls))
    change = draw(st.sampled_from(["", "trim", "think less", "insert", "turn"]))
    if change == "trim":
        return dataclasses.replace(reply, content=reply.content.strip())
    if change == "think less":
        return dataclasses.replace(reply, reasoning=None)
    if change in ("insert", "turn"):
        more = {"timeout": 120} if change == "insert" else {}
        calls = tuple(dataclasses.replace(c, arguments={**more, **dict(c.arguments)}) for c in reply.tool_calls)  # type: ignore[call-overload]
        return dataclasses.replace(reply, tool_calls=calls)
    return reply


def requests(plan: list[Planned], draw: Any, *, named: bool) -> list[tuple[Message, ...]]:
    """What the harness sends for each call; an answer is told alike whenever its conversation tells it."""
    echoes = [retold(draw, call.reply, named=named) for call in plan]
    out: list[tuple[Message, ...]] = []
    for call in plan:
        if call.like is not None:
            out.append(out[call.like])
            continue
        head: tuple[Message, ...] = (Message("system", f"agent {call.agent}"),)
        texts = tuple(Message("user", t) for t in call.told)
        if call.after is not None:
            calls = plan[call.after].reply.tool_calls
            results = tuple(Message("tool", f"result {i}", tool_call_id=c.id) for i, c in enumerate(calls))
            head = (*out[call.after], echoes[call.after], *draw(st.permutations(results)))
        out.append(head + texts)
    return out


def parents(plan: list[Planned]) -> list[int | None]:
    """What each call continues by the plan."""
    out: list[int | None] = []
    for call in plan:
        out.append(out[call.like] if call.like is not None else call.after)
    return out


def ready(plan: list[Planned], done: set[int]) -> list[int]:
    needs = [{c.after, c.like} - {None} for c in plan]
    return [k for k, need in enumerate(needs) if need <= done]


@given(st.data(), st.booleans())
def test_whatever_the_order_each_call_continues_what_it_was_planned_to(data: st.DataObject, named: bool) -> None:
    plan = data.draw(plans(named=named))
    sent = requests(plan, data.draw, named=named)
    history = History(Dialect(frozenset(Tolerance)))
    pending: dict[int, Proposal] = {}
    numbers: dict[int, int] = {}
    while len(numbers) < len(plan):
        asked = [k for k in ready(plan, set(numbers)) if k not in pending and k not in numbers]
        step = data.draw(st.sampled_from([*(("ask", k) for k in asked), *(("answer", k) for k in pending)]))
        if step[0] == "ask":
            pending[step[1]] = history.propose(TOOLS, sent[step[1]])
            continue
        k = step[1]
        proposal = pending.pop(k)
        expected = parents(plan)[k]
        assert proposal.parent == (None if expected is None else numbers[expected])
        assert proposal.messages[: proposal.shared][-1:] == (
            () if expected is None else (retelling(proposal, plan[expected]),)
        )
        numbers[k] = len(numbers)
        history.commit(numbers[k], proposal, plan[k].reply)
    assert history.continued == {numbers[p] for p in parents(plan) if p is not None} | ancestors(plan, numbers)


def retelling(proposal: Proposal, planned: Planned) -> Message:
    """The last shared message, which must tell the planned answer."""
    message = proposal.messages[proposal.shared - 1]
    assert differences(planned.reply, message) is not None
    return message


def ancestors(plan: list[Planned], numbers: dict[int, int]) -> set[int]:
    """Calls whose answers lie on the way to one that is continued."""
    up = parents(plan)
    out = set()
    for k in range(len(plan)):
        at = up[k]
        while at is not None:
            out.add(numbers[at])
            at = up[at]
    return out


@given(st.data())
def test_what_is_tolerated_is_exactly_what_differs_on_the_way(data: st.DataObject) -> None:
    plan = [p for p in data.draw(plans(named=True)) if p.like is None]
    chain: list[Message] = [Message("system", "s")]
    history, seen = History(Dialect(frozenset(Tolerance))), frozenset[Tolerance]()
    for k, planned in enumerate(plan):
        proposal = history.propose(TOOLS, tuple(chain))
        assert (proposal.parent, proposal.tolerated) == (k - 1 if k else None, seen)
        history.commit(k, proposal, planned.reply)
        echo = retold(data.draw, planned.reply, named=True)
        seen |= differences(planned.reply, echo) or frozenset()
        chain += [echo, Message("user", "more")]


class Dictated:
    """An engine that says what it was last told to."""

    max_context = 4096
    policy_version = 0
    says: TokenArray = np.empty(0, np.int64)

    async def generate(self, request: EngineRequest) -> Generation:
        size = len(self.says)
        return Generation(self.says, np.zeros(size, np.float32), np.zeros(size, np.int64), "stop")

    async def aclose(self) -> None:
        pass


async def tree_of(plan: list[Planned], order: list[int], renderer: ChatRenderer) -> Any:
    """What grows of a plan when its calls arrive in an order, with the plan's names for them."""
    engine = Dictated()
    session = Session("r", engine, renderer)
    sent: dict[int, tuple[Message, ...]] = {}
    replies: dict[int, Message] = {}
    for k in order:
        call = plan[k]
        head: tuple[Message, ...] = (Message("system", f"agent {call.agent}"),)
        if call.after is not None:
            reply = replies[call.after]
            results = tuple(Message("tool", c.name, tool_call_id=c.id) for c in reply.tool_calls)
            head = (*sent[call.after], reply, *results)
        texts = tuple(Message("user", t) for t in call.told)
        sent[k] = head + texts if call.like is None else sent[call.like]
        engine.says = renderer.encode_reply(call.reply.content, *call.reply.tool_calls)
        draft = await session.draft(await session.admit(ChatRequest("policy", sent[k], TOOLS), {}))
        session.commit(draft)
        replies[k] = draft.reply
    number = {k: i for i, k in enumerate(order)}
    name = dict(enumerate(order)) | {None: None}
    tree = session.tree
    assert [r.parent for r in session.records] == [tree.parent_call(i) for i in range(len(plan))]
    above = [name[tree.parent_call(number[k])] for k in range(len(plan))]
    return above, sorted(k for i, k in name.items() if i in tree.leaf_calls()), tree.unique_tokens


@given(st.data())
@settings(max_examples=30, deadline=None)
def test_the_tree_does_not_depend_on_the_order_in_which_calls_arrive(data: st.DataObject) -> None:
    plan = data.draw(plans(named=True))
    trees = []
    for _ in range(2):
        order: list[int] = []
        while len(order) < len(plan):
            order.append(data.draw(st.sampled_from([k for k in ready(plan, set(order)) if k not in order])))
        trees.append(asyncio.run(tree_of(plan, order, RENDERER)))
    assert trees[0] == trees[1]
    assert trees[0][0] == parents(plan)


@given(OBJECTS, OBJECTS, OBJECTS)
def test_inclusion_is_an_order_and_sameness_its_equality(a: Any, b: Any, c: Any) -> None:
    assert same(a, a) and includes(a, a)
    assert same(a, b) == same(b, a) == (includes(a, b) and includes(b, a))
    if includes(a, b) and includes(b, c):
        assert includes(a, c)


@given(st.data())
def test_arranging_is_idempotent_loses_nothing_and_ignores_the_order_told(data: st.DataObject) -> None:
    messages: list[Message] = [Message("system", "s")]
    other: list[Message] = [Message("system", "s")]
    for number in range(1, data.draw(st.integers(1, 4)) + 1):
        calls = tuple(ToolCall("bash", {"n": i}, mint(number, i)) for i in range(data.draw(st.integers(0, 3))))
        results = [Message("tool", str(i), tool_call_id=c.id) for i, c in enumerate(calls)]
        answer = Message("assistant", f"answer {number}", None, calls)
        messages += [answer, *data.draw(st.permutations(results))]
        if len(calls) > 1 and data.draw(st.booleans()):  # told as several
            for i, (c, r) in enumerate(zip(calls, results, strict=True)):
                other += [Message("assistant", answer.content if i == 0 else "", None, (c,)), r]
        else:
            other += [answer, *data.draw(st.permutations(results))]
    one, _ = arrange(tuple(messages), SAFE)
    assert arrange(one, SAFE) == (one, frozenset())
    assert sorted(map(repr, one)) == sorted(map(repr, messages))
    assert arrange(tuple(other), SAFE)[0] == one
