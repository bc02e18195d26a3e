"""Golden values and edges of the tree-GRPO mathematics."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from torchrl_ext import functional as F

NAN = math.nan


def f64(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values)


def flags(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.bool)


class TestGroupAdvantage:
    reward = f64(1.0, 0.0, 0.0, NAN, 0.5, 0.5, 0.9)
    group = ints(4, 4, 4, 4, 7, 7, 2)
    valid = flags(1, 1, 1, 0, 1, 1, 1)

    def advantage(self, **options: object) -> torch.Tensor:
        return F.group_advantage(self.reward, self.group, valid_R=self.valid, **options).advantage_R  # type: ignore[arg-type]

    def test_z_score_with_population_std(self) -> None:
        std = math.sqrt(2) / 3  # of 1, 0, 0
        expected = f64((2 / 3) / (std + 1e-6), (-1 / 3) / (std + 1e-6), (-1 / 3) / (std + 1e-6), 0, 0, 0, 0)
        assert_close(self.advantage(), expected, rtol=0, atol=1e-14)

    def test_leave_one_out(self) -> None:
        assert_close(
            self.advantage(scale="none", baseline="leave_one_out"), f64(1, -0.5, -0.5, 0, 0, 0, 0), rtol=0, atol=1e-15
        )

    def test_no_scale(self) -> None:
        assert_close(self.advantage(scale="none"), f64(2 / 3, -1 / 3, -1 / 3, 0, 0, 0, 0), rtol=0, atol=1e-15)

    def test_variance_mask(self) -> None:
        found = F.group_advantage(self.reward, self.group, valid_R=self.valid)
        assert found.has_variance_R.tolist() == [True, True, True, False, False, False, False]

    def test_equal_rewards_give_exactly_zero(self) -> None:
        reward = torch.full((3,), 0.1)
        found = F.group_advantage(reward, ints(0, 0, 0), valid_R=flags(1, 1, 1), eps=0.0)
        assert found.advantage_R.tolist() == [0.0, 0.0, 0.0]

    def test_excluded_is_not_zero_reward(self) -> None:
        with_zero = F.group_advantage(f64(1, 1, 0), ints(0, 0, 0), valid_R=flags(1, 1, 1)).advantage_R
        without = F.group_advantage(f64(1, 1, NAN), ints(0, 0, 0), valid_R=flags(1, 1, 0)).advantage_R
        assert with_zero[0] > 0
        assert without.tolist() == [0.0, 0.0, 0.0]

    def test_errors(self) -> None:
        with pytest.raises(ValueError, match="finite"):
            F.group_advantage(f64(1, NAN), ints(0, 0), valid_R=flags(1, 1))
        with pytest.raises(ValueError, match="shapes"):
            F.group_advantage(f64(1, 2), ints(0), valid_R=flags(1, 1))
        with pytest.raises(ValueError, match="scale"):
            self.advantage(scale="max")
        with pytest.raises(ValueError, match="baseline"):
            self.advantage(baseline="median")


class TestObjective:
    def test_four_quadrants(self) -> None:
        log_prob = f64(1.5, 1.5, 0.5, 0.5, 1.1).log().requires_grad_()
        advantage = f64(2, -2, 2, -2, 2)
        found = F.grpo_objective(log_prob, torch.zeros(5, dtype=torch.float64), advantage, 0.2, 0.28)
        assert_close(found.objective_M.detach(), f64(2 * 1.28, -3, 1, -2 * 0.8, 2.2), rtol=0, atol=1e-14)
        assert found.clipped_M.tolist() == [True, False, False, True, False]
        (gradient,) = torch.autograd.grad(found.objective_M.sum(), log_prob)
        assert_close(gradient, f64(0, -3, 1, 0, 2.2), rtol=0, atol=1e-14)  # ρA where not clipped

    def test_huge_ratio_stays_finite(self) -> None:
        log_prob = torch.tensor([0.0, 0.0], requires_grad=True)
        found = F.grpo_objective(log_prob, torch.tensor([-500.0, 500.0]), torch.tensor([0.0, -1.0]), 0.2, 0.2)
        found.objective_M.sum().backward()
        assert log_prob.grad is not None and torch.isfinite(log_prob.grad).all()


class TestTis:
    def test_truncates_above_only_and_is_detached(self) -> None:
        old = f64(0.5, 4.0, 1.0).log().requires_grad_()
        weight = F.token_tis(old, torch.zeros(3, dtype=torch.float64), cap=2.0)
        assert_close(weight, f64(0.5, 2.0, 1.0), rtol=0, atol=1e-15)
        assert not weight.requires_grad

    def test_log_ratio_is_bounded(self) -> None:
        weight = F.token_tis(torch.tensor([-1e4]), torch.tensor([0.0]), cap=2.0)
        assert_close(weight, torch.tensor([math.exp(-20)]))


def test_node_weights() -> None:
    n, k = ints(1, 2, 4), ints(4, 4, 4)
    for mode, expected in {
        "once": (1, 1, 1),
        "leaf_fraction": (0.25, 0.5, 1),
        "per_leaf": (1, 2, 4),
        "sqrt": (1, 1 / math.sqrt(2), 0.5),
    }.items():
        assert_close(F.node_weight(n, k, mode, dtype=torch.float64), f64(*expected), rtol=0, atol=1e-15)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="node_weight"):
        F.node_weight(n, k, "mean")  # type: ignore[arg-type]


def normalised(values: Tensor, weight: Tensor, *where: Any, **options: Any) -> Tensor:
    """What the losses sum: each value times its token's share."""
    return (values * F.token_share(weight, *where, **options)).sum()


class TestTokenShare:
    values, weight, rollout = f64(1, 2, 3, 10), f64(1, 1, 2, 1), ints(0, 0, 0, 2)

    def test_rollout_mean_counts_empty_rollouts(self) -> None:
        found = normalised(self.values, self.weight, self.rollout, 3)
        assert_close(found, f64(((1 + 2 + 6) / 3 + 0 + 10) / 3)[0], rtol=0, atol=1e-15)

    def test_token_mean(self) -> None:
        found = normalised(self.values, self.weight, self.rollout, 3, "token_mean")
        assert_close(found, f64((1 + 2 + 6 + 10) / 4)[0], rtol=0, atol=1e-15)

    def test_constant(self) -> None:
        found = normalised(self.values, self.weight, self.rollout, 3, "constant", constant=5)
        assert_close(found, f64((1 + 2 + 6 + 10) / 15)[0], rtol=0, atol=1e-15)

    def test_no_tokens(self) -> None:
        nothing = torch.zeros(0)
        assert normalised(nothing, nothing, nothing.long(), 2).item() == 0.0

    def test_errors(self) -> None:
        args = (self.values, self.weight, self.rollout, 3)
        with pytest.raises(ValueError, match="constant"):
            normalised(*args, "constant")
        with pytest.raises(ValueError, match="constant"):
            normalised(*args, constant=2.0)
        with pytest.raises(ValueError, match="normalisation"):
            normalised(*args, "mean")  # type: ignore[arg-type]


def test_k3_and_gap() -> None:
    log_prob, ref = f64(0.5, 0.25).log(), f64(0.25, 0.25).log()
    assert_close(F.kl_k3(log_prob, ref), f64(0.5 - math.log(0.5) - 1, 0), rtol=0, atol=1e-15)
    gap = F.log_prob_gap(ref, log_prob)  # w = π_old/μ = 0.5 and 1
    assert_close(gap.mean_abs, f64(math.log(2) / 2)[0])
    assert_close(gap.max_abs, f64(math.log(2))[0])
    assert_close(gap.k3, f64((0.5 - math.log(0.5) - 1) / 2)[0])


def test_k3_estimates_the_divergence() -> None:
    p, q = f64(0.7, 0.2, 0.1), f64(0.5, 0.25, 0.25)
    exact = (p * (p.log() - q.log())).sum()
    assert_close((p * F.kl_k3(p.log(), q.log())).sum(), exact, rtol=0, atol=1e-15)


def test_effective_sample_size() -> None:
    assert_close(F.effective_sample_size(f64(-3, -3, -3)), f64(1)[0])
    assert_close(F.effective_sample_size(f64(1, 3).log()), f64(16 / (2 * 10))[0])
