"""Merging and pruning keep every path and share every common prompt."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from clawgym_env.tree.pack import PackedTree
from tests.trees import Call, assert_same_tree, packed_of_calls, packed_trees, path_of
from torchrl_ext.merge import MergedTree, merge_trees, prune


def with_credit(tree: PackedTree) -> PackedTree:
    """Every other call has half the credit."""
    return replace(tree, credit=np.where(tree.sampled & (tree.call % 2 == 1), np.float32(0.5), np.float32(1)))


TREES = packed_trees().map(with_credit)
BATCH = st.lists(TREES, min_size=0, max_size=5)
COPIED = ("tokens", "depth", "sampled", "trainable", "log_probs", "versions", "call", "credit")


def prompt_region(tree: PackedTree | MergedTree) -> list[int]:
    """Positions with no sampled token on their path, themselves included."""
    return [i for i in range(len(tree)) if not tree.sampled[path_of(tree.parent, i)].any()]


def assert_depth_first(forest: MergedTree | PackedTree) -> None:
    size = len(forest)
    ends = np.arange(1, size + 1)
    for i in range(size - 1, -1, -1):
        p = forest.parent[i]
        assert p < i
        assert forest.depth[i] == (0 if p < 0 else forest.depth[p] + 1)
        if p >= 0:
            ends[p] = max(ends[p], ends[i])
    np.testing.assert_array_equal(forest.subtree_end, ends)
    for i in range(size):  # a subtree is an interval
        inside = [j for j in range(size) if i in path_of(forest.parent, j)]
        assert inside == list(range(i, int(forest.subtree_end[i])))


@given(BATCH)
@settings(max_examples=150, deadline=None)
def test_merged_forest_is_depth_first(trees: list[PackedTree]) -> None:
    assert_depth_first(merge_trees(trees))


@given(BATCH)
@settings(max_examples=150, deadline=None)
def test_every_position_keeps_its_path(trees: list[PackedTree]) -> None:
    merged = merge_trees(trees)
    for k, (tree, at) in enumerate(zip(trees, merged.index_of, strict=True)):
        for name in COPIED:
            np.testing.assert_array_equal(getattr(merged, name)[at], getattr(tree, name), err_msg=name)
        np.testing.assert_array_equal(merged.parent[at], np.where(tree.parent < 0, -1, at[tree.parent]))
        sampled = tree.sampled
        assert (merged.rollout[at][sampled] == k).all()
        np.testing.assert_array_equal(merged.n_leaves[at][sampled], tree.n_leaves[sampled])


@given(BATCH)
@settings(max_examples=150, deadline=None)
def test_exactly_the_common_prompts_are_shared(trees: list[PackedTree]) -> None:
    merged = merge_trees(trees)
    prompts: dict[tuple[int, ...], set[int]] = {}
    rest = 0
    for k, tree in enumerate(trees):
        region = prompt_region(tree)
        rest += len(tree) - len(region)
        for i in region:
            prompts.setdefault(tuple(tree.tokens[path_of(tree.parent, i)].tolist()), set()).add(k)
    assert len(merged) == rest + len(prompts)
    held = {
        tuple(merged.tokens[path_of(merged.parent, i)].tolist()): int(merged.rollout[i]) for i in prompt_region(merged)
    }
    assert held == {path: next(iter(who)) if len(who) == 1 else -1 for path, who in prompts.items()}


@given(TREES)
@settings(max_examples=100, deadline=None)
def test_one_tree_merges_to_itself(tree: PackedTree) -> None:
    merged = merge_trees([tree])
    assert len(merged) == len(tree)
    np.testing.assert_array_equal(np.sort(merged.index_of[0]), np.arange(len(tree)))


@given(TREES)
@settings(max_examples=150, deadline=None)
def test_prune_keeps_what_leads_to_training(tree: PackedTree) -> None:
    small, kept = prune(tree)
    wanted = {i for t in np.flatnonzero(tree.trainable) for i in path_of(tree.parent, int(t))}
    assert kept.tolist() == sorted(wanted)
    assert_depth_first(small)
    np.testing.assert_array_equal(
        small.parent, np.where(tree.parent[kept] < 0, -1, np.searchsorted(kept, tree.parent[kept]))
    )
    for name in (*COPIED, "n_leaves"):
        np.testing.assert_array_equal(getattr(small, name), getattr(tree, name)[kept], err_msg=name)
    assert_same_tree(prune(small)[0], small)


def test_system_prompt_and_task_text_lie_once() -> None:
    system, task_a, task_b = [0, 0, 0, 0], [1, 2], [3, 4]
    trees = [packed_of_calls([Call(system + task, [r])]) for task, r in ((task_a, 1), (task_a, 2), (task_b, 1))]
    merged = merge_trees(trees)
    np.testing.assert_array_equal(merged.tokens, [0, 0, 0, 0, 1, 2, 1, 2, 3, 4, 1])
    np.testing.assert_array_equal(merged.parent, [-1, 0, 1, 2, 3, 4, 5, 5, 3, 8, 9])
    np.testing.assert_array_equal(merged.rollout, [-1, -1, -1, -1, -1, -1, 0, 1, 2, 2, 2])
    np.testing.assert_array_equal(merged.subtree_end, [11, 11, 11, 11, 8, 8, 7, 8, 11, 11, 11])
    np.testing.assert_array_equal(merged.n_leaves, [3, 3, 3, 3, 2, 2, 1, 1, 1, 1, 1])


def test_equal_sampled_tokens_stay_apart() -> None:
    twin = packed_of_calls([Call([0, 1], [2, 3])])
    merged = merge_trees([twin, twin])
    np.testing.assert_array_equal(merged.tokens, [0, 1, 2, 3, 2, 3])
    np.testing.assert_array_equal(merged.rollout, [-1, -1, 0, 0, 1, 1])
