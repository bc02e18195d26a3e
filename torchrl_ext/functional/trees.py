"""Sums and products along a tree, in as many passes as the *logarithm* of its depth.

A recursion from the leaves to the root, ``S_t = x_t + Σ_{c child of t} f_c S_c``, is solved by doubling: after pass j
every node knows the sum over its descendants less than 2ʲ below, the node 2ʲ above, and the product of the factors in
between. Nothing is divided, so products may reach 0, and any tree will do: a chain of 10⁵ tokens takes 17 passes, a
node with 10⁴ children one. Runs without a fork are contiguous and need no pointers.

Invariant: parents come before their children.

Shape suffixes: ``N`` token-nodes of a packed forest, ``M`` trainable ones among them, ``P`` pairs of a trainable node
and a leaf below it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

BranchBackup = Literal["leaf_mean", "child_uniform"]


@dataclass(frozen=True, slots=True, eq=False)
class TrainableTree:
    """A forest of M trainable tokens, each hung below the nearest trainable token before it.

    What lies between (tool output, messages) is skipped, never stepped over: neither γ nor λ counts it.

    Attributes:
        index_M: [M] int64, positions in the packed forest, ascending.
        parent_M: [M] int64, index among the M; -1 where no trainable token lies before.
        weight_M: [M] float64 >= 0, share of the token in its parent's backup. The shares of a node's children sum to 1.
        terminal_M: [M] bool, the last trainable token of a trajectory.
    """

    index_M: Tensor
    parent_M: Tensor
    weight_M: Tensor
    terminal_M: Tensor

    def __len__(self) -> int:
        return len(self.index_M)


def trainable_tree(
    parent_N: Tensor, trainable_N: Tensor, n_leaves_N: Tensor, branch_backup: BranchBackup = "leaf_mean"
) -> TrainableTree:
    """Skips masked tokens and weighs the children of every fork.

    ``leaf_mean``: by retained leaves, w_c = n_c / Σ n. ``child_uniform``: the children of a fork of the packed tree
    weigh alike; below several forks in a row the weights multiply.

    Args:
        parent_N: [N] int64, -1 at roots; smaller than the node's own position.
        trainable_N: [N] bool.
        n_leaves_N: [N] int64, retained leaves at or below the token; at least 1 where trainable. 0 elsewhere marks what
            no retained trajectory holds.
        branch_backup: How the branches of a fork are weighed.

    Raises:
        ValueError: shapes differ, an unknown option, or a trainable token without a leaf.
    """
    if branch_backup not in ("leaf_mean", "child_uniform"):
        raise ValueError(f"branch_backup must be 'leaf_mean' or 'child_uniform', got {branch_backup!r}")
    if not parent_N.shape == trainable_N.shape == n_leaves_N.shape:
        raise ValueError(
            f"shapes must agree, got {[tuple(t.shape) for t in (parent_N, trainable_N, n_leaves_N)]} for parents, "
            "mask and leaves"
        )
    index_M = trainable_N.nonzero().squeeze(-1)
    if bool((n_leaves_N[index_M] < 1).any()):
        raise ValueError("a trainable token lies on no retained trajectory (n_leaves is 0)")
    share_N = _uniform_share(parent_N, n_leaves_N) if branch_backup == "child_uniform" else None
    above_N, product_N = nearest(parent_N, trainable_N, share_N)
    rank_N = trainable_N.long().cumsum(0) - 1
    above_M = above_N[index_M]
    parent_M = torch.where(above_M >= 0, rank_N[above_M.clamp_min(0)], -1)
    weight_M = n_leaves_N[index_M].double() if product_N is None else product_N[index_M]
    weight_M = weight_M / total_of_siblings(weight_M, parent_M)
    terminal_M = torch.ones_like(index_M, dtype=torch.bool)
    terminal_M[parent_M[parent_M >= 0]] = False
    return TrainableTree(index_M, parent_M, weight_M, terminal_M)


def _uniform_share(parent_N: Tensor, n_leaves_N: Tensor) -> Tensor:
    alive_N = (n_leaves_N > 0).double()
    return alive_N / total_of_siblings(alive_N, parent_N).clamp_min(1)


def total_of_siblings(x_M: Tensor, parent_M: Tensor) -> Tensor:
    """[M]: the sum of ``x`` over the node and its siblings; at a root, which has none, its own."""
    child_M = parent_M >= 0
    above_M = parent_M.clamp_min(0)
    sums_M = torch.zeros_like(x_M).index_add(0, parent_M[child_M], x_M[child_M])
    return torch.where(child_M, sums_M[above_M], x_M)


def nearest(parent_N: Tensor, stop_N: Tensor, factor_N: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
    """The nearest marked node above each node.

    Args:
        parent_N: [N] int64, -1 at roots.
        stop_N: [N] bool, where a walk upwards ends.
        factor_N: [N] float, of the edge from a node to its parent.

    Returns:
        [N] int64, -1 where there is none; and [N], the product of the factors on the way, or ``None``.
    """
    if factor_N is None:
        return _nearest_by_runs(parent_N, stop_N), None
    above_N, product_N = parent_N, factor_N
    while True:
        up_N = above_N.clamp_min(0)
        onward_N = (above_N >= 0) & ~stop_N[up_N]
        if not bool(onward_N.any()):
            return above_N, product_N
        product_N = torch.where(onward_N, product_N * product_N[up_N], product_N)
        above_N = torch.where(onward_N, above_N[up_N], above_N)


def _nearest_by_runs(parent_N: Tensor, stop_N: Tensor) -> Tensor:
    """As ``nearest``: a running maximum inside runs of tokens that follow each other, doubling between runs."""
    if parent_N.numel() == 0:
        return parent_N
    own_N = torch.arange(len(parent_N), device=parent_N.device)
    head_N = parent_N != own_N - 1
    head_N[0] = True
    run_N = head_N.long().cumsum(0) - 1
    start_N = head_N.nonzero().squeeze(-1)[run_N]
    mark_N = torch.where(stop_N, own_N, -1).cummax(0).values  # last marked node so far, perhaps of another run
    up_R = parent_N[head_N]
    entry_R = up_R.clamp_min(0)
    found_R = (up_R < 0) | (mark_N[entry_R] >= start_N[entry_R])
    above_R = torch.where(up_R < 0, -1, torch.where(found_R, mark_N[entry_R], run_N[entry_R]))
    while not bool(found_R.all()):  # where nothing is found yet, above_R is the run to ask
        ask_R = torch.where(found_R, 0, above_R)
        above_R = torch.where(found_R, above_R, above_R[ask_R])
        found_R = found_R | found_R[ask_R]
    before_N = torch.cat([mark_N[:1] * 0 - 1, mark_N[:-1]])
    return torch.where(before_N >= start_N, before_N, above_R[run_N])


def tree_sum(x_M: Tensor, parent_M: Tensor, factor_M: Tensor) -> Tensor:
    """``S_t = x_t + Σ_{c child of t} f_c S_c`` for every node at once.

    Runs of only children are scanned in place, and become one node each of a smaller tree.

    Args:
        x_M: [M].
        parent_M: [M] int64, -1 at roots.
        factor_M: [M], f of the edge to the parent; of the type of ``x``.

    Returns:
        [M].
    """
    size = len(parent_M)
    own_M = torch.arange(size, device=parent_M.device)
    children_M = torch.bincount(parent_M[parent_M >= 0], minlength=size)
    head_M = (parent_M != own_M - 1) | (children_M[parent_M.clamp_min(0)] > 1) | (parent_M < 0)
    head_R = head_M.nonzero().squeeze(-1)
    if 2 * len(head_R) >= size:
        return _doubled(x_M, parent_M, factor_M)
    sum_M, reach_M = _scan_runs(x_M, factor_M, head_M, head_R)
    run_M = head_M.long().cumsum(0) - 1
    up_R = torch.where(parent_M[head_R] >= 0, run_M[parent_M[head_R].clamp_min(0)], -1)
    into_R = factor_M[head_R]
    whole_R = _doubled(sum_M[head_R], up_R, into_R * reach_M[head_R][up_R.clamp_min(0)])
    child_R = up_R >= 0
    below_R = torch.zeros_like(whole_R).index_add(0, up_R[child_R], (into_R * whole_R)[child_R])
    return sum_M + reach_M * below_R[run_M]


def _scan_runs(x_M: Tensor, factor_M: Tensor, head_M: Tensor, head_R: Tensor) -> tuple[Tensor, Tensor]:
    """[M] sums within the run, and [M] product of the factors from a node down to the last of its run."""
    last_M = torch.cat([head_M[1:], head_M.new_ones(1)])
    edge_M = torch.where(last_M, 0, torch.cat([factor_M[1:], factor_M[:1]]))  # to the next node of the run
    both = torch.stack([x_M, last_M.to(x_M.dtype)])
    longest = int(torch.diff(head_R, append=head_R.new_tensor([len(x_M)])).max())
    step = 1
    while step < longest:
        both = torch.cat([both[:, :-step] + edge_M[:-step] * both[:, step:], both[:, -step:]], 1)
        edge_M = torch.cat([edge_M[:-step] * edge_M[step:], torch.zeros_like(edge_M[:step])])
        step *= 2
    return both[0], both[1]


def _doubled(x_M: Tensor, parent_M: Tensor, factor_M: Tensor) -> Tensor:
    """``tree_sum`` by pointer doubling alone."""
    sum_M, above, factor = x_M, parent_M, factor_M
    # only nodes that still have an ancestor to add to take part
    live = ((above >= 0) & (factor != 0)).nonzero().squeeze(-1)
    while live.numel():
        sum_M = sum_M.index_add(0, above[live], factor[live] * sum_M[live])
        up = above[live]
        factor = factor.index_put((live,), factor[live] * factor[up])
        above = above.index_put((live,), above[up])
        live = live[(above[live] >= 0) & (factor[live] != 0)]
    return sum_M


def leaves_below(tree: TrainableTree) -> Tensor:
    """[M] int64: terminal nodes at or below each node, each once."""
    ends_M = tree.terminal_M.long()
    return tree_sum(ends_M, tree.parent_M, torch.ones_like(ends_M))


def unroll(tree: TrainableTree) -> tuple[TrainableTree, Tensor, Tensor]:
    """The tree's trajectories side by side: P pairs (node t, leaf l below it), chains that share nothing.

    P is the sum of the trajectories' lengths: use it where branches need numbers of their own, not for the forward.

    Returns:
        The chains, whose ``index_M`` names the packed positions again; [P] int64, the node of each pair; and [P]
        float64, the product of the weights from t down to l, which sums to 1 over the leaves of a node.
    """
    count_M = leaves_below(tree)
    first_leaf_M = tree.terminal_M.long().cumsum(0) - tree.terminal_M.long()
    offset_M = count_M.cumsum(0) - count_M
    node_P = torch.repeat_interleave(torch.arange(len(tree), device=count_M.device), count_M)
    leaf_P = torch.arange(len(node_P), device=count_M.device) - offset_M[node_P] + first_leaf_M[node_P]
    up_P = tree.parent_M[node_P]
    above_P = up_P.clamp_min(0)
    parent_P = torch.where(up_P >= 0, offset_M[above_P] + leaf_P - first_leaf_M[above_P], -1)
    ones_P = torch.ones_like(node_P, dtype=tree.weight_M.dtype)
    chains = TrainableTree(tree.index_M[node_P], parent_P, ones_P, tree.terminal_M[node_P])
    reach_P = tree_sum(chains.terminal_M.to(ones_P.dtype), parent_P, tree.weight_M[node_P])
    return chains, node_P, reach_P
