"""The mathematics of tree GRPO: plain tensors in, plain tensors out.

Invariant: every function is vectorised, has no side effect, and keeps the dtype it is given (float64 in, float64 out).
Names of the sources: *ClawGym II*, arXiv:2608.16798 (Eq 6, 7, 10); GRPO, arXiv:2402.03300; Dr.GRPO, arXiv:2503.20783;
DAPO, arXiv:2503.14476; RLOO, arXiv:2402.14740.

Shape suffixes: ``R`` rollouts, ``M`` trainable token-nodes (each unique token of a rollout's tree once), ``L`` leaves.
Log-probabilities are natural logarithms: ``mu`` is the distribution that sampled the token, ``old`` the trainer's own
recomputation before the first update, no suffix the policy being trained.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

Scale = Literal["std", "none"]
Baseline = Literal["mean", "leave_one_out"]
NodeWeight = Literal["once", "leaf_fraction", "per_leaf", "sqrt"]
Normalisation = Literal["rollout_mean", "token_mean", "constant"]

LOG_RATIO_BOUND = 20.0
"""Log-ratios are clamped to ± this before exponentiation: e²⁰ ≈ 5e8 stays finite in every float format."""


class GroupAdvantage(NamedTuple):
    """Advantages of a batch of rollouts.

    Attributes:
        advantage_R: [R], 0 for excluded rollouts and in groups without variance.
        has_variance_R: [R] bool, whether the rollout counts and its group holds at least two different rewards.
    """

    advantage_R: Tensor
    has_variance_R: Tensor


class PolicyObjective(NamedTuple):
    """The clipped surrogate, to be maximised.

    Attributes:
        objective_M: [M].
        clipped_M: [M] bool, where the clip is active and the token has no gradient.
    """

    objective_M: Tensor
    clipped_M: Tensor


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


def group_advantage(
    reward_R: Tensor,
    group_R: Tensor,
    *,
    valid_R: Tensor,
    scale: Scale = "std",
    baseline: Baseline = "mean",
    eps: float = 1e-6,
) -> GroupAdvantage:
    """Group-relative advantage, one number a rollout (Eq 7 of arXiv:2608.16798; arXiv:2402.03300).

    ``Aᵢ = (Rᵢ − b) / (σ_q + ε)`` with σ_q the *population* standard deviation of group q. ``baseline="mean"``:
    b = mean_q. ``"leave_one_out"``: b = mean of the group's other rollouts (RLOO), still with one σ_q for the group.
    ``scale="none"`` leaves the division out (Dr.GRPO).

    Args:
        reward_R: [R] float; entries of excluded rollouts are not read and may be NaN.
        group_R: [R] int64, equal for rollouts of one group; any values.
        valid_R: [R] bool; False excludes a rollout from its group's baseline and gives it advantage 0.
        scale: What the centred reward is divided by.
        baseline: What is subtracted.
        eps: Added to σ_q.

    Raises:
        ValueError: shapes differ, an option is unknown, or a valid rollout's reward is not finite.
    """
    _same_shape(reward_R=reward_R, group_R=group_R, valid_R=valid_R)
    if scale not in ("std", "none"):
        raise ValueError(f"scale must be 'std' or 'none', got {scale!r}")
    if baseline not in ("mean", "leave_one_out"):
        raise ValueError(f"baseline must be 'mean' or 'leave_one_out', got {baseline!r}")
    if not bool(torch.isfinite(reward_R[valid_R]).all()):
        raise ValueError("a valid rollout has no finite reward: mark unscored rollouts as not valid")
    _, q_R = torch.unique(group_R, return_inverse=True)
    n_groups = int(q_R.max()) + 1 if q_R.numel() else 0
    zero = reward_R.new_zeros(n_groups)
    r_R = torch.where(valid_R, reward_R, torch.zeros_like(reward_R))
    count_R = zero.index_add(0, q_R, valid_R.to(r_R.dtype))[q_R]
    mean_R = zero.index_add(0, q_R, r_R)[q_R] / count_R.clamp_min(1)
    centred_R = torch.where(valid_R, reward_R - mean_R, torch.zeros_like(reward_R))
    std_R = (zero.index_add(0, q_R, centred_R.square())[q_R] / count_R.clamp_min(1)).sqrt()

    low = torch.full_like(zero, torch.inf).scatter_reduce(0, q_R[valid_R], reward_R[valid_R], "amin")
    high = torch.full_like(zero, -torch.inf).scatter_reduce(0, q_R[valid_R], reward_R[valid_R], "amax")
    has_variance_R = valid_R & (high > low)[q_R]

    advantage_R = centred_R
    if baseline == "leave_one_out":  # Rᵢ − (S − Rᵢ)/(n−1) = (Rᵢ − mean)·n/(n−1)
        advantage_R = advantage_R * count_R / (count_R - 1).clamp_min(1)
    if scale == "std":
        advantage_R = advantage_R / (std_R + eps)
    return GroupAdvantage(torch.where(has_variance_R, advantage_R, torch.zeros_like(advantage_R)), has_variance_R)


def grpo_objective(
    log_prob_M: Tensor, behaviour_log_prob_M: Tensor, advantage_M: Tensor, clip_low: float, clip_high: float
) -> PolicyObjective:
    """Clipped surrogate of one token (the bracket of Eq 6, arXiv:2608.16798; asymmetric clip of arXiv:2503.14476).

    ``min(ρ_t A_t, clip(ρ_t, 1 − ε_lo, 1 + ε_hi) A_t)`` with ``ρ_t = π(t)/π_old(t)``.

    A token that is shared by branches with *different* advantages must not be given their mean: the sum of its clipped
    objectives is ``A⁺ min(ρ, 1+ε) + A⁻ max(ρ, 1−ε)`` with A⁺, A⁻ the sums of the positive and of the negative ones;
    call this twice. Within one black-box rollout all branches share one advantage and one call is exact.

    Args:
        log_prob_M: [M], carries the gradient.
        behaviour_log_prob_M: [M], log π_old.
        advantage_M: [M].
        clip_low: ε_lo in [0, 1).
        clip_high: ε_hi >= 0.
    """
    ratio_M = (log_prob_M - behaviour_log_prob_M).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()
    objective_M = torch.minimum(ratio_M * advantage_M, ratio_M.clamp(1 - clip_low, 1 + clip_high) * advantage_M)
    clipped_M = ((advantage_M > 0) & (ratio_M > 1 + clip_high)) | ((advantage_M < 0) & (ratio_M < 1 - clip_low))
    return PolicyObjective(objective_M, clipped_M)


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


def node_weight(
    n_leaves_M: Tensor, leaves_of_rollout_M: Tensor, mode: NodeWeight = "once", *, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Weight of a token-node that n_t retained leaves of the rollout's K share.

    | mode | weight | source |
    |---|---|---|
    | ``once`` | 1 | arXiv:2608.16798 |
    | ``leaf_fraction`` | n_t / K | mean of the branches' summed losses |
    | ``per_leaf`` | n_t | every root-to-leaf path trained by itself |
    | ``sqrt`` | 1/√n_t | TreeRL, arXiv:2506.11902 |

    Args:
        n_leaves_M: [M] int64, n_t.
        leaves_of_rollout_M: [M] int64, K of the token's rollout.
        mode: One of the table.
        dtype: Of the result.

    Raises:
        ValueError: unknown mode.
    """
    n_M = n_leaves_M.to(dtype)
    if mode == "once":
        return torch.ones_like(n_M)
    if mode == "leaf_fraction":
        return n_M / leaves_of_rollout_M.to(dtype).clamp_min(1)
    if mode == "per_leaf":
        return n_M
    if mode == "sqrt":
        return n_M.clamp_min(1).rsqrt()
    raise ValueError(f"node_weight must be 'once', 'leaf_fraction', 'per_leaf' or 'sqrt', got {mode!r}")


def token_share(
    weight_M: Tensor,
    rollout_M: Tensor,
    n_rollouts: int,
    mode: Normalisation = "rollout_mean",
    *,
    constant: float | None = None,
    n_tokens: int | None = None,
) -> Tensor:
    """Factor of each token in the batch loss, so that the loss is ``Σ_t share_t · value_t``.

    | mode | share | source |
    |---|---|---|
    | ``rollout_mean`` | w_t / (G · Nᵢ) | Eq 6, arXiv:2608.16798 |
    | ``token_mean`` | w_t / Σᵢ Nᵢ | DAPO, arXiv:2503.14476 |
    | ``constant`` | w_t / (G · C) | Dr.GRPO, arXiv:2503.20783 |

    G counts rollouts, those without a trainable token included; Nᵢ *counts* rollout i's trainable token-nodes, whatever
    their weights.

    Args:
        weight_M: [M] float, node weights.
        rollout_M: [M] int64 >= 0: whose token it is.
        n_rollouts: G of the whole batch; larger than the ids present where this is one micro-batch of it.
        mode: One of the table.
        constant: C, required by ``constant`` and by it alone.
        n_tokens: Σᵢ Nᵢ of the whole batch; ``None`` counts the tokens given.

    Raises:
        ValueError: unknown mode, or ``constant`` missing, misplaced or not positive.
    """
    if (mode == "constant") != (constant is not None) or (constant is not None and constant <= 0):
        raise ValueError(
            f"constant must be a positive number with mode 'constant' and None otherwise, got {constant!r}"
        )
    if mode == "rollout_mean":
        size = int(rollout_M.max()) + 1 if rollout_M.numel() else 0
        count = torch.bincount(rollout_M, minlength=size).to(weight_M.dtype)
        return weight_M / (count[rollout_M] * max(n_rollouts, 1))
    if mode == "token_mean":
        return weight_M / max(weight_M.numel() if n_tokens is None else n_tokens, 1)
    if mode == "constant" and constant is not None:
        return weight_M / (max(n_rollouts, 1) * constant)
    raise ValueError(f"normalisation must be 'rollout_mean', 'token_mean' or 'constant', got {mode!r}")


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


def _same_shape(**tensors: Tensor) -> None:
    shapes = {name: tuple(t.shape) for name, t in tensors.items()}
    if len(set(shapes.values())) > 1:
        raise ValueError(f"shapes must agree, got {shapes}")
