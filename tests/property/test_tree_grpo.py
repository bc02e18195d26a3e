"""Identities of tree GRPO on random trees (``docs/method.md``, section 7)."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tensordict import TensorDict, lazy_stack
from torch import Tensor, nn
from torch.testing import assert_close

from clawgym_env.tree.pack import PackedTree
from clawgym_env.types import Status
from tests.trees import (
    Call,
    DenseTreeActor,
    TableActor,
    call_lists,
    packed_of_calls,
    packed_trees,
    path_log_probs,
    path_of,
    tiny_qwen3,
)
from torchrl_ext import functional as F
from torchrl_ext.data import to_training_batch, tree_td
from torchrl_ext.losses import TreeGRPOLoss

REWARDS = st.lists(st.floats(-4, 4).map(lambda x: round(x, 3)), min_size=1, max_size=8)
MODES = st.sampled_from(["once", "leaf_fraction", "per_leaf", "sqrt"])


def gradient(actor: nn.Module, loss: Tensor) -> Tensor:
    """All parameters' gradients as one vector."""
    parts = torch.autograd.grad(loss, list(actor.parameters()))
    return torch.cat([p.reshape(-1) for p in parts])


def rollouts(trees: list[PackedTree], *, seed: int = 0) -> list[TensorDict]:
    """Rollouts with made-up advantages around 0."""
    rng = np.random.default_rng(seed)
    return [tree_td(t, reward=1.0, query="q", advantage=float(rng.normal())) for t in trees]


def loss_and_gradient(tds: list[TensorDict], **options: object) -> tuple[Tensor, Tensor]:
    actor = TableActor()
    loss = TreeGRPOLoss(actor, **options)(to_training_batch(tds)).loss_objective  # type: ignore[arg-type]
    return loss.detach(), gradient(actor, loss)


def assert_equal_losses(a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor]) -> None:
    assert_close(a[0], b[0], rtol=1e-10, atol=1e-12)
    assert_close(a[1], b[1], rtol=1e-10, atol=1e-12)


# Advantages


@given(REWARDS, st.data())
@settings(max_examples=200, deadline=None)
def test_advantages_sum_to_zero_and_ignore_a_shift(rewards: list[float], data: st.DataObject) -> None:
    size = len(rewards)
    r = torch.tensor(rewards, dtype=torch.float64)
    group = torch.tensor(data.draw(st.lists(st.integers(0, 2), min_size=size, max_size=size)))
    valid = torch.tensor(data.draw(st.lists(st.booleans(), min_size=size, max_size=size)))
    for scale in ("std", "none"):
        for baseline in ("mean", "leave_one_out"):
            options = {"scale": scale, "baseline": baseline}
            a = F.group_advantage(r, group, valid_R=valid, **options).advantage_R  # type: ignore[arg-type]
            shifted = F.group_advantage(r + 2.0**10 * group, group, valid_R=valid, **options).advantage_R  # type: ignore[arg-type]
            for g in range(3):
                assert abs(float(a[(group == g) & valid].sum())) < 1e-7
            assert (a[~valid] == 0).all()
            assert_close(shifted, a, rtol=1e-6, atol=1e-6)


@given(REWARDS, st.integers(0, 7), st.data())
@settings(max_examples=100, deadline=None)
def test_an_excluded_rollout_is_as_if_it_were_not_there(rewards: list[float], at: int, data: st.DataObject) -> None:
    at = min(at, len(rewards))
    group = data.draw(st.lists(st.integers(0, 2), min_size=len(rewards), max_size=len(rewards)))
    r, g = torch.tensor(rewards, dtype=torch.float64), torch.tensor(group)
    alone = F.group_advantage(r, g, valid_R=torch.ones(len(r), dtype=torch.bool)).advantage_R
    more_r = torch.tensor([*rewards[:at], float("nan"), *rewards[at:]], dtype=torch.float64)
    more_g = torch.tensor([*group[:at], 1, *group[at:]])
    valid = torch.ones(len(more_r), dtype=torch.bool)
    valid[at] = False
    more = F.group_advantage(more_r, more_g, valid_R=valid).advantage_R
    assert more[at] == 0
    assert_close(torch.cat([more[:at], more[at + 1 :]]), alone, rtol=1e-12, atol=1e-12)


# Invariance of the loss


@given(st.lists(packed_trees(), min_size=1, max_size=4), st.randoms(use_true_random=False), MODES)
@settings(max_examples=60, deadline=None)
def test_order_of_rollouts_does_not_matter(trees: list[PackedTree], random: object, mode: str) -> None:
    assume(any(t.trainable.any() for t in trees))
    tds = rollouts(trees)
    shuffled = list(tds)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    assert_equal_losses(loss_and_gradient(shuffled, node_weight=mode), loss_and_gradient(tds, node_weight=mode))


@given(st.lists(packed_trees(keep_all=True), min_size=2, max_size=4), MODES)
@settings(max_examples=60, deadline=None)
def test_batch_composition_does_not_matter(trees: list[PackedTree], mode: str) -> None:
    """The loss of a batch is the mean of its rollouts' losses alone; also through a lazy stack."""
    tds = rollouts(trees)
    loss, grad = loss_and_gradient(lazy_stack(tds), node_weight=mode)  # type: ignore[arg-type]
    alone = [loss_and_gradient([td], node_weight=mode) for td in tds]
    assert_equal_losses(
        (loss, grad),
        (torch.stack([a for a, _ in alone]).mean(), torch.stack([g for _, g in alone]).mean(0)),
    )


@given(st.lists(packed_trees(keep_all=True), min_size=2, max_size=4), st.sampled_from(["rollout_mean", "token_mean"]))
@settings(max_examples=40, deadline=None)
def test_micro_batches_add_up(trees: list[PackedTree], normalisation: str) -> None:
    tds = rollouts(trees)
    whole = loss_and_gradient(tds, normalisation=normalisation)
    totals = {"n_rollouts": len(tds), "n_tokens": sum(int(t.trainable.sum()) for t in trees)}
    actor = TableActor()
    loss_fn = TreeGRPOLoss(actor, normalisation=normalisation)  # type: ignore[arg-type]
    losses = [loss_fn(to_training_batch(part, **totals)).loss_objective for part in (tds[:1], tds[1:])]
    parts = sum(losses, torch.zeros(()))
    assert_equal_losses((parts.detach(), gradient(actor, parts)), whole)


@given(st.lists(packed_trees(keep_all=True), min_size=1, max_size=3), packed_trees())
@settings(max_examples=40, deadline=None)
def test_an_unscored_rollout_changes_nothing(trees: list[PackedTree], failed: PackedTree) -> None:
    tds = rollouts(trees)
    extra = tree_td(failed, reward=None, query="q", status=Status.ENGINE_ERROR, advantage=0.0)
    assert_equal_losses(loss_and_gradient([*tds, extra]), loss_and_gradient(tds))


@given(call_lists(max_calls=5), st.data(), MODES)
@settings(max_examples=80, deadline=None)
def test_a_dead_leaf_changes_nothing(calls: list[Call], data: st.DataObject, mode: str) -> None:
    """A dropped call off the retained paths: same loss, same gradient."""
    base = data.draw(st.sampled_from(calls))
    history = base.prompt + base.response
    cut = data.draw(st.integers(1, len(history)))
    dead = Call([*history[:cut], data.draw(st.integers(0, 4))], [1, 2])
    kept = frozenset(range(len(calls)))
    before, after = packed_of_calls(calls), packed_of_calls([*calls, dead], keep=kept)
    assert len(after) > len(before)
    assert_equal_losses(
        loss_and_gradient(rollouts([after]), node_weight=mode), loss_and_gradient(rollouts([before]), node_weight=mode)
    )


@given(st.permutations(range(5)), call_lists(max_calls=5), MODES)
@settings(max_examples=80, deadline=None)
def test_arrival_order_of_sibling_calls_does_not_matter(order: list[int], calls: list[Call], mode: str) -> None:
    roots = [Call([0, k, 1, *c.prompt], c.response) for k, c in enumerate(calls)]  # independent sub-agents
    shuffled = [roots[k] for k in order if k < len(roots)]
    a, b = (rollouts([packed_of_calls(c)]) for c in (roots, shuffled))
    assert_equal_losses(loss_and_gradient(a, node_weight=mode), loss_and_gradient(b, node_weight=mode))


def test_duplicating_a_branch_counts_under_per_leaf_only() -> None:
    """Each leaf counted twice, as when two retained paths hold the same tokens."""
    trunk, branch = Call([0, 1], [2, 3]), Call([0, 1, 2, 3, 4], [1])
    one = packed_of_calls([trunk, branch])
    doubled = replace(one, n_leaves=one.n_leaves * 2)
    pairs = {m: [loss_and_gradient(rollouts([t]), node_weight=m) for t in (one, doubled)] for m in ("once", "per_leaf")}
    assert_equal_losses(*pairs["once"])
    assert_close(pairs["per_leaf"][1][1], 2 * pairs["per_leaf"][0][1], rtol=1e-10, atol=1e-12)


# The packed loss and the loss of the branches


def branch_loss(model: nn.Module, trees: list[PackedTree], advantages: list[float], mode: str) -> Tensor:
    """Every root-to-leaf path by itself, each token's loss shared out among the paths that hold it. By the formulas."""
    total = torch.zeros(())
    for tree, advantage in zip(trees, advantages, strict=True):
        train = np.flatnonzero(tree.trainable)
        ends = [int(t) for t in train if not tree.trainable[t + 1 : tree.subtree_end[t]].any()]
        paths = [path_of(tree.parent, e) for e in ends]
        n = {int(t): sum(int(t) in p for p in paths) for t in train}
        weight = {
            "once": lambda k: 1.0,
            "leaf_fraction": lambda k: k / len(paths),  # noqa: B023 - used within this turn of the loop
            "per_leaf": float,
            "sqrt": lambda k: k**-0.5,
        }[mode]
        for path in paths:
            log_probs = path_log_probs(model, torch.from_numpy(tree.tokens[path]))
            for k, t in enumerate(path):
                if tree.trainable[t]:
                    ratio = (log_probs[k] - float(tree.log_probs[t])).exp()
                    objective = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.28) * advantage)
                    total = total - objective * weight(n[t]) / n[t] / len(train) / len(trees)
    return total


def near_policy(model: nn.Module, tree: PackedTree, seed: int) -> PackedTree:
    """The tree with behaviour log-probs close to the model's own, so that some tokens are clipped and some are not."""
    rng = np.random.default_rng(seed)
    log_probs = tree.log_probs.copy()
    with torch.no_grad():
        for t in np.flatnonzero(tree.sampled):
            path = path_of(tree.parent, int(t))
            own = path_log_probs(model, torch.from_numpy(tree.tokens[path]))[-1]
            log_probs[t] = float(own) + rng.normal(scale=0.3)
    return replace(tree, log_probs=log_probs)


@given(
    st.lists(packed_trees(max_calls=4, keep_all=True), min_size=1, max_size=2), MODES, st.booleans(), st.integers(0, 99)
)
@settings(max_examples=12, deadline=None)
def test_packed_gradient_equals_branch_gradient(trees: list[PackedTree], mode: str, dense: bool, seed: int) -> None:
    model = tiny_qwen3(seed=seed)
    trees = [near_policy(model, t, seed) for t in trees]
    tds = rollouts(trees, seed=seed)
    advantages = [float(td["advantage"]) for td in tds]
    actor = DenseTreeActor(model) if dense else model
    loss_fn = TreeGRPOLoss(actor, clip_epsilon=(0.2, 0.28), node_weight=mode)  # type: ignore[arg-type]
    loss = loss_fn(to_training_batch(tds)).loss_objective
    reference = branch_loss(model, trees, advantages, mode)
    assert_close(loss, reference, rtol=1e-5, atol=1e-6)
    grad, expected = gradient(model, loss), gradient(model, reference)
    assert float((grad - expected).norm()) <= 1e-5 * max(float(expected.norm()), 1e-3)
