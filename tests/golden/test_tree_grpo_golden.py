"""Tree GRPO worked out by hand: a chain, a fork, two rollouts of a group."""

from __future__ import annotations

import math

import numpy as np
import torch
from tensordict import TensorDictBase, lazy_stack
from torch import Tensor, nn
from torch.testing import assert_close

from clawgym_env.types import Status
from tests.trees import Call, packed_of_calls
from torchrl_ext.data import to_training_batch, tree_td
from torchrl_ext.estimators import TreeGroupAdvantage
from torchrl_ext.losses import TreeGRPOLoss, TreeSFTLoss

# Rollout 0: prompt 0 1, answer 2 3, tool output 4; then two continuations of the same history: 5 | 6 7.
FORK = packed_of_calls([Call([0, 1], [2, 3]), Call([0, 1, 2, 3, 4], [5]), Call([0, 1, 2, 3, 4], [6, 7])])
# Rollout 1: same prompt, answer 8.
CHAIN = packed_of_calls([Call([0, 1], [8])])


class RatioActor(nn.Module):
    """π(t) = μ(t) · ratio of token t, with one parameter a token id."""

    def __init__(self, ratio: dict[int, float]) -> None:
        super().__init__()
        self.log_ratio = nn.Parameter(torch.tensor([ratio.get(t, 1.0) for t in range(9)], dtype=torch.float64).log())
        self.mu = torch.tensor([0, 0, -1, -2, 0, -1, -1, -2, -1], dtype=torch.float64)

    def tree_log_probs(
        self, tokens: Tensor, parent: Tensor, depth: Tensor, subtree_end: Tensor, targets: Tensor, *, temperature: float
    ) -> Tensor:
        """See ``torchrl_ext.losses.TreeActor``."""
        return (self.mu + self.log_ratio)[tokens[targets]]


def batch() -> TensorDictBase:
    rollouts = [
        tree_td(FORK, reward=1.0, query="q"),
        tree_td(CHAIN, reward=0.0, query="q"),
        tree_td(CHAIN, reward=None, query="q", status=Status.SANDBOX_ERROR),
    ]
    return to_training_batch(TreeGroupAdvantage(eps=0.0).inv(lazy_stack(rollouts)))


def test_forest_of_two_rollouts() -> None:
    td = batch()
    assert td["token"].tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 8]
    assert td["tree", "parent"].tolist() == [-1, 0, 1, 2, 3, 4, 4, 6, 1]
    assert td["tree", "depth"].tolist() == [0, 1, 2, 3, 4, 5, 5, 6, 2]
    assert td["tree", "subtree_end"].tolist() == [9, 9, 8, 8, 8, 6, 8, 8, 9]
    assert td["tree", "rollout"].tolist() == [-1, -1, 0, 0, 0, 0, 0, 0, 1]
    assert td["tree", "n_leaves"].tolist() == [3, 3, 2, 2, 2, 1, 1, 1, 1]
    assert td["tree", "rollout_leaves"].tolist() == [0, 0, 2, 2, 2, 2, 2, 2, 1]
    assert td["masks", "all_assistant_mask"].tolist() == [False, False, True, True, False, True, True, True, True]
    assert td["advantage"].tolist() == [0, 0, 1, 1, 1, 1, 1, 1, -1]
    np.testing.assert_array_equal(td["token_log_prob"], [math.nan] * 2 + [-1, -2, math.nan, -1, -1, -2, -1])
    assert td["batch", "n_rollouts"].tolist() == [2] * 9
    assert td["batch", "n_tokens"].tolist() == [6] * 9


def test_losses_by_hand() -> None:
    # A = (1, -1); ρ: token 2 -> 1.5 (clipped at 1.2), 5 -> 0.5, 8 -> 0.5 (clipped at 0.8); others 1.
    actor = RatioActor({2: 1.5, 5: 0.5, 8: 0.5})
    objective = {2: 1.2, 3: 1.0, 5: 0.5, 6: 1.0, 7: 1.0, 8: -0.8}
    fork = {t: objective[t] for t in (2, 3, 5, 6, 7)}
    n = {2: 2, 3: 2, 5: 1, 6: 1, 7: 1}
    expected = {
        "once": (sum(fork.values()) / 5 - 0.8) / 2,
        "leaf_fraction": (sum(fork[t] * n[t] / 2 for t in fork) / 5 - 0.8) / 2,
        "per_leaf": (sum(fork[t] * n[t] for t in fork) / 5 - 0.8) / 2,
        "sqrt": (sum(fork[t] / math.sqrt(n[t]) for t in fork) / 5 - 0.8) / 2,
    }
    for mode, value in expected.items():
        out = TreeGRPOLoss(actor, node_weight=mode)(batch())  # type: ignore[arg-type]
        assert_close(out.loss_objective.item(), -value, rtol=0, atol=1e-12)
    out = TreeGRPOLoss(actor, normalisation="token_mean")(batch())
    assert_close(out.loss_objective.item(), -sum(objective.values()) / 6, rtol=0, atol=1e-12)
    assert_close(out.clip_fraction.item(), 2 / 6, rtol=0, atol=1e-12)
    assert_close(out.kl_approx.item(), -(math.log(1.5) + 2 * math.log(0.5)) / 6, rtol=0, atol=1e-12)
    assert out.tis_clipped.item() == 0.0


def test_gradient_by_hand() -> None:
    actor = RatioActor({2: 1.5, 5: 0.5, 8: 0.5})
    TreeGRPOLoss(actor)(batch()).loss_objective.backward()
    tenth = 1 / (2 * 5)  # 1/G · 1/N₀; tokens 2 and 8 are clipped
    expected = [0, 0, 0, -tenth, 0, -0.5 * tenth, -tenth, -tenth, 0]
    assert_close(actor.log_ratio.grad, torch.tensor(expected, dtype=torch.float64), rtol=0, atol=1e-12)


def test_recomputed_old_policy_multiplies_the_truncated_weight() -> None:
    actor = RatioActor({2: 1.5, 5: 0.5, 8: 0.5})
    td = batch()
    td["old_log_prob"] = TreeGRPOLoss(actor).log_prob(td).detach()  # ρ = 1, w = π_old/μ = 1.5, 0.5, 0.5
    out = TreeGRPOLoss(actor, tis_cap=1.25)(td)
    expected = ((1.25 + 1 + 0.5 + 1 + 1) / 5 - 0.5) / 2
    assert_close(out.loss_objective.item(), -expected, rtol=0, atol=1e-12)
    assert_close(out.tis_clipped.item(), 1 / 6, rtol=0, atol=1e-12)
    assert_close(out.log_prob_gap_max.item(), math.log(2), rtol=0, atol=1e-12)
    assert_close(out.log_prob_gap_mean.item(), (math.log(1.5) + 2 * math.log(2)) / 6, rtol=0, atol=1e-12)
    uncorrected = TreeGRPOLoss(actor, tis_cap=None)(td)
    assert_close(uncorrected.loss_objective.item(), 0.0, rtol=0, atol=1e-12)


def test_reference_kl_by_hand() -> None:
    actor = RatioActor({})
    td = batch()
    td["ref_log_prob"] = actor.mu[td["token"]] + math.log(2)
    out = TreeGRPOLoss(actor, kl_to_ref_coeff=0.1)(td)
    k3 = 2 - math.log(2) - 1
    assert_close(out.kl_to_ref.item(), k3, rtol=0, atol=1e-12)
    assert_close(out.loss_kl_to_ref.item(), 0.1 * k3, rtol=0, atol=1e-12)


def test_sft_by_hand() -> None:
    out = TreeSFTLoss(RatioActor({}))(batch())
    assert_close(out.loss_sft.item(), ((1 + 2 + 1 + 1 + 2) / 5 + 1) / 2, rtol=0, atol=1e-12)
