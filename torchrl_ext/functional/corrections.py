"""Corrections for tokens that another distribution drew than the trainer computes.

w_t = π_old(t)/μ(t), with μ the distribution that sampled the token and π_old the trainer's own recomputation: kernels,
precisions, routing and stale weights differ. None of this carries a gradient. Where π_old *is* μ (bypass) there is
nothing to correct: the ratio π/μ of the objective does it.

Sources: *ClawGym II*, arXiv:2608.16798 (Eq 10); TIS: F. Yao et al., *Your Efficient RL Framework Secretly Brings You
Off-Policy RL Training* (2025); masked and sequence-level weights: J. Liu et al., *When Speed Kills Stability* (2025);
IcePop: Ring-1T, arXiv:2510.18855.

Shape suffix: ``M`` trainable token-nodes. The *sequence* of a tree is its rollout's unique trainable nodes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from torchrl_ext.functional.divergence import LOG_RATIO_BOUND, kl_k3
from torchrl_ext.functional.objectives import mean_of_rollout

CorrectionKind = Literal["token_tis", "sequence_tis", "token_mis", "sequence_mis", "geometric", "k3", "icepop"]


@dataclass(frozen=True, slots=True)
class Correction:
    """Which weight multiplies a token's loss, and its bounds.

    | kind | weight | typical bounds |
    |---|---|---|
    | ``token_tis`` | min(w_t, high) | high 1.5 to 5 |
    | ``sequence_tis`` | min(Π w, high) | high 2 to 10 |
    | ``token_mis`` | w_t where low <= w_t <= high, else 0 | high 2 |
    | ``sequence_mis`` | Π w where low <= Π w <= high, else 0 | high 2 |
    | ``geometric`` | 1 where low <= (Π w)^(1/N) <= high, else 0 | 0.999, 1.001 |
    | ``k3`` | 1 where mean(w − log w − 1) <= high, else 0 | high 0.001 to 0.01 |
    | ``icepop`` | w_t where low <= w_t <= high, else 0 | 0.5, 5 |

    Products over a sequence reject, or let vanish, long rollouts. A rejected token keeps its place in the denominators.

    Attributes:
        kind: One of the table.
        high: Upper bound, positive; may be infinite (decoupled PPO: ``token_tis`` without a bound).
        low: Lower bound; not used by ``token_tis``, ``sequence_tis`` and ``k3``.
    """

    kind: CorrectionKind = "token_tis"
    high: float = 2.0
    low: float = 0.0

    def __post_init__(self) -> None:
        if self.kind not in get_args(CorrectionKind):
            raise ValueError(f"correction must be one of {', '.join(get_args(CorrectionKind))}, got {self.kind!r}")
        if not 0 <= self.low < self.high:
            raise ValueError(f"a correction's bounds must have 0 <= low < high, got {self.low} and {self.high}")
        if self.low and self.kind in ("token_tis", "sequence_tis", "k3"):
            raise ValueError(f"{self.kind} has no lower bound, got {self.low}")


class CorrectionWeight(NamedTuple):
    """Detached weights.

    Attributes:
        weight_M: [M] >= 0.
        altered_M: [M] bool, truncated or rejected.
    """

    weight_M: Tensor
    altered_M: Tensor


def token_tis(log_prob_old_M: Tensor, log_prob_mu_M: Tensor, cap: float) -> Tensor:
    """Token-level truncated importance weight between trainer and sampler (Eq 10, arXiv:2608.16798).

    ``w_t = min(exp(clamp(log π_old − log μ, ±20)), c)``, detached. It multiplies the token's objective. Do not use it
    when π_old *is* μ (bypass): the ratio ρ already corrects for μ.

    Args:
        log_prob_old_M: [M].
        log_prob_mu_M: [M].
        cap: c > 0; 1.5 to 5 in the literature.

    Returns:
        [M], in (0, c].
    """
    gap_M = (log_prob_old_M - log_prob_mu_M).detach().clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    return gap_M.exp().clamp_max(cap)


def correction_weight(
    log_prob_old_M: Tensor, log_prob_mu_M: Tensor, rollout_M: Tensor, correction: Correction
) -> CorrectionWeight:
    """The weights of a correction; log-ratios, a token's and a sequence's, are clamped to ±20.

    Args:
        log_prob_old_M: [M].
        log_prob_mu_M: [M].
        rollout_M: [M] int64 >= 0; whole rollouts, where the kind looks at sequences.
        correction: Kind and bounds.
    """
    kind, low, high = correction.kind, correction.low, correction.high
    gap_M = (log_prob_old_M - log_prob_mu_M).detach()
    if kind == "token_tis":
        weight_M = token_tis(log_prob_old_M, log_prob_mu_M, high)
        return CorrectionWeight(weight_M, _exp(gap_M) >= high)
    if kind == "k3":
        far_M = mean_of_rollout(kl_k3(log_prob_mu_M, log_prob_old_M).detach(), rollout_M) > high
        return CorrectionWeight((~far_M).to(gap_M.dtype), far_M)
    if kind == "geometric":
        mean_M = _exp(mean_of_rollout(gap_M, rollout_M))
        far_M = (mean_M < low) | (mean_M > high)
        return CorrectionWeight((~far_M).to(gap_M.dtype), far_M)
    if kind in ("sequence_tis", "sequence_mis"):
        size = int(rollout_M.max()) + 1 if rollout_M.numel() else 0
        gap_M = gap_M.new_zeros(size).index_add(0, rollout_M, gap_M)[rollout_M]
    weight_M = _exp(gap_M)
    if kind == "sequence_tis":
        return CorrectionWeight(weight_M.clamp_max(high), weight_M >= high)
    far_M = (weight_M < low) | (weight_M > high)
    return CorrectionWeight(torch.where(far_M, torch.zeros_like(weight_M), weight_M), far_M)


def _exp(log_weight_M: Tensor) -> Tensor:
    return log_weight_M.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()
