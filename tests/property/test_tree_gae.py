"""Identities of tree GAE on random forests, in float64 (``docs/method.md``)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode

from tests.forests import Forest, branch_advantages, chain_gae, comb, forest, forests, random_parents, star
from tests.trees import path_of
from torchrl_ext import functional as F

UNIT = st.sampled_from([0.0, 0.3, 0.95, 1.0])
BACKUPS = st.sampled_from(["leaf_mean", "child_uniform"])


def tree_of(f: Forest, backup: F.BranchBackup = "leaf_mean") -> F.TrainableTree:
    return F.trainable_tree(f.parent, f.trainable, f.n_leaves, backup)


def advantage(f: Forest, gamma: float, lmbda: float, backup: F.BranchBackup = "leaf_mean") -> Tensor:
    """[N], NaN where nothing trains."""
    tree = tree_of(f, backup)
    found = F.tree_gae(f.value[tree.index_M], f.reward[tree.index_M], tree, gamma=gamma, lmbda=lmbda)
    out = torch.full((len(f),), torch.nan, dtype=torch.float64)
    return out.index_put((tree.index_M,), found.advantage_M)


def exact(a: Tensor, b: Tensor) -> None:
    assert_close(a, b, rtol=1e-10, atol=1e-10, equal_nan=True)


@given(forests(), UNIT, UNIT)
@settings(max_examples=200)
def test_leaf_mean_is_the_mean_of_the_trajectories_alone(f: Forest, gamma: float, lmbda: float) -> None:
    found = advantage(f, gamma, lmbda)
    alone = branch_advantages(f, gamma, lmbda)
    assert set(alone) == set(f.trainable.nonzero().squeeze(-1).tolist())
    exact(found[list(alone)], torch.tensor([np.mean(a) for a in alone.values()], dtype=torch.float64))


@given(forests(), UNIT, UNIT)
@settings(max_examples=100)
def test_child_uniform_is_the_plain_recursion_over_children(f: Forest, gamma: float, lmbda: float) -> None:
    """Node by node from the last: masked tokens hand on the mean of what is below them."""
    up_value, up_advantage = np.zeros(len(f)), np.zeros(len(f))
    expected = np.full(len(f), np.nan)
    children: dict[int, list[int]] = {}
    for i in range(len(f) - 1, -1, -1):
        below = children.get(i, [])
        value = np.mean([up_value[c] for c in below]) if below else 0.0
        later = np.mean([up_advantage[c] for c in below]) if below else 0.0
        if f.trainable[i]:
            expected[i] = float(f.reward[i]) + gamma * value - float(f.value[i]) + gamma * lmbda * later
            value, later = float(f.value[i]), expected[i]
        up_value[i], up_advantage[i] = value, later
        if f.n_leaves[i] > 0:
            children.setdefault(int(f.parent[i]), []).append(i)
    exact(advantage(f, gamma, lmbda, "child_uniform"), torch.from_numpy(expected))


@given(st.data(), BACKUPS)
@settings(max_examples=100)
def test_one_reward_makes_the_advantage_reward_less_value(data: st.DataObject, backup: F.BranchBackup) -> None:
    reward = data.draw(st.floats(-3, 3))
    f = data.draw(forests(reward=reward))
    exact(advantage(f, 1.0, 1.0, backup), torch.where(f.trainable, reward - f.value, torch.nan))


@given(forests(), UNIT, UNIT, BACKUPS)
@settings(max_examples=100)
def test_every_branch_and_their_mean(f: Forest, gamma: float, lmbda: float, backup: F.BranchBackup) -> None:
    """``branch_gae`` lists each trajectory's own GAE; its weighted mean is ``tree_gae``, under either backup."""
    tree = tree_of(f, backup)
    value, reward = f.value[tree.index_M], f.reward[tree.index_M]
    pairs, node, weight = F.branch_gae(value, reward, tree, gamma=gamma, lmbda=lmbda)
    alone = branch_advantages(f, gamma, lmbda)
    for m, position in enumerate(tree.index_M.tolist()):
        exact(pairs[node == m], torch.tensor(alone[position], dtype=torch.float64))
    zero = torch.zeros_like(value)
    exact(zero.index_add(0, node, weight), torch.ones_like(value))
    exact(
        zero.index_add(0, node, weight * pairs),
        F.tree_gae(value, reward, tree, gamma=gamma, lmbda=lmbda).advantage_M,
    )
    plus, minus = F.split_advantage(pairs, node, weight, len(value))
    assert (plus >= 0).all() and (minus <= 0).all()
    exact(plus + minus, zero.index_add(0, node, weight * pairs))


@given(forests(max_size=30), UNIT, UNIT, st.integers(0, 2**32 - 1))
@settings(max_examples=60)
def test_two_sums_are_exact_where_branches_disagree(f: Forest, gamma: float, lmbda: float, seed: int) -> None:
    """Value and gradient of the clipped objective: A⁺ and A⁻ against every branch by itself."""
    tree = tree_of(f)
    pairs, node, weight = F.branch_gae(f.value[tree.index_M], f.reward[tree.index_M], tree, gamma=gamma, lmbda=lmbda)
    drawn = np.random.default_rng(seed).normal(scale=0.4, size=len(tree))
    log_prob = torch.from_numpy(drawn).requires_grad_()
    old = torch.zeros_like(log_prob)
    options = {"clip_low": 0.2, "clip_high": 0.28, "dual_clip": 3.0}
    split = F.split_advantage(pairs, node, weight, len(tree))
    ours = F.policy_objective(log_prob, old, split, **options).objective_M.sum()  # type: ignore[arg-type]
    one_by_one = F.policy_objective(log_prob[node], old[node], pairs, **options).objective_M  # type: ignore[arg-type]
    theirs = (weight * one_by_one).sum()
    exact(ours, theirs)
    exact(*(torch.autograd.grad(x, log_prob)[0] for x in (ours, theirs)))


def test_the_mean_advantage_is_not_exact_where_branches_disagree() -> None:
    ratio = torch.tensor([2.0], dtype=torch.float64).log()
    zero, ones = torch.zeros_like(ratio), torch.ones(2, dtype=torch.float64)
    split = F.split_advantage(torch.tensor([3.0, -1.0], dtype=torch.float64), torch.zeros(2).long(), ones / 2, 1)
    assert F.policy_objective(ratio, zero, split).objective_M.item() == pytest.approx((3 * 1.2 - 2) / 2)
    mean = F.policy_objective(ratio, zero, split.positive_M + split.negative_M)
    assert mean.objective_M.item() == pytest.approx(1.2)


# Invariances


def permuted(f: Forest, seed: int) -> tuple[Forest, Tensor]:
    """The same forest with the children of every node, and the roots, in another order; and where each node went."""
    rng = np.random.default_rng(seed)
    children: dict[int, list[int]] = {}
    for i, p in enumerate(f.parent.tolist()):
        children.setdefault(p, []).append(i)
    order: list[int] = []
    stack = [-1]
    while stack:
        node = stack.pop()
        if node >= 0:
            order.append(node)
        stack += rng.permutation(children.get(node, [])).tolist()
    where = torch.empty(len(f), dtype=torch.int64)
    where[order] = torch.arange(len(f))
    parent = f.parent[order]
    moved = torch.where(parent >= 0, where[parent.clamp_min(0)], -1)
    return Forest(moved, *(x[order] for x in (f.trainable, f.n_leaves, f.value, f.reward))), where


@given(forests(), UNIT, UNIT, BACKUPS, st.integers(0, 99))
@settings(max_examples=80)
def test_the_order_of_children_does_not_matter(
    f: Forest, gamma: float, lmbda: float, backup: F.BranchBackup, seed: int
) -> None:
    other, where = permuted(f, seed)
    exact(advantage(other, gamma, lmbda, backup)[where], advantage(f, gamma, lmbda, backup))


@given(forests(), st.data(), UNIT, UNIT, BACKUPS)
@settings(max_examples=80)
def test_a_dead_leaf_changes_nothing(
    f: Forest, data: st.DataObject, gamma: float, lmbda: float, backup: F.BranchBackup
) -> None:
    at = data.draw(st.integers(0, len(f) - 1))
    n = len(f)
    parent = torch.cat([f.parent, torch.tensor([at, n])])
    more = Forest(
        parent,
        torch.cat([f.trainable, torch.zeros(2, dtype=torch.bool)]),
        torch.cat([f.n_leaves, torch.zeros(2, dtype=torch.int64)]),
        torch.cat([f.value, torch.tensor([7.0, -7.0])]),
        torch.cat([f.reward, torch.tensor([5.0, 5.0])]),
    )
    exact(advantage(more, gamma, lmbda, backup)[:n], advantage(f, gamma, lmbda, backup))


@given(forests(), st.data(), UNIT, UNIT, BACKUPS)
@settings(max_examples=80)
def test_masked_tokens_are_skipped(
    f: Forest, data: st.DataObject, gamma: float, lmbda: float, backup: F.BranchBackup
) -> None:
    """More tool output anywhere on the way changes nothing: neither γ nor λ counts it."""
    at, size, n = data.draw(st.integers(0, len(f) - 1)), data.draw(st.integers(1, 9)), len(f)
    below = f.parent == at
    parent = torch.cat([f.parent, torch.arange(n - 1, n + size - 1)])
    parent[n] = at
    parent[:n][below] = n + size - 1
    # parents no longer come first: that, too, is only a matter of order
    order = torch.cat([torch.arange(at + 1), torch.arange(n, n + size), torch.arange(at + 1, n)])
    where = torch.empty_like(order)
    where[order] = torch.arange(n + size)
    fill = (torch.zeros(size, dtype=torch.bool), f.n_leaves[at].expand(size), torch.ones(size), torch.ones(size))
    more = Forest(
        torch.where(parent[order] >= 0, where[parent[order].clamp_min(0)], -1),
        *(torch.cat([a, b.to(a.dtype)])[order] for a, b in zip((f.trainable, f.n_leaves, f.value, f.reward), fill)),  # noqa: B905
    )
    exact(advantage(more, gamma, lmbda, backup)[where[:n]], advantage(f, gamma, lmbda, backup))


@given(forests(max_size=20), forests(max_size=20), UNIT, UNIT, BACKUPS)
@settings(max_examples=60)
def test_batch_composition_does_not_matter(
    a: Forest, b: Forest, gamma: float, lmbda: float, backup: F.BranchBackup
) -> None:
    shifted = torch.where(b.parent >= 0, b.parent + len(a), -1)
    pairs = ((a.trainable, b.trainable), (a.n_leaves, b.n_leaves), (a.value, b.value), (a.reward, b.reward))
    both = Forest(torch.cat([a.parent, shifted]), *map(torch.cat, pairs))
    alone = [advantage(f, gamma, lmbda, backup) for f in (a, b)]
    exact(advantage(both, gamma, lmbda, backup), torch.cat(alone))


@given(forests(), UNIT, UNIT)
@settings(max_examples=60)
def test_duplicating_every_branch_changes_nothing(f: Forest, gamma: float, lmbda: float) -> None:
    exact(advantage(replace(f, n_leaves=f.n_leaves * 3), gamma, lmbda), advantage(f, gamma, lmbda))


def test_a_branch_taken_twice_counts_twice() -> None:
    """The backup weighs by leaves: 2 trajectories of 3 are the left one."""
    f = forest(star(2), [1, 1, 1])
    twice = replace(f, n_leaves=torch.tensor([3, 2, 1]))
    found, (left, right) = advantage(twice, 1.0, 1.0)[0], f.reward[1:].tolist()
    assert found.item() == pytest.approx(float(f.reward[0] - f.value[0]) + (2 * left + right) / 3)


@given(forests(), UNIT)
@settings(max_examples=60)
def test_a_lambda_a_token(f: Forest, gamma: float) -> None:
    """λ of a token weighs what comes after it: constant tensors are numbers, and 0 at one token cuts there."""
    tree = tree_of(f)
    value, reward = f.value[tree.index_M], f.reward[tree.index_M]
    number = F.tree_gae(value, reward, tree, gamma=gamma, lmbda=0.6)
    tensor = F.tree_gae(value, reward, tree, gamma=gamma, lmbda=torch.full_like(value, 0.6))
    exact(tensor.advantage_M, number.advantage_M)
    lmbda = torch.full_like(value, 0.6)
    lmbda[0] = 0.0
    cut = F.tree_gae(value, reward, tree, gamma=gamma, lmbda=lmbda)
    td = F.tree_gae(value, reward, tree, gamma=gamma, lmbda=0.0).advantage_M
    exact(cut.advantage_M, torch.cat([td[:1], number.advantage_M[1:]]))


# Extremes


@pytest.mark.parametrize(
    "parent",
    [list(range(-1, 4999)), star(5000), comb(2500), [-1] * 3000, [-1]],
    ids=["deep", "wide", "comb", "roots", "one token"],
)
@pytest.mark.parametrize(("gamma", "lmbda"), [(1.0, 1.0), (0.999, 0.9)])
def test_extremes(parent: list[int], gamma: float, lmbda: float) -> None:
    """Against the recursion over children in plain Python; thousands of tokens, branches, forks and trees."""
    f = forest(parent, np.ones(len(parent)), seed=1)
    n, up = f.n_leaves.numpy(), np.zeros((len(f), 2))
    expected = np.zeros(len(f))
    for i in range(len(f) - 1, -1, -1):
        v, a = up[i]
        expected[i] = float(f.reward[i]) + gamma * v - float(f.value[i]) + gamma * lmbda * a
        if parent[i] >= 0:
            up[parent[i]] += n[i] / max(1, n[parent[i]]) * np.array([float(f.value[i]), expected[i]])
    exact(advantage(f, gamma, lmbda), torch.from_numpy(expected))


@pytest.mark.parametrize("share", [0.1, 0.5, 1.0])
def test_long_runs_between_forks(share: float) -> None:
    """Few forks and much tool output, as agents make: runs, and forks of masked tokens below each other."""
    rng = np.random.default_rng(5)
    parent = random_parents(300, 0.04, 0.01, rng)
    f = forest(parent, rng.random(300) < share, seed=2)
    alone = branch_advantages(f, 0.9, 0.8)
    expected = torch.tensor([np.mean(a) for a in alone.values()], dtype=torch.float64)
    exact(advantage(f, 0.9, 0.8)[list(alone)], expected)
    found, _ = F.nearest(f.parent, f.trainable)
    for i in range(300):
        path = [t for t in path_of(f.parent.numpy(), i)[:-1] if f.trainable[t]]
        assert int(found[i]) == (path[-1] if path else -1)


@pytest.mark.parametrize("parent", [list(range(-1, 2**16 - 1)), comb(2**15)], ids=["chain", "comb"])
def test_no_python_loop_over_tokens(parent: list[int]) -> None:
    """The number of tensor operations grows with the logarithm of the depth."""

    class Counter(TorchDispatchMode):
        count = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.count += 1
            return func(*args, **(kwargs or {}))

    tensor = torch.tensor(parent)
    ones = torch.ones(len(parent), dtype=torch.float64)
    with Counter() as counter:
        found = F.tree_sum(ones, tensor, ones)
    assert counter.count < 25 * 17
    below = [1] * len(parent)
    for i in range(len(parent) - 1, 0, -1):
        below[parent[i]] += below[i]
    assert torch.equal(found, torch.tensor(below, dtype=torch.float64))


@given(forests(max_size=40), st.booleans())
@settings(max_examples=60)
def test_nearest_marked_node(f: Forest, factors: bool) -> None:
    factor = f.value if factors else None
    found, product = F.nearest(f.parent, f.trainable, factor)
    for i in range(len(f)):
        above, along = int(f.parent[i]), float(f.value[i])
        while above >= 0 and not f.trainable[above]:
            above, along = int(f.parent[above]), along * float(f.value[above])
        assert int(found[i]) == above
        if product is not None:
            assert float(product[i]) == pytest.approx(along)


@given(forests(max_size=40), st.integers(0, 99))
@settings(max_examples=60)
def test_sums_in_any_order_that_has_parents_first(f: Forest, seed: int) -> None:
    """``unroll`` makes trees that are not depth first."""
    other, where = permuted(f, seed)
    depth = torch.zeros(len(f), dtype=torch.int64)
    for i, p in enumerate(other.parent.tolist()):
        depth[i] = depth[p] + 1 if p >= 0 else 0
    order = torch.argsort(depth, stable=True)  # breadth first
    rank = torch.empty_like(order)
    rank[order] = torch.arange(len(f))
    parent = other.parent[order]
    moved = torch.where(parent >= 0, rank[parent.clamp_min(0)], -1)
    found = F.tree_sum(other.reward[order], moved, other.value[order])
    exact(found[rank][where], F.tree_sum(f.reward, f.parent, f.value))
    slow = f.reward.clone()
    for i in range(len(f) - 1, -1, -1):
        if f.parent[i] >= 0:
            slow[f.parent[i]] += f.value[i] * slow[i]
    exact(F.tree_sum(f.reward, f.parent, f.value), slow)


def test_float32_stays_float32_and_close() -> None:
    f = forest(list(range(-1, 1999)), np.ones(2000), seed=3)
    tree = tree_of(f)
    single = F.tree_gae(f.value.float(), f.reward.float(), tree, gamma=1.0, lmbda=0.95)
    assert single.advantage_M.dtype == torch.float32
    expected = torch.tensor(chain_gae(f.value, f.reward, 1.0, 0.95), dtype=torch.float32)
    assert_close(single.advantage_M, expected, rtol=1e-5, atol=1e-5)


def test_refusals() -> None:
    parent, mask, n = torch.tensor([-1, 0]), torch.tensor([True, True]), torch.tensor([1, 1])
    tree = F.trainable_tree(parent, mask, n)
    x = torch.zeros(2)
    with pytest.raises(ValueError, match="branch_backup"):
        F.trainable_tree(parent, mask, n, "mean")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="shapes"):
        F.trainable_tree(parent, mask, n[:1])
    with pytest.raises(ValueError, match="n_leaves"):
        F.trainable_tree(parent, mask, torch.tensor([1, 0]))
    for options in ({"gamma": 1.5}, {"lmbda": -0.1}, {"lmbda_critic": 2.0}):
        with pytest.raises(ValueError, match=r"must lie in \[0, 1\]"):
            F.tree_gae(x, x, tree, **options)
    with pytest.raises(ValueError, match="one entry a trainable token"):
        F.tree_gae(x[:1], x, tree)
    with pytest.raises(ValueError, match="alpha"):
        F.length_adaptive_lambda(n, torch.zeros_like(n), 0.0, tree)
