"""Distances between distributions, from log-probabilities of sampled tokens; all natural logarithms.

Sources: J. Schulman, *Approximating KL Divergence* (2020); *On a few pitfalls in KL divergence gradient estimation for
RL*, arXiv:2506.09477; DeepSeek-V3.2, arXiv:2512.02556.

Shape suffix: ``M`` trainable token-nodes.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from torch import Tensor

KLEstimator = Literal["k1", "k2", "k3", "k3_unbiased"]

LOG_RATIO_BOUND = 20.0
"""Log-ratios are clamped to ± this before exponentiation: e²⁰ ≈ 5e8 stays finite in every float format."""


class LogProbGap(NamedTuple):
    """How far the trainer's log-probs lie from the sampler's; all scalars.

    Attributes:
        mean_abs: mean |log π_old − log μ|.
        max_abs: max |log π_old − log μ|.
        k3: mean(w − log w − 1) with w = π_old/μ, an unbiased estimate of KL(μ ‖ π_old) on tokens drawn from μ.
    """

    mean_abs: Tensor
    max_abs: Tensor
    k3: Tensor


def kl_k3(log_prob_M: Tensor, ref_log_prob_M: Tensor) -> Tensor:
    """Schulman's K3 estimate of KL(π ‖ π_ref) a token: ``r − log r − 1`` with ``r = π_ref/π``; the KL_t of Eq 6.

    Args:
        log_prob_M: [M], carries the gradient.
        ref_log_prob_M: [M].

    Returns:
        [M], never negative.
    """
    gap_M = (ref_log_prob_M - log_prob_M).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    return gap_M.expm1() - gap_M


def kl_estimate(
    log_prob_M: Tensor, ref_log_prob_M: Tensor, kind: KLEstimator = "k3", *, sample_log_prob_M: Tensor | None = None
) -> Tensor:
    """An estimate of KL(π ‖ π_ref) a token, as a penalty whose gradient is followed; d = log π − log π_ref.

    The *value* of each is right for tokens drawn from π (k2: nearly). The *gradient*, which is all that a penalty in
    the loss has, is another matter (arXiv:2506.09477):

    | kind | value | expected gradient on tokens drawn from π |
    |---|---|---|
    | ``k1`` | d | 0: it penalises nothing; k1 belongs in the reward |
    | ``k2`` | d²/2 | that of KL(π ‖ π_ref) |
    | ``k3`` | e⁻ᵈ − 1 + d | that of KL(π_ref ‖ π): near the reference the same. Eq 6 of arXiv:2608.16798 |
    | ``k3_unbiased`` | (π/π_s)(e⁻ᵈ − 1 + d) | that of KL(π ‖ π_ref), whatever π_s drew the token (arXiv:2512.02556) |

    Args:
        log_prob_M: [M], carries the gradient.
        ref_log_prob_M: [M].
        kind: One of the table.
        sample_log_prob_M: [M], log π_s of the policy that drew the tokens; ``k3_unbiased`` requires it.

    Returns:
        [M]; ``k2`` and the k3s are never negative.

    Raises:
        ValueError: unknown kind, or ``k3_unbiased`` without ``sample_log_prob_M``.
    """
    if kind == "k3":
        return kl_k3(log_prob_M, ref_log_prob_M)
    if kind == "k3_unbiased":
        if sample_log_prob_M is None:
            raise ValueError("k3_unbiased needs the log-probs of the policy that drew the tokens")
        ratio_M = (log_prob_M - sample_log_prob_M).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()
        return ratio_M * kl_k3(log_prob_M, ref_log_prob_M)
    if kind == "k2":
        return 0.5 * (log_prob_M - ref_log_prob_M).square()
    if kind == "k1":
        return log_prob_M - ref_log_prob_M
    raise ValueError(f"kl estimator must be 'k1', 'k2', 'k3' or 'k3_unbiased', got {kind!r}")


def entropy(logits: Tensor) -> Tensor:
    """``−Σ_v p_v log p_v`` over the last dimension, with gradient; [..., V] -> [...]."""
    log_p = logits.log_softmax(-1)
    return -(log_p.exp() * log_p).sum(-1)


def log_prob_gap(log_prob_old_M: Tensor, log_prob_mu_M: Tensor) -> LogProbGap:
    """Trainer-sampler consistency, reported each step; detached.

    Args:
        log_prob_old_M: [M], M >= 1.
        log_prob_mu_M: [M].
    """
    gap_M = (log_prob_old_M - log_prob_mu_M).detach()
    return LogProbGap(gap_M.abs().mean(), gap_M.abs().max(), kl_k3(log_prob_mu_M, log_prob_old_M).detach().mean())


def effective_sample_size(log_weight_M: Tensor) -> Tensor:
    """``(Σw)² / (M Σw²)`` in (0, 1], of detached log-weights [M], M >= 1: 1 when all weights are equal."""
    lw_M = log_weight_M.detach()
    return (2 * lw_M.logsumexp(0) - (2 * lw_M).logsumexp(0)).exp() / lw_M.numel()
