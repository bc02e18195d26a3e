"""The prefix tree and its packed form over random rollouts.

A drawn rollout is a list of calls, each of which starts anew, continues an earlier call, samples its prompt again, or
goes on from a rewritten or truncated history. The alphabet of prompts is tiny so that prefixes collide; a response
begins with a token of its own call where the shape itself is compared.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clawgym_env.tree.pack import PackedTree, pack, paths
from clawgym_env.tree.prefix_tree import ROOT, PrefixTree
from clawgym_env.types import Generation, TokenArray

SMALL = st.lists(st.integers(0, 2), min_size=1, max_size=5)


@dataclass(frozen=True)
class Drawn:
    """A call; ``after`` is the call that must have arrived before."""

    prompt: tuple[int, ...]
    response: tuple[int, ...]
    after: int | None

    @property
    def history(self) -> tuple[int, ...]:
        return self.prompt + self.response


@st.composite
def rollouts(draw: st.DrawFn, *, marked: bool = False, max_calls: int = 8) -> list[Drawn]:
    """Random calls in an order that causality allows; ``marked`` responses begin with a token of their own."""
    calls: list[Drawn] = []
    for k in range(draw(st.integers(1, max_calls))):
        kind = draw(st.sampled_from(["fresh", "continue", "resample", "truncate", "rewrite"])) if calls else "fresh"
        after = draw(st.integers(0, len(calls) - 1)) if kind != "fresh" else None
        prompt = tuple(draw(SMALL))
        if after is not None:
            old = calls[after]
            cut = draw(st.integers(1, len(old.history)))
            prompt = {
                "continue": old.history + prompt,
                "resample": old.prompt,
                "truncate": old.history[:cut],
                "rewrite": old.history[:cut] + prompt,
            }[kind]
        response = tuple(draw(SMALL))
        calls.append(Drawn(prompt, ((100 + k,) if marked else ()) + response, after))
    return calls


def generation(response: tuple[int, ...], call: int) -> Generation:
    size = len(response)
    log_probs = -(100 * call + np.arange(1, size + 1)).astype(np.float32)
    return Generation(np.array(response), log_probs, np.full(size, call), "stop")


def build(calls: list[Drawn], order: list[int] | None = None, prefer: dict[int, int] | None = None) -> PrefixTree:
    tree = PrefixTree()
    for k in order if order is not None else range(len(calls)):
        tree.attach(k, np.array(calls[k].prompt), generation(calls[k].response, k), prefer=(prefer or {}).get(k))
    return tree


def shape(tree: PrefixTree, at: int = ROOT) -> Any:
    """Structure without node ids: tokens and sampler of each unique token, and what follows it, in no order."""
    node = tree.nodes[at]
    below = Counter(shape(tree, c) for c in node.children)
    out: Any = frozenset(below.items())
    for token in reversed(node.tokens.tolist()):
        out = frozenset({((token, node.call, out), 1)})
    # A node of one token above another is the same structure as one node of two.
    return out if at == ROOT else next(iter(out))[0]


@given(rollouts())
def test_a_path_is_exactly_what_was_given(calls: list[Drawn]) -> None:
    tree = build(calls)
    for k, call in enumerate(calls):
        assert tuple(tree.path_ids(k)) == call.history


@given(rollouts())
def test_every_sampled_token_is_in_exactly_one_node_with_its_own_facts(calls: list[Drawn]) -> None:
    tree = build(calls)
    held: dict[int, list[tuple[int, int, float, int]]] = defaultdict(list)
    for node in tree.nodes:
        if node.call is None:
            assert len(node.log_probs) == len(node.versions) == 0
            continue
        assert len(node.log_probs) == len(node.versions) == len(node.tokens)
        held[node.call] += zip(
            range(node.start, node.end),
            node.tokens.tolist(),
            node.log_probs.tolist(),
            node.versions.tolist(),
            strict=True,
        )
    for k, call in enumerate(calls):
        given_facts = generation(call.response, k)
        start = len(call.prompt)
        assert sorted(held[k]) == list(
            zip(
                range(start, start + len(call.response)),
                call.response,
                given_facts.log_probs.tolist(),
                given_facts.versions.tolist(),
                strict=True,
            )
        )


@given(rollouts())
def test_links_offsets_and_counts_hold_together(calls: list[Drawn]) -> None:
    tree = build(calls)
    assert sorted(tree.depth_first()) == list(range(1, len(tree.nodes)))
    for at, node in enumerate(tree.nodes):
        assert at == ROOT or len(node.tokens) > 0
        for child in node.children:
            assert tree.nodes[child].parent == at and tree.nodes[child].start == node.end
        prompts = [int(tree.nodes[c].tokens[0]) for c in node.children if tree.nodes[c].call is None]
        assert len(prompts) == len(set(prompts)), "a shared prompt is stored once"
    assert tree.total_tokens == sum(len(c.history) for c in calls)
    assert tree.unique_tokens == sum(len(n.tokens) for n in tree.nodes) <= tree.total_tokens
    # No node is needed more than: one prompt run, one response run and one split a call.
    assert len(tree.nodes) <= 1 + 3 * len(calls)


@given(rollouts())
def test_parents_and_leaves_are_those_of_the_longest_prefix(calls: list[Drawn]) -> None:
    tree = build(calls)
    for k, call in enumerate(calls):
        earlier = [c.history for c in calls[:k]]
        longest = max((h for h in earlier if call.prompt[: len(h)] == h), key=len, default=None)
        parent = tree.parent_call(k)
        assert (calls[parent].history if parent is not None else None) == longest
    assert tree.leaf_calls() == [k for k in range(len(calls)) if not tree.nodes[tree.call_end[k]].children]


@given(rollouts(marked=True), st.data())
def test_the_structure_does_not_depend_on_how_branches_interleave(calls: list[Drawn], data: st.DataObject) -> None:
    order: list[int] = []
    while len(order) < len(calls):
        ready = [k for k, c in enumerate(calls) if k not in order and (c.after is None or c.after in order)]
        order.append(data.draw(st.sampled_from(ready)))
    one, other = build(calls), build(calls, order)
    assert shape(one) == shape(other)
    assert one.unique_tokens == other.unique_tokens
    assert [one.parent_call(k) for k in range(len(calls))] == [other.parent_call(k) for k in range(len(calls))]
    assert one.leaf_calls() == other.leaf_calls()


@given(rollouts())
def test_a_preference_changes_no_path(calls: list[Drawn]) -> None:
    prefer = {k: c.after for k, c in enumerate(calls) if c.after is not None}
    tree = build(calls, prefer=prefer)
    for k, call in enumerate(calls):
        assert tuple(tree.path_ids(k)) == call.history


def test_equal_samples_of_one_prompt_are_siblings() -> None:
    call = Drawn((1, 2), (3,), None)
    tree = build([call, call, call])
    ends = [tree.nodes[tree.call_end[k]] for k in range(3)]
    assert len({e.parent for e in ends}) == 1 and len(set(tree.call_end.values())) == 3
    assert (tree.unique_tokens, tree.total_tokens, tree.leaf_calls()) == (5, 9, [0, 1, 2])


@pytest.mark.parametrize("preferred", [0, 1])
def test_a_preference_decides_between_equal_samples(preferred: int) -> None:
    calls = [Drawn((1, 2), (3,), None), Drawn((1, 2), (3,), None), Drawn((1, 2, 3, 4), (5,), None)]
    assert build(calls, prefer={2: preferred}).parent_call(2) == preferred
    assert build(calls).parent_call(2) == 1  # the latest, where nobody says


def test_a_fork_in_mid_response_splits_it_and_is_no_continuation() -> None:
    tree = build([Drawn((1,), (2, 3, 4), None), Drawn((1, 2, 3, 9), (5,), 0)])
    upper, lower = tree.nodes[tree.nodes[tree.call_end[0]].parent or 0], tree.nodes[tree.call_end[0]]
    assert (upper.tokens.tolist(), upper.call, lower.tokens.tolist(), lower.call) == ([2, 3], 0, [4], 0)
    assert (upper.log_probs.tolist(), lower.log_probs.tolist()) == ([-1.0, -2.0], [-3.0])
    assert tree.parent_call(1) is None and tree.leaf_calls() == [0, 1]
    assert tree.unique_tokens == 6


@pytest.mark.parametrize(("prompt", "response"), [((), (1,)), ((1,), ())])
def test_an_empty_call_is_refused(prompt: tuple[int, ...], response: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="at least one"):
        build([Drawn(prompt, response, None)])


def test_a_call_id_is_used_once() -> None:
    tree = build([Drawn((1,), (2,), None)])
    with pytest.raises(ValueError, match="already"):
        tree.attach(0, np.array([1]), generation((2,), 0))
    assert tree.unique_tokens == 2


def test_the_tree_keeps_its_own_copy() -> None:
    prompt, sampled = np.array([1, 2]), generation((3, 4), 0)
    tree = PrefixTree()
    tree.attach(0, prompt, sampled)
    prompt[:] = 9
    sampled.token_ids[:] = 9
    assert tree.path_ids(0).tolist() == [1, 2, 3, 4]


@pytest.mark.parametrize("preferred", [0, None])
def test_a_prompt_that_is_a_whole_history_is_a_sibling_of_what_went_on_from_it(preferred: int | None) -> None:
    calls = [Drawn((1, 2), (3,), None), Drawn((1, 2, 3, 4), (5,), 0), Drawn((1, 2, 3), (4, 6), 0)]
    tree = build(calls, prefer={1: 0} if preferred is None else {1: 0, 2: 0})
    assert [tree.parent_call(k) for k in range(3)] == [None, 0, 0]
    assert [tuple(tree.path_ids(k)) for k in range(3)] == [c.history for c in calls]


def test_a_view_of_tokens_stays_what_it_was() -> None:
    tree = build([Drawn((1, 2), (3,), None)])
    prompt, response = (tree.nodes[n].tokens for n in tree.path(tree.call_end[0]))
    tree.attach(1, np.array([1, 2, 3, 4]), generation((5,), 1), prefer=0)
    tree.attach(2, np.array([1, 9]), generation((6,), 2))
    assert (prompt.tolist(), response.tolist()) == ([1, 2], [3])
    assert [tree.path_ids(k).tolist() for k in range(3)] == [[1, 2, 3], [1, 2, 3, 4, 5], [1, 9, 6]]
    with pytest.raises(ValueError, match="read-only"):
        tree.nodes[1].tokens[0] = 7
    tree.path_ids(0)[0] = 7  # a copy
    assert tree.path_ids(0).tolist() == [1, 2, 3]


def test_branches_that_grow_in_turn_keep_their_paths() -> None:
    """Two agents with a common opening whose calls alternate, and an answer that is asked for again."""
    calls = [Drawn((1, 2, 10), (11,), None), Drawn((1, 2, 20), (21,), None)]
    for k in range(2, 8):
        calls.append(Drawn((*calls[k - 2].history, k), (30 + k,), k - 2))
    calls.append(Drawn(calls[7].prompt, (40,), 5))
    calls.append(Drawn((*calls[8].history, 9), (41,), 8))
    tree = build(calls, prefer={k: c.after for k, c in enumerate(calls) if c.after is not None})
    assert [tuple(tree.path_ids(k)) for k in range(len(calls))] == [c.history for c in calls]
    assert [tree.parent_call(k) for k in range(len(calls))] == [c.after for c in calls]
    assert tree.unique_tokens == 2 + 2 * 2 + 6 * 2 + 1 + 2


def owned_bytes(tree: PrefixTree) -> int:
    """Bytes of every distinct buffer that the tree keeps alive."""
    buffers: dict[int, int] = {}
    for node in tree.nodes:
        for array in (node.tokens, node.log_probs, node.versions):
            base = array
            while isinstance(base.base, np.ndarray):
                base = base.base
            buffers[id(base)] = base.nbytes
    return sum(buffers.values())


@pytest.mark.parametrize("prefer", [True, False])
def test_a_long_rollout_stores_each_token_once(prefer: bool) -> None:
    """200 calls that grow to 100,000 tokens: linear in unique tokens although 10 million were sent."""
    rng = np.random.default_rng(0)
    tree, history, calls = PrefixTree(), np.empty(0, np.int64), 200
    for k in range(calls):
        prompt = np.concatenate([history, rng.integers(0, 2048, 400)])
        response = tuple(rng.integers(0, 2048, 100).tolist())
        tree.attach(k, prompt, generation(response, k), prefer=k - 1 if prefer and k else None)
        history = np.concatenate([prompt, response])
    assert tree.unique_tokens == len(history) == 100_000
    assert tree.total_tokens == 500 * calls * (calls + 1) // 2
    assert len(tree.nodes) == 1 + 2 * calls
    assert np.array_equal(tree.path_ids(calls - 1), history)
    # 8 bytes a token; 12 more for the log-prob and version of a sampled one, which are a fifth.
    assert owned_bytes(tree) == 8 * 100_000 + 12 * 20_000


def packed_with(calls: list[Drawn], keep: frozenset[int] | None) -> tuple[PrefixTree, PackedTree]:
    tree = build(calls)
    return tree, pack(tree, keep_calls=keep)


def ancestors(packed: PackedTree, i: int) -> list[int]:
    out = []
    while i >= 0:
        out.append(i)
        i = int(packed.parent[i])
    return out[::-1]


@given(rollouts(max_calls=6))
@settings(max_examples=60)
def test_packed_arrays_spell_the_tree(calls: list[Drawn]) -> None:
    tree, packed = packed_with(calls, None)
    size = len(packed)
    assert size == tree.unique_tokens
    index = np.arange(size)
    visible = (index[None, :] <= index[:, None]) & (index[:, None] < packed.subtree_end[None, :])
    for i in range(size):
        above = ancestors(packed, i)
        assert np.flatnonzero(visible[i]).tolist() == above
        assert packed.depth[i] == len(above) - 1
        assert packed.parent[i] < i
    for k, call in enumerate(calls):
        (own,) = np.nonzero(packed.call == k)
        assert packed.tokens[own].tolist() == list(call.response)
        assert packed.log_probs[own].tolist() == generation(call.response, k).log_probs.tolist()
        assert set(packed.versions[own].tolist()) == {k}
        assert packed.tokens[ancestors(packed, int(own[-1]))].tolist() == list(call.history)
    assert np.array_equal(packed.sampled, packed.call >= 0)
    assert np.array_equal(packed.trainable, packed.sampled)
    assert np.array_equal(np.isnan(packed.log_probs), ~packed.sampled)
    assert np.array_equal(packed.versions == -1, ~packed.sampled)


@given(rollouts(max_calls=6), st.data())
def test_kept_calls_train_and_count_as_leaves(calls: list[Drawn], data: st.DataObject) -> None:
    keep = frozenset(data.draw(st.sets(st.integers(0, len(calls) - 1))))
    tree, packed = packed_with(calls, keep)
    assert np.array_equal(packed.trainable, np.isin(packed.call, list(keep)))
    last = {k: int(np.flatnonzero(packed.call == k)[-1]) for k in range(len(calls))}

    def below(i: int, j: int) -> bool:
        return bool(i <= j < packed.subtree_end[i])

    leaves = [k for k in keep if not any(below(last[k], last[o]) for o in keep if o != k)]
    for i in range(len(packed)):
        assert packed.n_leaves[i] == sum(below(i, last[k]) for k in leaves)
    assert pack(tree).n_leaves[packed.parent == -1].sum() == len(tree.leaf_calls())


@given(rollouts(max_calls=6))
def test_trajectories_are_the_leaf_calls_histories(calls: list[Drawn]) -> None:
    tree, packed = packed_with(calls, None)
    found = paths(packed)
    assert sorted(p.leaf_call for p in found) == tree.leaf_calls()
    for path in found:
        assert packed.tokens[path.index].tolist() == list(calls[path.leaf_call].history)
        assert path.index.tolist() == ancestors(packed, int(path.index[-1]))


def test_an_empty_tree_packs_to_nothing() -> None:
    packed = pack(PrefixTree())
    assert len(packed) == 0 and paths(packed) == []


def test_a_known_tree_packs_to_known_arrays() -> None:
    """1 2 | 3 4 (call 0) -> 5 | 6 (call 1); a second sample 7 (call 2) of the prompt 1 2; a fork 3 | 8 | 9 (call 3)."""
    calls = [
        Drawn((1, 2), (3, 4), None),
        Drawn((1, 2, 3, 4, 5), (6,), 0),
        Drawn((1, 2), (7,), 0),
        Drawn((1, 2, 3, 8), (9,), 0),
    ]
    _, packed = packed_with(calls, None)
    expected: dict[str, list[int] | TokenArray] = {
        "tokens": [1, 2, 3, 4, 5, 6, 8, 9, 7],
        "parent": [-1, 0, 1, 2, 3, 4, 2, 6, 1],
        "depth": [0, 1, 2, 3, 4, 5, 3, 4, 2],
        "subtree_end": [9, 9, 8, 6, 6, 6, 8, 8, 9],
        "call": [-1, -1, 0, 0, -1, 1, -1, 3, 2],
        "n_leaves": [3, 3, 2, 1, 1, 1, 1, 1, 1],
    }
    for name, values in expected.items():
        assert getattr(packed, name).tolist() == values, name
