"""Generalised advantage estimation over a tree.

Sources: GAE, arXiv:1506.02438 (Eq 16); *ClawGym II*, arXiv:2608.16798 (Eq 8); VAPO, arXiv:2504.05118 (decoupled and
length-adaptive λ).

Shape suffixes as in ``functional.trees``; V_t is the value of the state *before* token t is sampled.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from torchrl_ext.functional.trees import TrainableTree, total_of_siblings, tree_sum, unroll


class TreeEstimate(NamedTuple):
    """What tree GAE returns.

    Attributes:
        advantage_M: [M], A_t.
        value_target_M: [M], G_t = A_t + V_t under the critic's λ.
    """

    advantage_M: Tensor
    value_target_M: Tensor


class BranchAdvantage(NamedTuple):
    """Advantages of a token that branches judge differently, as a clipped objective needs them.

    Means over the branches, so that a token on one branch, or with equal advantages on all, has A⁺ + A⁻ = A.

    Attributes:
        positive_M: [M] >= 0, A⁺ = mean of max(A_b, 0).
        negative_M: [M] <= 0, A⁻ = mean of min(A_b, 0).
    """

    positive_M: Tensor
    negative_M: Tensor


def tree_gae(
    value_M: Tensor,
    reward_M: Tensor,
    tree: TrainableTree,
    *,
    gamma: float = 1.0,
    lmbda: float | Tensor = 1.0,
    lmbda_critic: float | Tensor | None = None,
) -> TreeEstimate:
    """Tree GAE: the usual recursion, with a fork's next value and advantage the weighted means over its children.

    ``V'_t = Σ_c w_c V_c``, ``A'_t = Σ_c w_c A_c``; ``δ_t = r_t + γ V'_t − V_t``; ``A_t = δ_t + γλ A'_t``; both means
    are 0 below the last token. Under ``leaf_mean`` this is the mean over the leaves below t of the GAEs of their
    trajectories taken alone, for every γ and λ. With γ = λ = 1 and one reward R at every leaf, ``A_t = R − V_t`` (Eq 8
    of arXiv:2608.16798) at every token, however the tree forks.

    Eq 3 of that paper multiplies the bootstrap by the token's mask. Read literally this drops V' wherever tool output
    follows; here masked positions are skipped, and the next trainable token's value is the next value.

    Args:
        value_M: [M] float, V_t.
        reward_M: [M], r_t; usually 0 but at each trajectory's last token.
        tree: Of ``trainable_tree``.
        gamma: γ in [0, 1].
        lmbda: λ of the policy's advantage in [0, 1]; a tensor [M] gives each token its own.
        lmbda_critic: λ of the value target; ``None``: the same. 1 makes targets of Monte-Carlo returns (VAPO).

    Raises:
        ValueError: shapes differ, or γ or λ lies outside of [0, 1].
    """
    if not value_M.shape == reward_M.shape == tree.parent_M.shape:
        shapes = [tuple(t.shape) for t in (value_M, reward_M, tree.parent_M)]
        raise ValueError(f"values, rewards and tree must have one entry a trainable token, got {shapes}")
    for name, number in (("gamma", gamma), ("lmbda", lmbda), ("lmbda_critic", lmbda_critic)):
        if number is not None and not bool(((torch.as_tensor(number) >= 0) & (torch.as_tensor(number) <= 1)).all()):
            raise ValueError(f"{name} must lie in [0, 1], got {number}")
    weight_M = tree.weight_M.to(value_M.dtype)
    child_M = tree.parent_M >= 0
    above_M = tree.parent_M[child_M]
    next_value_M = torch.zeros_like(value_M).index_add(0, above_M, (weight_M * value_M)[child_M])
    delta_M = reward_M + gamma * next_value_M - value_M

    advantage_M = _accumulate(delta_M, tree, gamma, lmbda)
    if lmbda_critic is None:
        return TreeEstimate(advantage_M, advantage_M + value_M)
    return TreeEstimate(advantage_M, _accumulate(delta_M, tree, gamma, lmbda_critic) + value_M)


def _accumulate(delta_M: Tensor, tree: TrainableTree, gamma: float, lmbda: float | Tensor) -> Tensor:
    """``A_t = δ_t + γ λ_t Σ_c w_c A_c``."""
    lmbda_M = torch.as_tensor(lmbda, dtype=delta_M.dtype, device=delta_M.device).expand_as(delta_M)
    factor_M = tree.weight_M.to(delta_M.dtype) * gamma * lmbda_M[tree.parent_M.clamp_min(0)]
    return tree_sum(delta_M, tree.parent_M, factor_M)


def branch_gae(
    value_M: Tensor, reward_M: Tensor, tree: TrainableTree, *, gamma: float = 1.0, lmbda: float | Tensor = 1.0
) -> tuple[Tensor, Tensor, Tensor]:
    """GAE of every trajectory taken alone, at all its tokens; the weighted mean a token is ``tree_gae``'s advantage.

    Args:
        value_M, reward_M, tree, gamma, lmbda: As in ``tree_gae``.

    Returns:
        [P] the advantage of each pair (token, leaf below it), [P] int64 its token among the M, and [P] its weight,
        which sums to 1 a token. P is the sum of the trajectories' lengths.
    """
    chains, node_P, reach_P = unroll(tree)
    own = lmbda[node_P] if isinstance(lmbda, Tensor) and lmbda.ndim else lmbda
    found = tree_gae(value_M[node_P], reward_M[node_P], chains, gamma=gamma, lmbda=own)
    return found.advantage_M, node_P, reach_P.to(value_M.dtype)


def split_advantage(advantage_P: Tensor, node_P: Tensor, weight_P: Tensor, size: int) -> BranchAdvantage:
    """A⁺ and A⁻ of every token from the advantages of its branches.

    A clipped objective is not linear in A: a shared token whose branches disagree must not be given their mean. With
    ρ the token's ratio, ``Σ_b w_b min(ρ A_b, clip(ρ) A_b) = A⁺ min(ρ, 1+ε) + A⁻ max(ρ, 1−ε)``.

    Args:
        advantage_P: [P]. node_P: [P] int64, token of each. weight_P: [P], summing to 1 a token.
        size: M.
    """
    zero_M = advantage_P.new_zeros(size)
    positive_M = zero_M.index_add(0, node_P, weight_P * advantage_P.clamp_min(0))
    return BranchAdvantage(positive_M, zero_M.index_add(0, node_P, weight_P * advantage_P.clamp_max(0)))


def leaf_advantage(advantage_M: Tensor, tree: TrainableTree) -> BranchAdvantage:
    """Hands each leaf's advantage to all the tokens of its trajectory: A⁺ and A⁻ where trajectories share a token.

    Args:
        advantage_M: [M], read at terminal tokens.
        tree: Of ``trainable_tree``.
    """
    at_leaf_M = torch.where(tree.terminal_M, advantage_M, torch.zeros_like(advantage_M))
    weight_M = tree.weight_M.to(advantage_M.dtype)
    parts = (at_leaf_M.clamp_min(0), at_leaf_M.clamp_max(0))
    return BranchAdvantage(*(tree_sum(part_M, tree.parent_M, weight_M) for part_M in parts))


def length_adaptive_lambda(n_leaves_M: Tensor, rollout_M: Tensor, alpha: float, tree: TrainableTree) -> Tensor:
    """VAPO's λ = 1 − 1/(α l), with l the trajectory's trainable tokens (arXiv:2504.05118).

    A tree has one λ a rollout, of its trajectories' mean length ``l = Σ_t n_t / K``, so that a token which trajectories
    of unequal length share is backed up with one λ; on a chain this is VAPO's own.

    Args:
        n_leaves_M: [M] int64, retained leaves at or below the token.
        rollout_M: [M] int64 >= 0.
        alpha: α > 0; VAPO has 0.05. λ is 0 where α l < 1.
        tree: Of ``trainable_tree``; its first tokens count the rollout's leaves K.

    Returns:
        [M] float64.

    Raises:
        ValueError: α is not positive.
    """
    if alpha <= 0:
        raise ValueError(f"alpha must be positive, got {alpha}")
    size = int(rollout_M.max()) + 1 if rollout_M.numel() else 0
    n_M = n_leaves_M.double()
    zero = n_M.new_zeros(size)
    first_M = (tree.parent_M < 0).double()
    length = zero.index_add(0, rollout_M, n_M) / zero.index_add(0, rollout_M, n_M * first_M).clamp_min(1)
    return (1 - 1 / (alpha * length).clamp_min(1))[rollout_M]


def leaf_values(reward_M: Tensor, tree: TrainableTree) -> Tensor:
    """[M]: mean reward of the leaves below each token, under the tree's weights."""
    at_leaf_M = torch.where(tree.terminal_M, reward_M, torch.zeros_like(reward_M))
    return tree_sum(at_leaf_M, tree.parent_M, tree.weight_M.to(reward_M.dtype))


def treerl_advantage(reward_M: Tensor, tree: TrainableTree, n_leaves_M: Tensor, tree_M: Tensor) -> Tensor:
    """TreeRL's credit of a step s: ``[(V(s) − V(root)) + (V(s) − V(parent))] / √|leaves of s|`` (arXiv:2506.11902).

    V is the mean reward of the leaves below; a step is a run of tokens that the same leaves share. It is 0 where all
    leaves of a tree have one reward. The root does not train, so the first step's parent is the root.

    Do not combine it with ``node_weight="sqrt"``, which is the same 1/√n.

    Args:
        reward_M: [M], read at terminal tokens.
        tree: Of ``trainable_tree`` (``leaf_mean``).
        n_leaves_M: [M] int64.
        tree_M: [M] int64 >= 0, equal for tokens under one root.
    """
    value_M = leaf_values(reward_M, tree)
    n_M = n_leaves_M.to(value_M.dtype)
    first_M = tree.parent_M < 0
    zero = value_M.new_zeros(int(tree_M.max()) + 1 if tree_M.numel() else 0)
    weight_M = torch.where(first_M, n_M, torch.zeros_like(n_M))
    root_M = (zero.index_add(0, tree_M, weight_M * value_M) / zero.index_add(0, tree_M, weight_M))[tree_M]

    above_M = tree.parent_M.clamp_min(0)
    own = torch.arange(len(tree), device=above_M.device)
    start_M = first_M | (total_of_siblings(n_M, tree.parent_M) != n_M)
    head_M = torch.where(start_M, own, above_M)
    while not bool(start_M[head_M].all()):
        head_M = head_M[head_M]
    up_M = tree.parent_M[head_M]
    parent_value_M = torch.where(up_M >= 0, value_M[up_M.clamp_min(0)], root_M)
    return (2 * value_M - root_M - parent_value_M) / n_M.sqrt()
