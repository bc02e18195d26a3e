"""What a policy maximises and a critic minimises, token by token.

Sources: PPO, arXiv:1707.06347; *ClawGym II*, arXiv:2608.16798 (Eq 6, 8); DAPO, arXiv:2503.14476 (asymmetric clip);
dual clip, arXiv:1912.09729; GSPO, arXiv:2507.18071 (GSPO-token); CISPO, arXiv:2506.13585.

Dr.GRPO and DAPO need no objective of their own: they are this clip under other denominators (``token_share``), another
scale (``group_advantage``) and filtered groups. Decoupled PPO (arXiv:2110.00641) is this clip around π_old, times an
uncapped importance weight π_old/μ (``corrections``).

Shape suffix: ``M`` trainable token-nodes.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from torchrl_ext.functional.advantages import moments
from torchrl_ext.functional.divergence import LOG_RATIO_BOUND
from torchrl_ext.functional.gae import BranchAdvantage

Objective = Literal["ppo", "gspo", "cispo"]


class PolicyObjective(NamedTuple):
    """The clipped surrogate, to be maximised.

    Attributes:
        objective_M: [M].
        clipped_M: [M] bool, where the clip is active and the token has no gradient.
    """

    objective_M: Tensor
    clipped_M: Tensor


def policy_objective(
    log_prob_M: Tensor,
    old_log_prob_M: Tensor,
    advantage_M: Tensor | BranchAdvantage,
    kind: Objective = "ppo",
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
    rollout_M: Tensor | None = None,
) -> PolicyObjective:
    """One of the objectives, for tokens with one advantage or with A⁺ and A⁻ (then the sum of both, which is exact).

    Args:
        log_prob_M: [M], carries the gradient.
        old_log_prob_M: [M], log π_old.
        advantage_M: [M], or A⁺ and A⁻.
        kind: ``ppo`` (``grpo_objective``), ``gspo`` (the same clip around the sequence's ratio) or ``cispo``.
        clip_low: ε_lo in [0, 1].
        clip_high: ε_hi >= 0.
        dual_clip: c > 1 of ``ppo``; ``None`` leaves it out.
        rollout_M: [M] int64 >= 0, required by ``gspo``.

    Raises:
        ValueError: unknown kind, ``gspo`` without ``rollout_M``, or ``dual_clip`` elsewhere than with ``ppo``.
    """
    if dual_clip is not None and (kind != "ppo" or dual_clip <= 1):
        raise ValueError(f"dual_clip goes with 'ppo' and must be above 1, got {dual_clip} with {kind!r}")
    if isinstance(advantage_M, BranchAdvantage):
        plus, minus = (
            policy_objective(
                log_prob_M, old_log_prob_M, part_M, kind,
                clip_low=clip_low, clip_high=clip_high, dual_clip=dual_clip, rollout_M=rollout_M,
            )
            for part_M in advantage_M
        )  # fmt: skip
        moving_M = ((advantage_M.positive_M > 0) & ~plus.clipped_M) | ((advantage_M.negative_M < 0) & ~minus.clipped_M)
        return PolicyObjective(plus.objective_M + minus.objective_M, (plus.clipped_M | minus.clipped_M) & ~moving_M)
    if kind == "ppo":
        return grpo_objective(log_prob_M, old_log_prob_M, advantage_M, clip_low, clip_high, dual_clip)
    if kind == "cispo":
        return cispo_objective(log_prob_M, old_log_prob_M, advantage_M, clip_low, clip_high)
    if kind == "gspo" and rollout_M is not None:
        ratio_log_M = sequence_log_ratio(log_prob_M, old_log_prob_M, rollout_M)
        return grpo_objective(ratio_log_M, torch.zeros_like(ratio_log_M), advantage_M, clip_low, clip_high)
    raise ValueError(f"objective must be 'ppo', 'gspo' (with the tokens' rollouts) or 'cispo', got {kind!r}")


def grpo_objective(
    log_prob_M: Tensor,
    behaviour_log_prob_M: Tensor,
    advantage_M: Tensor,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
) -> PolicyObjective:
    """Clipped surrogate of one token (the bracket of Eq 6, arXiv:2608.16798; asymmetric clip of arXiv:2503.14476).

    ``min(ρ_t A_t, clip(ρ_t, 1 − ε_lo, 1 + ε_hi) A_t)`` with ``ρ_t = π(t)/π_old(t)``. With dual clip, and A_t < 0, the
    maximum of this and ``c A_t``: a token that has become likely cannot push without bound.

    A token that is shared by branches with *different* advantages must not be given their mean: the sum of its clipped
    objectives is ``A⁺ min(ρ, 1+ε) + A⁻ max(ρ, 1−ε)`` with A⁺, A⁻ the sums of the positive and of the negative ones; see
    ``policy_objective``. Within one black-box rollout all branches share one advantage and one call is exact.

    Args:
        log_prob_M: [M], carries the gradient.
        behaviour_log_prob_M: [M], log π_old.
        advantage_M: [M].
        clip_low: ε_lo in [0, 1].
        clip_high: ε_hi >= 0.
        dual_clip: c > 1, usually 3; ``None`` leaves it out.
    """
    ratio_M = (log_prob_M - behaviour_log_prob_M).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()
    objective_M = torch.minimum(ratio_M * advantage_M, ratio_M.clamp(1 - clip_low, 1 + clip_high) * advantage_M)
    clipped_M = ((advantage_M > 0) & (ratio_M > 1 + clip_high)) | ((advantage_M < 0) & (ratio_M < 1 - clip_low))
    if dual_clip is not None:
        below_M = advantage_M < 0
        objective_M = torch.where(below_M, torch.maximum(objective_M, dual_clip * advantage_M), objective_M)
        clipped_M = clipped_M | (below_M & (ratio_M > dual_clip))
    return PolicyObjective(objective_M, clipped_M)


def cispo_objective(
    log_prob_M: Tensor, old_log_prob_M: Tensor, advantage_M: Tensor, clip_low: float, clip_high: float
) -> PolicyObjective:
    """``sg(clip(ρ_t, 1 − ε_lo, 1 + ε_hi)) A_t log π(t)``: the weight is clipped, the token keeps its gradient.

    Args:
        log_prob_M: [M], carries the gradient.
        old_log_prob_M, advantage_M, clip_low, clip_high: As in ``grpo_objective``; CISPO itself has no lower bound
            (ε_lo = 1).

    Returns:
        ``clipped_M`` marks clipped weights; these tokens do have a gradient.
    """
    ratio_M = (log_prob_M - old_log_prob_M).detach().clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()
    weight_M = ratio_M.clamp(1 - clip_low, 1 + clip_high)
    return PolicyObjective(weight_M * advantage_M * log_prob_M, weight_M != ratio_M)


def sequence_log_ratio(log_prob_M: Tensor, old_log_prob_M: Tensor, rollout_M: Tensor) -> Tensor:
    """GSPO-token's log-ratio: the value is the sequence's, the gradient is the token's own.

    ``log s_{i,t} = sg[ (1/N_i) Σ_{u of i} log(π/π_old)(u) ] + log π(t) − sg[log π(t)]``. The sequence of a tree is the
    rollout's unique trainable nodes.

    Args:
        log_prob_M: [M], carries the gradient.
        old_log_prob_M: [M].
        rollout_M: [M] int64 >= 0; whole rollouts.
    """
    log_ratio_M = (log_prob_M - old_log_prob_M).detach()
    return mean_of_rollout(log_ratio_M, rollout_M) + log_prob_M - log_prob_M.detach()


def mean_of_rollout(x_M: Tensor, rollout_M: Tensor) -> Tensor:
    """[M]: mean of x over the trainable nodes of the token's rollout."""
    size = int(rollout_M.max()) + 1 if rollout_M.numel() else 0
    count = torch.bincount(rollout_M, minlength=size).to(x_M.dtype)
    return (x_M.new_zeros(size).index_add(0, rollout_M, x_M) / count.clamp_min(1))[rollout_M]


def value_loss(
    value_M: Tensor, target_M: Tensor, *, old_value_M: Tensor | None = None, clip: float | None = None
) -> tuple[Tensor, Tensor]:
    """Squared error of the critic, ``(V_t − G_t)²``; a clip holds what counts as progress near the old value.

    ``max((V − G)², (V_old + clip(V − V_old, ±ε) − G)²)``, as in PPO's reference code and TorchRL's ``clip_value``.

    Args:
        value_M: [M], carries the gradient.
        target_M: [M].
        old_value_M: [M], V before the first update; required with a clip.
        clip: ε > 0; ``None`` leaves the clip out.

    Returns:
        [M] the loss and [M] bool, where V has moved beyond the clip.

    Raises:
        ValueError: one of ``old_value_M`` and ``clip`` without the other.
    """
    plain_M = (value_M - target_M).square()
    if clip is None:
        return plain_M, torch.zeros_like(plain_M, dtype=torch.bool)
    if old_value_M is None:
        raise ValueError("a clipped critic needs the values from before the first update")
    moved_M = value_M - old_value_M
    held_M = (old_value_M + moved_M.clamp(-clip, clip) - target_M).square()
    return torch.maximum(plain_M, held_M), moved_M.abs() > clip


def explained_variance(value_M: Tensor, target_M: Tensor, weight_M: Tensor) -> Tensor:
    """``1 − Var(G − V)/Var(G)``, weighed by node, detached: 1 for a perfect critic, 0 for one that says the mean.

    0 as well where all targets are equal.
    """
    total = moments(target_M.detach(), weight_M).std.square()
    left = moments((target_M - value_M).detach(), weight_M).std.square()
    return torch.where(total > 0, 1 - left / total, torch.zeros_like(total))
