"""The filters' promises, on rollouts of every shape."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace

import numpy as np
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from clawgym_env.tree.filters import Filters, Kept, apply
from clawgym_env.tree.ledger import Ledger
from clawgym_env.tree.pack import pack
from clawgym_env.types import ModelCall, Sampling
from tests.trees import Call, assert_same_tree, call_lists, tree_of
from torchrl_ext.merge import prune

AGENTS = {"main": "main", "a": "subagent", "b": "subagent"}
FILTERS = st.builds(
    Filters,
    dead_leaves=st.booleans(),
    max_leaves=st.none() | st.integers(1, 3),
    subagent_credit=st.sampled_from(["exclude", "broadcast", "split"]),
    compaction_credit=st.sampled_from(["exclude", "broadcast", "split"]),
)


@dataclass(frozen=True)
class Case:
    """One rollout: what its calls saw and said, what they were for, and which answers were told again."""

    calls: list[Call]
    facts: list[ModelCall]
    told: frozenset[int]

    def filter(self, filters: Filters) -> Kept:
        return apply(tree_of(self.calls), self.facts, self.told, filters)

    @property
    def captured(self) -> int:
        return sum(c.sampled_tokens for c in self.facts)

    def carried_on(self) -> set[int]:
        tree = tree_of(self.calls)
        above = {tree.parent_call(c.call_id) for c in self.facts} | {c.continues for c in self.facts}
        return {*self.told, *above} - {None}  # type: ignore[arg-type]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    calls = draw(call_lists(8))
    tree, facts = tree_of(calls), []
    for k, call in enumerate(calls):
        before = facts[draw(st.integers(0, k - 1))] if k and draw(st.booleans()) else None
        above = tree.parent_call(k)
        before = facts[above] if above is not None else before
        agent = before.agent if before is not None else draw(st.sampled_from(list(AGENTS)))
        segment = before.segment if before is not None else draw(st.integers(0, 1))
        kind = draw(st.sampled_from([AGENTS[agent]] * 4 + ["compaction", "side"]))
        continues = before.call_id if before is not None else None
        size = len(call.prompt), len(call.response)
        facts.append(ModelCall(k, *size, 0, "stop", Sampling(), continues, kind, agent, segment))
    told = draw(st.frozensets(st.integers(0, len(calls) - 1), max_size=2))
    return Case(calls, facts, told)


@given(cases(), FILTERS)
@settings(max_examples=300, deadline=None)
def test_every_token_trains_once_or_is_dropped_once(case: Case, filters: Filters) -> None:
    out = case.filter(filters)
    ledger = Ledger(captured=case.captured)
    for reason, tokens in out.dropped.items():
        assert tokens > 0
        ledger.drop(reason, tokens)
    packed = pack(tree_of(case.calls), keep_calls=out.calls, credit=out.credit)
    assert int(packed.trainable.sum()) == ledger.trained
    size = Counter(packed.call[packed.trainable].tolist())
    assert size == {c: case.facts[c].sampled_tokens for c in out.calls}
    assert set(out.credit) == out.calls and all(0 < x <= 1 for x in out.credit.values())
    for call in out.calls:
        np.testing.assert_array_equal(packed.credit[packed.call == call], np.float32(out.credit[call]))


@given(cases(), FILTERS)
@settings(max_examples=200, deadline=None)
def test_what_is_never_kept_and_what_always_is(case: Case, filters: Filters) -> None:
    out = case.filter(replace(filters, max_leaves=None))
    names = {c.agent for c in case.facts if c.kind == "subagent"}
    for call in case.facts:
        if call.kind == "side" or (call.agent in names and filters.subagent_credit == "exclude"):
            assert call.call_id not in out.calls
        elif call.kind == "compaction":
            assert (call.call_id in out.calls) == (filters.compaction_credit != "exclude")
        elif call.call_id in case.carried_on() or not filters.dead_leaves:
            assert call.call_id in out.calls
    assert set(out.dropped) <= {"side call", "sub-agent", "compaction", "dead leaf"}


@given(cases(), FILTERS)
@settings(max_examples=200, deadline=None)
def test_each_segment_keeps_one_leaf(case: Case, filters: Filters) -> None:
    out = case.filter(replace(filters, dead_leaves=True, max_leaves=None))
    names = {c.agent for c in case.facts if c.kind == "subagent"}
    ends: Counter[tuple[str, int]] = Counter()
    for call in case.facts:
        aside = call.kind in ("side", "compaction") or (call.agent in names and filters.subagent_credit == "exclude")
        if not aside and call.call_id not in case.carried_on():
            ends[call.agent, call.segment] += call.call_id in out.calls
    assert set(ends.values()) <= {1}


@given(cases(), FILTERS)
@settings(max_examples=200, deadline=None)
def test_filtering_again_drops_nothing_more(case: Case, filters: Filters) -> None:
    once = case.filter(filters)
    tree = tree_of(case.calls)
    told = frozenset(case.carried_on())
    again = apply(tree, [c for c in case.facts if c.call_id in once.calls], told, filters)
    assert (again.calls, again.dropped) == (once.calls, Counter())


@given(cases(), FILTERS, st.data())
@settings(max_examples=200, deadline=None)
def test_a_dead_leaf_changes_nothing(case: Case, filters: Filters, data: st.DataObject) -> None:
    filters = replace(filters, dead_leaves=True)
    before = case.filter(filters)
    unlimited = case.filter(replace(filters, max_leaves=None)).calls
    ends = [c for c in case.facts if c.kind == AGENTS[c.agent] and c.call_id in unlimited - case.carried_on()]
    rivals = [c for c in ends if c.sampled_tokens > 1]
    assume(rivals)
    rival = data.draw(st.sampled_from(rivals))
    # From the same answer as a leaf that is kept, on a prompt of its own, with a token less than that leaf has.
    size = rival.sampled_tokens - 1
    prompt = [*case.calls[rival.call_id].prompt, 99]
    number = len(case.calls)
    dead = replace(rival, call_id=number, prompt_tokens=len(prompt), sampled_tokens=size)
    more = Case([*case.calls, Call(prompt, [98] * size)], [*case.facts, dead], case.told)
    after = more.filter(filters)
    assert (after.calls, after.credit) == (before.calls, before.credit)
    assert after.dropped - before.dropped == Counter({"dead leaf": size})
    small = prune(pack(tree_of(case.calls), keep_calls=before.calls, credit=before.credit))[0]
    assert_same_tree(prune(pack(tree_of(more.calls), keep_calls=after.calls, credit=after.credit))[0], small)


@given(cases(), st.sampled_from(["broadcast", "split"]), st.sampled_from(["broadcast", "split"]))
@settings(max_examples=200, deadline=None)
def test_who_splits_has_equal_parts_of_one(case: Case, sub: str, compaction: str) -> None:
    out = case.filter(Filters(True, None, sub, compaction))  # type: ignore[arg-type]
    names = {c.agent for c in case.facts if c.kind == "subagent"}
    shares: dict[tuple[str, bool], float] = {}
    for call in out.calls:
        fact = case.facts[call]
        whole = {sub} if fact.agent in names else set()
        whole |= {compaction} if fact.kind == "compaction" else set()
        if "broadcast" in whole:
            assert out.credit[call] == 1
        else:
            shares[fact.agent, fact.kind == "compaction"] = out.credit[call]
    assert not shares or abs(sum(shares.values()) - 1) < 1e-9
