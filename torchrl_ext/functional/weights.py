"""What a token counts in a loss: node weights and denominators.

Sources: *ClawGym II*, arXiv:2608.16798 (Eq 6); TreeRL, arXiv:2506.11902; DAPO, arXiv:2503.14476; Dr.GRPO,
arXiv:2503.20783; ScaleRL, arXiv:2510.13786.

Shape suffix: ``M`` trainable token-nodes (each unique token of a rollout's tree once).
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

NodeWeight = Literal["once", "leaf_fraction", "per_leaf", "sqrt"]
Normalisation = Literal["rollout_mean", "token_mean", "prompt_mean", "constant"]


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
    prompt_M: Tensor | None = None,
    n_prompts: int | None = None,
) -> Tensor:
    """Factor of each token in the batch loss, so that the loss is ``Σ_t share_t · value_t``.

    | mode | share | source |
    |---|---|---|
    | ``rollout_mean`` | w_t / (G · Nᵢ) | Eq 6, arXiv:2608.16798 |
    | ``token_mean`` | w_t / Σᵢ Nᵢ | DAPO, arXiv:2503.14476 |
    | ``prompt_mean`` | w_t / (Q · Σ_{i of q} Nᵢ) | ScaleRL's prompt average, arXiv:2510.13786 |
    | ``constant`` | w_t / (G · C) | Dr.GRPO, arXiv:2503.20783 |

    G counts rollouts, those without a trainable token included, and Q their prompts; Nᵢ *counts* rollout i's trainable
    token-nodes, whatever their weights.

    Args:
        weight_M: [M] float, node weights.
        rollout_M: [M] int64 >= 0: whose token it is.
        n_rollouts: G of the whole batch; larger than the ids present where this is one micro-batch of it.
        mode: One of the table.
        constant: C, required by ``constant`` and by it alone.
        n_tokens: Σᵢ Nᵢ of the whole batch; ``None`` counts the tokens given.
        prompt_M: [M] int64 >= 0, the prompt of each token's rollout, required by ``prompt_mean``; whole groups.
        n_prompts: Q of the whole batch; ``None`` counts those given.

    Raises:
        ValueError: unknown mode, ``prompt_mean`` without prompts, or ``constant`` missing, misplaced or not positive.
    """
    if (mode == "constant") != (constant is not None) or (constant is not None and constant <= 0):
        raise ValueError(
            f"constant must be a positive number with mode 'constant' and None otherwise, got {constant!r}"
        )
    if mode == "rollout_mean":
        return weight_M / (_count(rollout_M, weight_M) * max(n_rollouts, 1))
    if mode == "token_mean":
        return weight_M / max(weight_M.numel() if n_tokens is None else n_tokens, 1)
    if mode == "constant" and constant is not None:
        return weight_M / (max(n_rollouts, 1) * constant)
    if mode == "prompt_mean" and prompt_M is not None:
        n_prompts = len(torch.unique(prompt_M)) if n_prompts is None else n_prompts
        return weight_M / (_count(prompt_M, weight_M) * max(n_prompts, 1))
    raise ValueError(
        f"normalisation must be 'rollout_mean', 'token_mean', 'prompt_mean' (with prompts) or 'constant', got {mode!r}"
    )


def _count(of_M: Tensor, like_M: Tensor) -> Tensor:
    """[M]: how many tokens have the token's number."""
    size = int(of_M.max()) + 1 if of_M.numel() else 0
    return torch.bincount(of_M, minlength=size).to(like_M.dtype)[of_M]
