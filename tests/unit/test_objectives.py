"""Golden values and exact expectations of objectives, corrections, divergences and whitening."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from torchrl_ext import functional as F


def f64(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def equal(a: Tensor, *values: float) -> None:
    assert_close(a.detach().reshape(-1), f64(*values), rtol=0, atol=1e-12)


ROLLOUT = torch.tensor([0, 0, 1])
RATIO = (1.5, 0.5, 4.0)


def objective(advantage: Tensor, kind: str, **options: Any) -> tuple[F.PolicyObjective, Tensor]:
    """The objective at ratios 1.5 and 0.5 (rollout 0) and 4 (rollout 1), and its gradient by log π."""
    log_prob = f64(*RATIO).log().requires_grad_()
    found = F.policy_objective(log_prob, torch.zeros_like(log_prob), advantage, kind, rollout_M=ROLLOUT, **options)  # type: ignore[arg-type]
    return found, torch.autograd.grad(found.objective_M.sum(), log_prob)[0]


class TestObjectives:
    def test_dual_clip_bounds_what_a_likely_token_loses(self) -> None:
        found, gradient = objective(f64(-1, -1, -1), "ppo", dual_clip=3.0)
        equal(found.objective_M, -1.5, -0.8, -3)
        equal(gradient, -1.5, 0, 0)
        assert found.clipped_M.tolist() == [False, True, True]
        equal(objective(f64(-1, -1, -1), "ppo")[0].objective_M, -1.5, -0.8, -4)
        equal(objective(f64(1, 1, 1), "ppo", dual_clip=3.0)[0].objective_M, 1.2, 0.5, 1.2)

    def test_gspo_takes_the_ratio_of_the_sequence_and_the_gradient_of_the_token(self) -> None:
        found, gradient = objective(f64(2, -1, 1), "gspo", clip_low=0.5, clip_high=0.5)
        s = math.sqrt(1.5 * 0.5)  # of rollout 0; rollout 1 is at 4, clipped
        equal(found.objective_M, 2 * s, -s, 1.5)
        equal(gradient, 2 * s, -s, 0)
        assert found.clipped_M.tolist() == [False, False, True]

    def test_gspo_gradient_is_that_of_the_sequence_objective(self) -> None:
        log_prob = f64(*RATIO).log().requires_grad_()
        share = F.token_share(torch.ones(3, dtype=torch.float64), ROLLOUT, 2)
        old, wide = torch.zeros(3, dtype=torch.float64), {"clip_low": 1.0, "clip_high": 9.0}
        token = F.policy_objective(log_prob, old, f64(2, 2, -1), "gspo", **wide, rollout_M=ROLLOUT)  # type: ignore[arg-type]
        sequence = (2 * log_prob[:2].mean().exp() - log_prob[2].exp()) / 2
        assert_close((token.objective_M * share).sum(), sequence)
        assert_close(*(torch.autograd.grad(x, log_prob)[0] for x in ((token.objective_M * share).sum(), sequence)))

    def test_cispo_clips_the_weight_and_keeps_the_gradient(self) -> None:
        found, gradient = objective(f64(2, 2, -1), "cispo", clip_low=0.2, clip_high=0.28)
        equal(found.objective_M, 2 * 1.28 * math.log(1.5), 2 * 0.8 * math.log(0.5), -1.28 * math.log(4))
        equal(gradient, 2.56, 1.6, -1.28)
        assert found.clipped_M.tolist() == [True, True, True]
        unbounded, _ = objective(f64(2, 2, -1), "cispo", clip_low=1, clip_high=0.28)
        equal(unbounded.objective_M[1], 2 * 0.5 * math.log(0.5))

    def test_two_advantages(self) -> None:
        split = F.BranchAdvantage(f64(1, 0, 2), f64(-3, -1, 0))
        found, gradient = objective(split, "ppo", dual_clip=2.0)  # type: ignore[arg-type]
        equal(found.objective_M, 1.2 - 4.5, -0.8, 2.4)
        equal(gradient, -4.5, 0, 0)
        assert found.clipped_M.tolist() == [False, True, True]  # the first still moves for its worse branches

    def test_refusals(self) -> None:
        x = f64(1, 1, 1)
        for options in ({"kind": "reinforce"}, {"kind": "gspo"}):
            with pytest.raises(ValueError, match="objective must be"):
                F.policy_objective(x, x, x, **options)  # type: ignore[arg-type]
        for kind, c in (("cispo", 3.0), ("ppo", 1.0)):
            with pytest.raises(ValueError, match="dual_clip"):
                F.policy_objective(x, x, x, kind, dual_clip=c, rollout_M=ROLLOUT)  # type: ignore[arg-type]


class TestCorrections:
    """w = 1.5, 0.5 in rollout 0 (product 0.75) and 4 in rollout 1."""

    @pytest.mark.parametrize(
        ("kind", "low", "high", "weight", "altered"),
        [
            ("token_tis", 0, 2, (1.5, 0.5, 2), (0, 0, 1)),
            ("token_tis", 0, math.inf, (1.5, 0.5, 4), (0, 0, 0)),
            ("sequence_tis", 0, 2, (0.75, 0.75, 2), (0, 0, 1)),
            ("token_mis", 0, 2, (1.5, 0.5, 0), (0, 0, 1)),
            ("sequence_mis", 0, 2, (0.75, 0.75, 0), (0, 0, 1)),
            ("sequence_mis", 0.8, 5, (0, 0, 4), (1, 1, 0)),
            ("icepop", 0.6, 5, (1.5, 0, 4), (0, 1, 0)),
            ("geometric", 0.8, 1.25, (1, 1, 0), (0, 0, 1)),
            ("geometric", 0.9, 5, (0, 0, 1), (1, 1, 0)),
            ("k3", 0, 0.2, (1, 1, 0), (0, 0, 1)),
            ("k3", 0, 0.17, (1, 1, 0), (0, 0, 1)),  # of μ to π_old; the other way round it is 0.19
            ("k3", 0, 0.1, (0, 0, 0), (1, 1, 1)),
        ],
    )
    def test_weights(
        self, kind: Any, low: float, high: float, weight: tuple[float, ...], altered: tuple[int, ...]
    ) -> None:
        old = f64(*RATIO).log().requires_grad_()
        found = F.correction_weight(old, torch.zeros_like(old), ROLLOUT, F.Correction(kind, high=high, low=low))
        equal(found.weight_M, *weight)
        assert found.altered_M.tolist() == [bool(a) for a in altered]
        assert not found.weight_M.requires_grad

    def test_k3_of_the_first_rollout(self) -> None:
        """mean(w − log w − 1) = (1.5 + 0.5 − log 0.75)/2 − 1 = 0.144: between the two bounds above."""
        assert 0.1 < (1.5 + 0.5 - math.log(0.75)) / 2 - 1 < 0.2

    @pytest.mark.parametrize("kind", ["token_tis", "sequence_tis", "token_mis", "sequence_mis", "icepop"])
    def test_far_tokens_stay_finite(self, kind: Any) -> None:
        old = torch.tensor([900.0, -900.0, 0.0])
        found = F.correction_weight(old, torch.zeros(3), torch.arange(3), F.Correction(kind, high=1e30))
        assert torch.isfinite(found.weight_M).all()
        assert_close(found.weight_M, torch.tensor([math.exp(20), math.exp(-20), 1.0]))

    def test_weights_are_one_without_a_gap(self) -> None:
        lp = torch.randn(3, dtype=torch.float64)
        for kind in ("token_tis", "sequence_tis", "token_mis", "sequence_mis", "icepop", "geometric", "k3"):
            found = F.correction_weight(lp, lp.clone(), ROLLOUT, F.Correction(kind, high=1.001))  # type: ignore[arg-type]
            equal(found.weight_M, 1, 1, 1)
            assert not found.altered_M.any()

    def test_refusals(self) -> None:
        for options in ({"kind": "tis"}, {"high": 0.0}, {"kind": "icepop", "low": 6.0, "high": 5.0}, {"low": 0.5}):
            with pytest.raises(ValueError, match=r"bound|correction must be"):
                F.Correction(**options)


class TestKL:
    """Exact expectations over a categorical policy π_θ with a softmax of three logits."""

    logits = f64(0.3, -0.2, 1.1)
    reference = f64(0.85, 0.1, 0.05).log()

    def expected_gradient(self, kind: Any, sample: Tensor) -> Tensor:
        """E_{v ~ sample} ∇ estimate(v)."""
        logits = self.logits.clone().requires_grad_()
        log_prob = logits.log_softmax(-1)
        estimate = F.kl_estimate(log_prob, self.reference, kind, sample_log_prob_M=sample.log())
        return torch.autograd.grad((sample * estimate).sum(), logits)[0]

    def divergence_gradient(self, *, forward: bool) -> Tensor:
        logits = self.logits.clone().requires_grad_()
        log_prob, ref = logits.log_softmax(-1), self.reference
        kl = (ref.exp() * (ref - log_prob)).sum() if forward else (log_prob.exp() * (log_prob - ref)).sum()
        return torch.autograd.grad(kl, logits)[0]

    def test_values(self) -> None:
        p, q = f64(0.5, 0.2).log(), f64(0.25, 0.4).log()
        d = (math.log(2), -math.log(2))
        equal(F.kl_estimate(p, q, "k1"), *d)
        equal(F.kl_estimate(p, q, "k2"), *[x * x / 2 for x in d])
        equal(F.kl_estimate(p, q, "k3"), *[math.exp(-x) - 1 + x for x in d])
        equal(F.kl_estimate(p, q, "k3_unbiased", sample_log_prob_M=p), *[math.exp(-x) - 1 + x for x in d])

    def test_k1_and_k3_are_unbiased_values(self) -> None:
        p = self.logits.log_softmax(-1)
        exact = (p.exp() * (p - self.reference)).sum()
        for kind in ("k1", "k3"):
            assert_close((p.exp() * F.kl_estimate(p, self.reference, kind)).sum(), exact)  # type: ignore[arg-type]

    def test_gradients_are_what_the_table_says(self) -> None:
        own, other = self.logits.softmax(-1), f64(0.2, 0.5, 0.3)
        reverse, forward = self.divergence_gradient(forward=False), self.divergence_gradient(forward=True)
        assert float((reverse - forward).norm()) > 0.1
        equal(self.expected_gradient("k1", own), 0, 0, 0)
        assert_close(self.expected_gradient("k2", own), reverse)
        assert_close(self.expected_gradient("k3", own), forward)
        assert_close(self.expected_gradient("k3_unbiased", own), reverse)
        assert_close(self.expected_gradient("k3_unbiased", other), reverse)

    def test_refusals(self) -> None:
        x = f64(0)
        with pytest.raises(ValueError, match="estimator"):
            F.kl_estimate(x, x, "k4")  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="k3_unbiased"):
            F.kl_estimate(x, x, "k3_unbiased")


def test_entropy() -> None:
    equal(F.entropy(f64(0, 0, 0, 0)), math.log(4))
    p = f64(0.5, 0.25, 0.25)
    equal(F.entropy(p.log() + 3), 1.5 * math.log(2))


class TestWhitening:
    def test_by_hand(self) -> None:
        equal(F.whiten(f64(1, 1, 4), torch.ones(3), eps=0.0), -1 / math.sqrt(2), -1 / math.sqrt(2), math.sqrt(2))
        mean, std = F.moments(f64(0, 4), f64(3, 1))
        assert (mean.item(), std.item()) == (1.0, pytest.approx(math.sqrt(3)))

    def test_a_weight_is_a_number_of_copies(self) -> None:
        x, copies = torch.randn(6, dtype=torch.float64), torch.tensor([1, 2, 3, 1, 1, 4])
        weighed = F.whiten(x, copies.double())
        assert_close(weighed.repeat_interleave(copies), F.whiten(x.repeat_interleave(copies), torch.ones(12)))

    def test_equal_values_give_zero(self) -> None:
        equal(F.whiten(f64(2, 2), torch.ones(2)), 0, 0)


class TestCritic:
    def test_plain_and_clipped(self) -> None:
        value = f64(0.9, 0.1, -0.5).requires_grad_()
        plain, clipped = F.value_loss(value, f64(1, 1, 0))
        equal(plain, 0.01, 0.81, 0.25)
        assert not clipped.any()
        held, clipped = F.value_loss(value, f64(1, 1, 0), old_value_M=f64(0, 0, 0), clip=0.2)
        equal(held, 0.64, 0.81, 0.25)  # the third has moved away from its target: it keeps its gradient
        assert clipped.tolist() == [True, False, True]
        (gradient,) = torch.autograd.grad(held.sum(), value)
        equal(gradient, 0, -1.8, -1)
        with pytest.raises(ValueError, match="before the first update"):
            F.value_loss(value, value, clip=0.2)

    def test_explained_variance(self) -> None:
        target, ones = f64(0, 1, 2), torch.ones(3)
        assert F.explained_variance(target + 5, target, ones).item() == pytest.approx(1)
        assert F.explained_variance(torch.zeros(3), target, ones).item() == pytest.approx(0)
        assert F.explained_variance(-target, target, ones).item() == pytest.approx(-3)
        assert F.explained_variance(target, torch.ones(3), ones).item() == 0
        weighed = F.explained_variance(f64(0, 0, 0), f64(0, 1, 9), f64(1, 1, 0))
        assert weighed.item() == pytest.approx(0)


def test_prompt_mean() -> None:
    weight, rollout, prompt = f64(1, 1, 2, 1), torch.tensor([0, 0, 1, 2]), torch.tensor([0, 0, 0, 5])
    share = F.token_share(weight, rollout, 3, "prompt_mean", prompt_M=prompt)
    equal(share, 1 / 6, 1 / 6, 2 / 6, 1 / 2)
    equal(F.token_share(weight, rollout, 3, "prompt_mean", prompt_M=prompt, n_prompts=4), 1 / 12, 1 / 12, 2 / 12, 1 / 4)
    with pytest.raises(ValueError, match="prompt_mean"):
        F.token_share(weight, rollout, 3, "prompt_mean")
