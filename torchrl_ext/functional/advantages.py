"""Advantages that compare rollouts, or leaves, with each other; whitening.

Sources: GRPO, arXiv:2402.03300; *ClawGym II*, arXiv:2608.16798 (Eq 7); RLOO, arXiv:2402.14740; Dr.GRPO,
arXiv:2503.20783; DAPO, arXiv:2503.14476; Tree-GRPO, arXiv:2509.21240.

Shape suffixes: ``R`` rollouts, ``L`` leaves, ``M`` trainable token-nodes.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

Scale = Literal["std", "none"]
Baseline = Literal["mean", "leave_one_out"]


class GroupAdvantage(NamedTuple):
    """Advantages of a batch of rollouts.

    Attributes:
        advantage_R: [R], 0 for excluded rollouts and in groups without variance.
        has_variance_R: [R] bool, whether the rollout counts and its group holds at least two different rewards.
    """

    advantage_R: Tensor
    has_variance_R: Tensor


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


def leaf_group_advantage(
    reward_L: Tensor,
    tree_L: Tensor,
    group_L: Tensor,
    *,
    scale: Scale = "std",
    baseline: Baseline = "mean",
    eps: float = 1e-6,
) -> Tensor:
    """Tree-GRPO's advantage of leaves with rewards of their own: within the tree plus within the prompt.

    ``A_l = (R_l − mean_tree)/(σ_tree + ε) + (R_l − mean_prompt)/(σ_prompt + ε)`` (arXiv:2509.21240). Where a rollout's
    leaves all inherit one reward, the first term is 0. ``leaf_advantage`` hands the result to the tokens.

    Args:
        reward_L: [L] float, all finite.
        tree_L: [L] int64, equal for leaves of one tree.
        group_L: [L] int64, equal for leaves of one prompt's trees.
        scale, baseline, eps: As in ``group_advantage``.

    Returns:
        [L].
    """
    valid_L = torch.ones_like(reward_L, dtype=torch.bool)
    within, among = (
        group_advantage(reward_L, of_L, valid_R=valid_L, scale=scale, baseline=baseline, eps=eps).advantage_R
        for of_L in (tree_L, group_L)
    )
    return within + among


class Moments(NamedTuple):
    """Weighted mean and standard deviation (of the population), scalars."""

    mean: Tensor
    std: Tensor


def moments(x_M: Tensor, weight_M: Tensor) -> Moments:
    """Mean and standard deviation under weights that need not sum to 1.

    Args:
        x_M: [M], M >= 1.
        weight_M: [M] >= 0, not all 0; ones count each node once.
    """
    weight_M = weight_M.to(x_M.dtype)
    share_M = weight_M / weight_M.sum()
    mean = (share_M * x_M).sum()
    return Moments(mean, (share_M * (x_M - mean).square()).sum().sqrt())


def whiten(x_M: Tensor, weight_M: Tensor, *, eps: float = 1e-8) -> Tensor:
    """``(x − mean)/(σ + ε)`` under node weights.

    Args:
        x_M: [M], M >= 1.
        weight_M: [M] >= 0; ones weigh each unique node once, however many trajectories share it.
        eps: Added to σ.
    """
    mean, std = moments(x_M, weight_M)
    return (x_M - mean) / (std + eps)


def _same_shape(**tensors: Tensor) -> None:
    shapes = {name: tuple(t.shape) for name, t in tensors.items()}
    if len(set(shapes.values())) > 1:
        raise ValueError(f"shapes must agree, got {shapes}")
