"""Tree GAE and tree PPO worked out by hand: a chain, a fork, three levels, two rollouts of a batch."""

from __future__ import annotations

import math

import pytest
import torch
from tensordict import TensorDict
from torch import Tensor, nn
from torch.testing import assert_close

from tests.golden.test_tree_grpo_golden import CHAIN, FORK, RatioActor
from torchrl_ext import functional as F
from torchrl_ext.data import to_training_batch, tree_td
from torchrl_ext.losses import TreePPOLoss, TreeValueLoss


def f64(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def estimate(
    parent: list[int], trainable: list[int], n_leaves: list[int], value: Tensor, reward: Tensor, **options: float | str
) -> F.TreeEstimate:
    backup = options.pop("branch_backup", "leaf_mean")
    tree = F.trainable_tree(
        torch.tensor(parent),
        torch.tensor(trainable, dtype=torch.bool),
        torch.tensor(n_leaves),
        backup,  # type: ignore[arg-type]
    )
    return F.tree_gae(value, reward, tree, **options)  # type: ignore[arg-type]


def test_chain_skips_what_does_not_train() -> None:
    # prompt, a, b, two tokens of tool output, c; only a, b, c train. γ = λ = 1/2.
    found = estimate(
        [-1, 0, 1, 2, 3, 4], [0, 1, 1, 0, 0, 1], [1] * 6, f64(0.5, 0.25, 0.75), f64(0, 0, 1), gamma=0.5, lmbda=0.5
    )
    c = 1 - 0.75
    b = 0.5 * 0.75 - 0.25 + 0.25 * c  # the next value is that of c, undiscounted by the tool output
    a = 0.5 * 0.25 - 0.5 + 0.25 * b
    assert_close(found.advantage_M, f64(a, b, c), rtol=0, atol=1e-15)
    assert_close(found.advantage_M, f64(-0.328125, 0.1875, 0.25), rtol=0, atol=1e-15)
    assert_close(found.value_target_M, f64(0.171875, 0.4375, 1.0), rtol=0, atol=1e-15)


def test_fork() -> None:
    # a, then b | tool output, c, d; both trajectories earn 1. γ = λ = 1/2.
    found = estimate(
        [-1, 0, 1, 1, 3, 4], [0, 1, 1, 0, 1, 1], [2, 2, 1, 1, 1, 1],
        f64(0.1, 0.5, 0.25, 0.75), f64(0, 1, 0, 1), gamma=0.5, lmbda=0.5,
    )  # fmt: skip
    b, d = 0.5, 0.25
    c = 0.5 * 0.75 - 0.25 + 0.25 * d
    a = 0.5 * (0.5 + 0.25) / 2 - 0.1 + 0.25 * (b + c) / 2
    assert_close(found.advantage_M, f64(a, b, c, d), rtol=0, atol=1e-15)
    assert_close(found.advantage_M, f64(0.1734375, 0.5, 0.1875, 0.25), rtol=0, atol=1e-15)


THREE = ([-1, 0, 1, 1, 0], [1] * 5, [3, 2, 1, 1, 1])  # r: x (x1, x2), y


@pytest.mark.parametrize(("backup", "root"), [("leaf_mean", 0.65), ("child_uniform", 0.6875)])
def test_three_levels(backup: str, root: float) -> None:
    value, reward = f64(0, 0.5, 0.2, 0.4, 0.6), f64(0, 0, 1, 1, 1)
    found = estimate(*THREE, value, reward, gamma=1.0, lmbda=0.5, branch_backup=backup)
    # x: V' = 0.3, A' = 0.7. r by leaves: V' = (2·0.5 + 0.6)/3, A' = (2·0.15 + 0.4)/3; by children: 0.55 and 0.275.
    assert_close(found.advantage_M, f64(root, -0.2 + 0.35, 0.8, 0.6, 0.4), rtol=0, atol=1e-15)


def test_the_critic_may_have_a_lambda_of_its_own() -> None:
    found = estimate(
        *THREE, f64(0, 0.5, 0.2, 0.4, 0.6), f64(0, 0, 1, 1, 1), gamma=1.0, lmbda=0.5, lmbda_critic=1.0
    )  # fmt: skip
    assert_close(found.advantage_M[0], f64(0.65)[0])
    assert_close(found.value_target_M, f64(1, 1, 1, 1, 1), rtol=0, atol=1e-15)


def test_each_token_may_have_its_own_lambda() -> None:
    # A chain of three, values 0, rewards 1, γ = 1: λ of a token weighs what comes after it.
    found = estimate(
        [-1, 0, 1], [1, 1, 1], [1, 1, 1], f64(0, 0, 0), f64(1, 1, 1), gamma=1.0, lmbda=f64(0.5, 0.25, 0)  # type: ignore[arg-type]
    )  # fmt: skip
    assert_close(found.advantage_M, f64(1 + 0.5 * 1.25, 1.25, 1), rtol=0, atol=1e-15)


def test_length_adaptive_lambda() -> None:
    # Rollout 0: the tree of three levels, trajectories of 3, 3 and 2 tokens; rollout 1: one of 4. α = 1/2.
    parent = torch.tensor([*THREE[0], -1, 5, 6, 7])
    n = torch.tensor([*THREE[2], 1, 1, 1, 1])
    tree = F.trainable_tree(parent, torch.ones(9, dtype=torch.bool), n)
    found = F.length_adaptive_lambda(n, torch.tensor([0] * 5 + [1] * 4), 0.5, tree)
    assert_close(found, f64(*[1 - 1 / (0.5 * 8 / 3)] * 5, *[1 - 1 / 2] * 4), rtol=0, atol=1e-15)


def test_tree_credit_of_leaves_by_hand() -> None:
    # The tree of three levels with leaf rewards x1 = 1, x2 = 0, y = 0: V = 1/3, 1/2, 1, 0, 0.
    parent, mask, n = (torch.tensor(x) for x in THREE)
    tree = F.trainable_tree(parent, mask.bool(), n)
    reward = f64(0, 0, 1, 0, 0)
    found = F.treerl_advantage(reward, tree, n, torch.zeros(5, dtype=torch.int64))
    v = 1 / 3
    expected = f64(0, (2 * (1 / 2 - v)) / math.sqrt(2), (1 - v) + 1 / 2, (0 - v) - 1 / 2, 2 * (0 - v))
    assert_close(found, expected, rtol=0, atol=1e-15)
    plus, minus = F.leaf_advantage(f64(9, 9, 1, -2, -4), tree)
    assert_close(plus, f64(1 / 3, 1 / 2, 1, 0, 0), rtol=0, atol=1e-15)
    assert_close(minus, f64(-2, -1, 0, -2, -4), rtol=0, atol=1e-15)


def test_a_step_is_a_run_of_tokens() -> None:
    """The same tree with every node three tokens long: each has its node's credit."""
    parent = torch.tensor([-1, 0, 1, 2, 3, 4, 5, 6, 7, 5, 9, 10, 2, 12, 13])
    n = torch.tensor([3, 2, 1, 1, 1]).repeat_interleave(3)
    tree = F.trainable_tree(parent, torch.ones(15, dtype=torch.bool), n)
    reward = torch.zeros(15, dtype=torch.float64)
    reward[8] = 1  # the last token of x1
    found = F.treerl_advantage(reward, tree, n, torch.zeros(15, dtype=torch.int64))
    v = 1 / 3
    nodes = f64(0, (2 * (1 / 2 - v)) / math.sqrt(2), (1 - v) + 1 / 2, (0 - v) - 1 / 2, 2 * (0 - v))
    assert_close(found, nodes.repeat_interleave(3), rtol=0, atol=1e-15)


def test_tree_grpo_compares_within_the_tree_and_the_prompt() -> None:
    # Two trees of one prompt: leaves 1, 0 and 1, 1.
    reward, tree, group = f64(1, 0, 1, 1), torch.tensor([0, 0, 1, 1]), torch.zeros(4, dtype=torch.int64)
    found = F.leaf_group_advantage(reward, tree, group, eps=0.0)
    std = math.sqrt(3) / 4
    assert_close(found, f64(1 + 0.25 / std, -1 - 0.75 / std, 0.25 / std, 0.25 / std), rtol=0, atol=1e-14)


class TableCritic(nn.Module):
    """V by token id, one parameter each."""

    def __init__(self, **values: float) -> None:
        super().__init__()
        self.value = nn.Parameter(torch.tensor([values.get(f"v{t}", 0.0) for t in range(9)], dtype=torch.float64))

    def tree_values(self, tokens: Tensor, parent: Tensor, depth: Tensor, end: Tensor, targets: Tensor) -> Tensor:
        """See ``torchrl_ext.critic.TreeValues``."""
        return self.value[tokens[targets]]


def batch() -> TensorDict:
    """Rollout 0, score 1: answer 2 3, tool output, then 5 | 6 7. Rollout 1, score 0: answer 8."""
    return to_training_batch([tree_td(FORK, reward=1.0, query="q"), tree_td(CHAIN, reward=0.0, query="q")])


def test_rewards_lie_on_the_last_tokens() -> None:
    td = batch()
    assert td["next", "reward"].tolist() == [0, 0, 0, 0, 0, 1, 0, 1, 0]
    assert td["next", "done"].nonzero().squeeze(-1).tolist() == [5, 7, 8]
    assert td["tree", "prompt"].tolist() == [0] * 9 and td["batch", "n_prompts"].tolist() == [1] * 9


def test_ppo_by_hand() -> None:
    # V = 0.5 but V(8) = 0.25; γ = λ = 1, so A = R − V: 0.5 in rollout 0, -0.25 in rollout 1.
    critic = TableCritic(v2=0.5, v3=0.5, v5=0.5, v6=0.5, v7=0.5, v8=0.25)
    actor = RatioActor({2: 1.5, 5: 0.5, 8: 0.5})
    out = TreePPOLoss(actor, critic, critic_coeff=0.5)(batch())
    objective = (0.5 * (1.2 + 1.0 + 0.5 + 1.0 + 1.0) / 5 - 0.25 * 0.8) / 2
    assert_close(out.loss_objective.item(), -objective, rtol=0, atol=1e-12)
    # Targets 1 and 0: squared errors 0.25 and 0.0625, once a unique token.
    assert_close(out.loss_critic.item(), 0.5 * (0.25 + 0.0625) / 2, rtol=0, atol=1e-12)
    # Var(G) of 1 ×5, 0: 5/36. G − V: 0.5 ×5, -0.25: 0.75² · 5/36.
    assert_close(out.explained_variance.item(), 1 - 0.5625, rtol=0, atol=1e-12)
    out.loss_critic.backward()
    fifth = 0.5 * 2 / (2 * 5)  # coefficient · derivative of the square / (G · N₀)
    expected = [0, 0, *[-0.5 * fifth] * 2, 0, *[-0.5 * fifth] * 3, 0.25 * 0.5]
    assert_close(critic.value.grad, f64(*expected), rtol=0, atol=1e-12)


def test_clipped_critic_by_hand() -> None:
    critic = TableCritic(v2=0.9, v8=0.5)
    loss = TreeValueLoss(critic, clip_value=0.2)
    td = batch()
    td["state_value"] = torch.zeros(9, dtype=torch.float64)  # V before the first update
    loss.value_estimator(td)  # G = 1 and 0
    out = loss(td)
    # Token 2: (0.9 − 1)² = 0.01 but held at 0.2: 0.64. Tokens 3, 5, 6, 7 at 0: 1. Token 8: max(0.25, 0.04).
    assert_close(out.loss_critic.item(), ((0.64 + 4) / 5 + 0.25) / 2, rtol=0, atol=1e-12)
    assert_close(out.value_clip_fraction.item(), 2 / 6, rtol=0, atol=1e-12)


def test_whitening_counts_a_shared_token_once() -> None:
    critic = TableCritic()
    loss = TreePPOLoss(RatioActor({}), critic).make_value_estimator("tree_gae", average_gae=True)
    td = loss.value_estimator(batch())  # A = 1 ×5, 0: mean 5/6, σ = √5/6
    assert_close(td["advantage"][[2, 5, 8]], f64(*[1 / math.sqrt(5)] * 2, -math.sqrt(5)), rtol=1e-7, atol=0)
    assert td["advantage"][[0, 1, 4]].tolist() == [0, 0, 0]
