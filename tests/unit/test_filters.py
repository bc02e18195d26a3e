"""Which calls train: by hand, on transcripts of harnesses, and through a real rollout to the ledger."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

import numpy as np
import pytest

from clawgym_env.proxy.classify import classify
from clawgym_env.rollout import RolloutSettings
from clawgym_env.tree.filters import Filters, Kept, apply, leaves
from clawgym_env.tree.pack import pack
from clawgym_env.tree.prefix_tree import PrefixTree
from clawgym_env.types import ModelCall, Sampling
from tests.rollout_world import run
from tests.transcripts import Talk, claude_compaction, does, openclaw_compaction, result, says, subagents, system, user
from tests.trees import Call, tree_of

#: A chain 0-1-2; 3 answers the prompt of 2 again; 4 goes on from 1, on other output.
FORK = [
    Call([0, 1], [2, 3]),
    Call([0, 1, 2, 3, 4], [1, 1, 1]),
    Call([0, 1, 2, 3, 4, 1, 1, 1, 4], [2, 2]),
    Call([0, 1, 2, 3, 4, 1, 1, 1, 4], [3]),
    Call([0, 1, 2, 3, 4, 1, 1, 1, 0], [4]),
]


def facts(calls: list[Call], **fields: list[Any]) -> list[ModelCall]:
    """Calls with some fields set, one value a call."""
    plain = [ModelCall(k, len(c.prompt), len(c.response), 0, "stop", Sampling()) for k, c in enumerate(calls)]
    return [replace(c, **{name: values[k] for name, values in fields.items()}) for k, c in enumerate(plain)]


def kept(calls: list[Call], filters: Filters | None = None, **fields: list[Any]) -> Kept:
    return apply(tree_of(calls), facts(calls, **fields), frozenset(), filters or Filters())


def of_talk(talk: Talk, filters: Filters | None = None) -> Kept:
    """Filters a transcript; call k samples k + 1 tokens, and shares none with another."""
    tree, calls = PrefixTree(), []
    lone = [Call([100 + k], [k] * (k + 1)) for k in range(len(talk.facts))]
    tree = tree_of(lone)
    calls = [replace(c, **asdict(label)) for c, label in zip(facts(lone), classify(talk.facts), strict=True)]
    out = apply(tree, calls, talk.continued, filters or Filters())
    assert out.dropped.total() + sum(k + 1 for k in out.calls) == sum(c.sampled_tokens for c in calls)
    return out


def test_a_chain_is_kept_whole() -> None:
    assert kept(FORK[:3]) == Kept(frozenset({0, 1, 2}), {0: 1.0, 1: 1.0, 2: 1.0}, kept([]).dropped)


def test_of_two_leaves_the_longer_is_kept() -> None:
    out = kept([FORK[0], FORK[1], FORK[2], FORK[4]])
    assert out.calls == {0, 1, 2} and out.dropped == {"dead leaf": 1}
    out = kept([FORK[0], FORK[1], replace(FORK[2], response=[2]), FORK[4]])
    assert out.calls == {0, 1, 3}, "of equal ones the latest"


def test_a_resample_takes_the_place_of_the_longer_sample() -> None:
    out = kept(FORK[:4])
    assert out.calls == {0, 1, 3} and out.dropped == {"dead leaf": 2}


def test_a_sample_that_was_carried_on_is_kept_whatever_came_after_it() -> None:
    calls = [*FORK[:4], Call([*FORK[2].prompt, 2, 2, 0], [1])]
    out = kept(calls)
    assert out.calls == {0, 1, 2, 4} and out.dropped == {"dead leaf": 1}


def test_an_answer_whose_tokens_were_rendered_anew_is_no_dead_leaf() -> None:
    calls = [Call([0, 1], [2, 3]), Call([0, 4, 4], [1])]
    assert kept(calls).calls == {0}, "nothing says that the second goes on from the first"
    assert kept(calls, continues=[None, 0]).calls == {0, 1}
    assert apply(tree_of(calls), facts(calls), frozenset({0}), Filters()).calls == {0, 1}


def test_the_whole_way_counts_through_rewrites() -> None:
    calls = [Call([0, 1], [2] * 5), Call([0, 4, 4], [1]), Call([0, 1, *[2] * 5, 3], [1])]
    assert kept(calls, continues=[None, 0, 0]).calls == {0, 2}, "6 tokens each way: the latest"
    calls[1] = replace(calls[1], response=[1, 1])
    assert kept(calls, continues=[None, 0, 0]).calls == {0, 1}


def test_each_segment_keeps_a_leaf() -> None:
    out = kept(FORK, segment=[0, 0, 0, 1, 1])
    assert out.calls == {0, 1, 2, 4}, "3 and 4 are rivals, 2 is not"
    assert kept(FORK, Filters(dead_leaves=False)).calls == {0, 1, 2, 3, 4}


def test_only_what_was_sampled_in_the_segment_counts() -> None:
    calls = [Call([0, 1], [2] * 5), Call([0, 3], [1]), Call([0, 4], [1, 1])]
    assert kept(calls, continues=[None, 0, None], segment=[0, 1, 1]).calls == {0, 2}


def test_too_many_leaves_drop_the_rollout() -> None:
    off = Filters(dead_leaves=False, max_leaves=3)
    assert kept(FORK, off).calls == {0, 1, 2, 3, 4}
    out = kept(FORK, replace(off, max_leaves=2))
    assert out.calls == frozenset() and out.credit == {} and out.dropped == {"over-branching": 9}
    assert kept(FORK, Filters(max_leaves=1)).calls == {0, 1, 4}, "dead leaves are not counted"
    assert leaves(tree_of(FORK), {0, 1, 2}) == {2} and leaves(tree_of(FORK), {0, 3, 4}) == {3, 4}


def test_leaves_are_those_that_packing_counts() -> None:
    tree = tree_of(FORK)
    for chosen in ({0, 1, 2}, {0, 3, 4}, {1}, {0, 1, 2, 3, 4}, set()):
        packed = pack(tree, keep_calls=frozenset(chosen))
        assert int(packed.n_leaves[packed.parent < 0].sum()) == len(leaves(tree, chosen))


SUBAGENTS = "main", "subagent", "subagent", "compaction", "side"


@pytest.mark.parametrize(
    ("filters", "credit", "dropped"),
    [
        (Filters(), {0: 1}, {"sub-agent": 5, "compaction": 1, "side call": 1}),
        (Filters(subagent_credit="broadcast"), {0: 1, 1: 1, 2: 1}, {"compaction": 1, "side call": 1}),
        (Filters(subagent_credit="split"), {0: 1 / 3, 1: 1 / 3, 2: 1 / 3}, {"compaction": 1, "side call": 1}),
        (Filters(compaction_credit="broadcast"), {0: 1, 3: 1}, {"sub-agent": 5, "side call": 1}),
        (Filters(compaction_credit="split"), {0: 0.5, 3: 0.5}, {"sub-agent": 5, "side call": 1}),
        (Filters(True, None, "split", "split"), {0: 0.25, 1: 0.25, 2: 0.25, 3: 0.25}, {"side call": 1}),
        (Filters(True, None, "split", "broadcast"), {0: 1 / 3, 1: 1 / 3, 2: 1 / 3, 3: 1}, {"side call": 1}),
    ],
)
def test_credit(filters: Filters, credit: dict[int, float], dropped: dict[str, int]) -> None:
    out = kept(FORK, filters, kind=list(SUBAGENTS), agent=["main", "a", "b", "main", "main"])
    assert out.credit == pytest.approx(credit) and out.calls == set(credit) and out.dropped == dropped


def test_a_sub_agents_summary_goes_with_the_sub_agent() -> None:
    kinds, agents = ["main", "subagent", "compaction"], ["main", "a", "a"]
    out = kept(FORK[:3], Filters(compaction_credit="broadcast"), kind=kinds, agent=agents)
    assert out.calls == {0} and out.dropped == {"sub-agent": 5}
    out = kept(FORK[:3], Filters(subagent_credit="split", compaction_credit="split"), kind=kinds, agent=agents)
    assert out.credit == pytest.approx(dict.fromkeys(range(3), 1 / 3))


def test_credit_reaches_the_packed_tree() -> None:
    packed = pack(tree_of(FORK[:2]), keep_calls=frozenset({0, 1}), credit={0: 0.5})
    assert packed.credit.dtype == np.float32
    np.testing.assert_array_equal(packed.credit, [1, 1, 0.5, 0.5, 1, 1, 1, 1])
    assert (pack(tree_of(FORK)).credit == 1).all()


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"max_leaves": 0}, "max_leaves must be at least 1"),
        ({"subagent_credit": "some"}, "subagent_credit must be one of exclude, broadcast, split, got 'some'"),
        ({"compaction_credit": None}, "compaction_credit must be one of"),
    ],
)
def test_what_cannot_be_honoured_is_refused(bad: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Filters(**bad)


class TestTranscripts:
    def test_compaction(self) -> None:
        talk = Talk()
        openclaw_compaction(talk)
        assert of_talk(talk).calls == {0, 1, 2, 5, 6}
        talk = Talk()
        claude_compaction(talk)
        assert of_talk(talk).calls == {0, 1, 2, 4, 5, 6}
        assert of_talk(talk, Filters(compaction_credit="broadcast")).calls == set(range(7))

    def test_sub_agents(self) -> None:
        talk = Talk()
        subagents(talk)
        assert of_talk(talk).calls == {0, 5}
        out = of_talk(talk, Filters(subagent_credit="split"))
        assert out.credit == pytest.approx(dict.fromkeys(range(6), 1 / 3))

    def test_a_question_asked_again(self) -> None:
        talk = Talk()
        talk.ask([system(), user()], says('{"name": "ba'))
        said = talk.ask([system(), user()], does(command="ls"))
        talk.ask([system(), user(), said, result(said, "a b")], says("a and b"))
        assert of_talk(talk).calls == {1, 2} and of_talk(talk).dropped == {"dead leaf": 1}

    def test_answers_told_in_other_words_all_train(self) -> None:
        talk, history = Talk(), [system(), user()]
        for k in range(4):
            talk.ask(history, says(f"Thought: look. Code: ls({k})"), ())
            history = [*history, says(f"Calling tools: ls with {k}"), user(f"Observation {k}")]
        assert of_talk(talk).calls == {0, 1, 2, 3}


SOURCE = """
    def chat(*messages, tools=True):
        spec = [{"type": "function", "function": {"name": "bash", "parameters": {"type": "object"}}}]
        body = {"model": "policy", "messages": list(messages), **({"tools": spec} if tools else {})}
        return {"role": "assistant", "content": ask(raw=json.dumps(body).encode())}
    s, u = {"role": "system", "content": "You are an agent."}, {"role": "user", "content": "Do it now."}
    chat({"role": "system", "content": "Make a title."}, u, tools=False)
    chat(s, u)
    said = chat(s, u)
    chat(s, u, said, {"role": "user", "content": "Go on."})
"""


def test_a_rollout_books_what_its_filters_drop() -> None:
    (rollout,) = run(SOURCE)
    assert [r.call.kind for r in rollout.records] == ["side", "main", "main", "main"], rollout.detail
    assert [r.call.continues for r in rollout.records] == [None, None, None, 2]
    tokens = [r.call.sampled_tokens for r in rollout.records]
    assert rollout.ledger.dropped == {"side call": tokens[0], "dead leaf": tokens[1]}
    packed = rollout.packed()
    assert int(packed.trainable.sum()) == rollout.ledger.trained == tokens[2] + tokens[3]
    assert set(packed.call[packed.trainable].tolist()) == {2, 3}

    (rollout,) = run(SOURCE, settings=RolloutSettings(filters=Filters(dead_leaves=False, max_leaves=1)))
    assert rollout.ledger.dropped == {"side call": tokens[0], "over-branching": sum(tokens[1:])}
    assert rollout.ledger.trained == 0 and not rollout.packed().trainable.any()
    assert rollout.reward is not None, "the rollout counts in its group's baseline all the same"
