"""Exact attention over a packed prefix tree, without a T x T mask.

A depth-first packed tree (``clawgym_env.tree.pack``) is cut into *chains*: maximal runs in which every token is the
only child of the one before. Attention then has two kinds of parts, each a plain dense or causal kernel:

* inside a chain: causal self-attention (short chains of similar length share one padded call; small bushy subtrees
  are one block with a mask);
* from a chain down: all its descendants, one contiguous interval of queries, see all of the chain's keys.

Partial results merge exactly: with partial outputs o_a, o_b and log-sum-exps l_a, l_b over disjoint keys,
``l = logaddexp(l_a, l_b)`` and ``o = o_a·exp(l_a - l) + o_b·exp(l_b - l)``. Backward runs each part with the *merged*
output and log-sum-exp, which makes every part's softmax the true one.

Invariant: query ``i`` sees key ``j`` iff ``j <= i < subtree_end[j]``; each visible pair is computed in exactly one
part.

Shapes: N unique tokens, H query heads, K key-value heads, D head dim, B chains of a padded call, L its padded length.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, cast

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from clawgym_env.errors import ConfigError

IntArray = NDArray[np.int64]
Method = Literal["split", "dense", "flex"]

ATTENTION_NAME = "clawgym_tree"
DENSE_BLOCK = 128
"""Bushy subtrees up to this many tokens are one masked block: many tiny kernel calls cost more than the waste."""
PADDED_CHAIN = 512
"""Longer chains get a call of their own: nothing is left to win by padding them together."""

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


@dataclass(frozen=True, slots=True, eq=False)
class PaddedBlocks:
    """B disjoint runs of tokens, padded to L, that attend only among themselves.

    Attributes:
        gather: [B*L] int64, packed index; padding repeats the run's last token.
        scatter: [B*L] int64, like ``gather`` with padding sent to row N, which is thrown away.
        padding: [P] int64, positions in ``gather`` that are padding.
        size: (B, L).
        mask: [B, 1, L, L] additive in float32, or ``None`` for causal.
    """

    gather: Tensor
    scatter: Tensor
    padding: Tensor
    size: tuple[int, int]
    mask: Tensor | None


@dataclass(frozen=True, slots=True)
class Cross:
    """Keys ``start..end-1``, a chain, seen by the queries ``end..stop-1``, its descendants."""

    start: int
    end: int
    stop: int


@dataclass(frozen=True, slots=True, eq=False)
class TreePlan:
    """What attention over one packed tree (or forest) consists of; built once a batch, used by every layer.

    Attributes:
        subtree_end: [N] int64 tensor.
        method: ``split`` (CPU), ``flex`` (CUDA) or ``dense`` (anywhere, O(N^2) memory: the reference).
        singles: Long chains, (start, end), each one causal call.
        padded: Short chains and bushy blocks.
        crosses: Chain-to-descendants parts, ancestors first.
    """

    subtree_end: Tensor
    method: Method
    singles: tuple[tuple[int, int], ...]
    padded: tuple[PaddedBlocks, ...]
    crosses: tuple[Cross, ...]

    def __len__(self) -> int:
        return int(self.subtree_end.shape[0])

    def visible(self) -> Tensor:
        """[N, N] bool, True where the row's query may see the column's key."""
        index = torch.arange(len(self), device=self.subtree_end.device)
        return (index[None, :] <= index[:, None]) & (index[:, None] < self.subtree_end[None, :])

    def pairs(self) -> int:
        """Visible (query, key) pairs: the arithmetic that no implementation can avoid."""
        index = torch.arange(len(self), device=self.subtree_end.device)
        return int((self.subtree_end - index).sum().item())


def make_plan(
    parent: IntArray,
    subtree_end: IntArray,
    *,
    device: torch.device | str = "cpu",
    method: Method | None = None,
) -> TreePlan:
    """Cuts a packed tree into attention parts, in O(N).

    Args:
        parent: [N] int64, -1 at roots.
        subtree_end: [N] int64, one past the last descendant.
        device: Where the model is.
        method: ``None`` picks ``split`` on CPU, ``flex`` on CUDA and ``dense`` elsewhere.

    Raises:
        ConfigError: the arrays are not a depth-first tree, or ``split`` is asked for off the CPU.
    """
    device = torch.device(device)
    chosen: Method = method or {"cpu": "split", "cuda": "flex"}.get(device.type, "dense")  # type: ignore[assignment]
    if chosen == "split" and device.type != "cpu":
        raise ConfigError(f"tree attention method 'split' runs on CPU, not on {device}: use 'flex' or 'dense'")
    starts, ends, stops = _chains(parent, subtree_end)
    ends_t = torch.as_tensor(subtree_end, dtype=torch.int64, device=device)
    if chosen != "split":
        return TreePlan(ends_t, chosen, (), (), ())
    singles: list[tuple[int, int]] = []
    runs: list[tuple[int, int]] = []
    bushy: list[tuple[int, int]] = []
    crosses: list[Cross] = []
    covered = 0
    for a, b, stop in zip(starts, ends, stops, strict=True):
        if a < covered:
            continue
        if b < stop and stop - a <= DENSE_BLOCK:
            bushy.append((a, stop))
            covered = stop
            continue
        (runs if b - a <= PADDED_CHAIN else singles).append((a, b))
        if b < stop:
            crosses.append(Cross(a, b, stop))
    padded = _padded(runs, len(parent), None) + _padded(bushy, len(parent), subtree_end)
    return TreePlan(ends_t, chosen, tuple(singles), padded, tuple(crosses))


def tree_attention(q: Tensor, k: Tensor, v: Tensor, plan: TreePlan, scale: float) -> Tensor:
    """Attention of every token to itself and its ancestors.

    Args:
        q: [N, H, D]. k, v: [N, K, D], H a multiple of K.
        scale: Factor on q·k.

    Returns:
        [N, H, D].
    """
    if plan.method == "split":
        return cast(Tensor, _SplitAttention.apply(q, k, v, plan, scale))
    q4, k4, v4 = (x.transpose(0, 1)[None] for x in (q, k, v))
    if plan.method == "dense":
        mask = plan.visible()[None, None]
        out = F.scaled_dot_product_attention(q4, k4, v4, attn_mask=mask, scale=scale, enable_gqa=True)
    else:
        out = _flex(q.device.type)(q4, k4, v4, block_mask=_block_mask(plan), scale=scale, enable_gqa=True)
    return out[0].transpose(0, 1)


def register() -> None:
    """Makes ``clawgym_tree`` known to transformers.

    Without a plan it is plain sdpa attention, mask included, so a model switched to it serves every other use as ever.
    """
    AttentionInterface.register(ATTENTION_NAME, _hf_attention)
    AttentionMaskInterface.register(ATTENTION_NAME, sdpa_mask)


@dataclass(slots=True)
class PlanHandover:
    """Carries a plan through a model's keyword arguments and counts the layers that took it.

    The count proves that the model's every attention layer really ran on the tree.
    """

    plan: TreePlan
    layers: int = 0


_REFUSED = ("sliding_window", "softcap", "s_aux", "position_bias")


def _hf_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    tree_plan: PlanHandover | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    if tree_plan is None:
        return cast(
            "tuple[Tensor, Tensor | None]",
            sdpa_attention_forward(
                module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
            ),
        )
    bad = [name for name in _REFUSED if kwargs.get(name) is not None] + (["dropout"] if dropout else [])
    if bad:
        raise ConfigError(f"tree attention computes plain full attention; {type(module).__name__} asks for {bad}")
    if query.shape[0] != 1 or query.shape[2] != len(tree_plan.plan):
        raise ConfigError(f"tree attention takes one packed row of {len(tree_plan.plan)} tokens, got {query.shape}")
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    tree_plan.layers += 1
    return tree_attention(q, k, v, tree_plan.plan, scale)[None], None


def _chains(parent: IntArray, subtree_end: IntArray) -> tuple[list[int], list[int], list[int]]:
    """Starts, ends and subtree ends of all chains; refuses arrays that are not a depth-first tree."""
    n = len(parent)
    if n == 0 or len(subtree_end) != n:
        raise ConfigError(f"a packed tree needs parent and subtree_end of one length > 0, got {n}, {len(subtree_end)}")
    goes_on = np.zeros(n, dtype=np.bool_)
    goes_on[1:] = (parent[1:] == np.arange(n - 1)) & (subtree_end[1:] == subtree_end[:-1])
    starts: list[int] = np.flatnonzero(~goes_on).tolist()
    ends = [*starts[1:], n]
    stops: list[int] = subtree_end[starts].tolist()
    up: list[int] = parent[starts].tolist()
    open_chains: list[tuple[int, int]] = []
    for a, b, stop, p in zip(starts, ends, stops, up, strict=True):
        while open_chains and open_chains[-1][0] <= a:
            open_chains.pop()
        limit, last = open_chains[-1] if open_chains else (n, -1)
        if p != last or not b <= stop <= limit:
            raise ConfigError(f"token {a} breaks depth-first order: parent {p} (expected {last}), subtree_end {stop}")
        open_chains.append((stop, b - 1))
    return starts, ends, stops


def _padded_length(length: int) -> int:
    """Rounds up so that padding stays within about an eighth."""
    step = max(8, 1 << max(0, length.bit_length() - 4))
    return -(-length // step) * step


def _padded(runs: list[tuple[int, int]], n: int, subtree_end: IntArray | None) -> tuple[PaddedBlocks, ...]:
    buckets: dict[int, list[tuple[int, int]]] = {}
    for a, b in runs:
        buckets.setdefault(_padded_length(b - a), []).append((a, b))
    out = []
    for length, members in sorted(buckets.items()):
        bounds = np.array(members, dtype=np.int64)
        length = int((bounds[:, 1] - bounds[:, 0]).max())
        index = bounds[:, :1] + np.arange(length)[None]
        is_padding = index >= bounds[:, 1:]
        gather = np.minimum(index, bounds[:, 1:] - 1)
        mask = None
        if subtree_end is not None:
            key, query = gather[:, None, :], gather[:, :, None]
            seen = (key <= query) & (query < subtree_end[gather][:, None, :]) & ~is_padding[:, None, :]
            mask = torch.zeros(seen.shape).masked_fill_(~torch.from_numpy(seen), -torch.inf)[:, None]
        out.append(
            PaddedBlocks(
                torch.from_numpy(gather.ravel()),
                torch.from_numpy(np.where(is_padding, n, index).ravel()),
                torch.from_numpy(np.flatnonzero(is_padding.ravel())),
                (len(members), length),
                mask,
            )
        )
    return tuple(out)


def _heads_first(x: Tensor, size: tuple[int, int]) -> Tensor:
    """[B*L, H, D] -> [B, H, L, D], a view."""
    return x.view(*size, *x.shape[1:]).transpose(1, 2)


class _SplitAttention(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, plan: TreePlan, scale: float) -> Tensor:
        n, heads, dim = q.shape
        out = q.new_empty(n + 1, heads, dim)
        lse = torch.empty(n + 1, heads, dtype=torch.float64 if q.dtype == torch.float64 else torch.float32)
        for a, b in plan.singles:
            o, part = _attend(q[a:b], k[a:b], v[a:b], scale, causal=True)
            out[a:b], lse[a:b] = o, part
        for block in plan.padded:
            qb, kb, vb = (_heads_first(x.index_select(0, block.gather), block.size) for x in (q, k, v))
            mask = None if block.mask is None else block.mask.to(q.dtype)
            o4, l4 = _flash(qb, kb, vb, 0.0, mask is None, attn_mask=mask, scale=scale)
            out.index_copy_(0, block.scatter, o4.transpose(1, 2).reshape(-1, heads, dim))
            lse.index_copy_(0, block.scatter, l4.transpose(1, 2).reshape(-1, heads))
        for c in plan.crosses:
            below = slice(c.end, c.stop)
            o, part = _attend(q[below], k[c.start : c.end], v[c.start : c.end], scale, causal=False)
            merge_(out[below], lse[below], o, part)
        out, lse = out[:n], lse[:n]
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.plan, ctx.scale = plan, scale
        return out

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        n, scale = q.shape[0], ctx.scale
        dq, dk, dv = (x.new_empty(n + 1, *x.shape[1:]) for x in (q, k, v))
        for a, b in ctx.plan.singles:
            own = slice(a, b)
            parts = _attend_backward(grad[own], q[own], k[own], v[own], out[own], lse[own], scale, causal=True)
            for whole, part in zip((dq, dk, dv), parts, strict=True):
                whole[own] = part
        for block in ctx.plan.padded:
            qb, kb, vb, ob, lb = (
                _heads_first(x.index_select(0, block.gather), block.size) for x in (q, k, v, out, lse[..., None])
            )
            # a padded row must send no gradient: its query is a copy of a real one
            gb = _heads_first(grad.index_select(0, block.gather).index_fill_(0, block.padding, 0.0), block.size)
            mask = None if block.mask is None else block.mask.to(q.dtype)
            grads = _flash_backward(gb, qb, kb, vb, ob, lb[..., 0], 0.0, mask is None, attn_mask=mask, scale=scale)
            for whole, part in zip((dq, dk, dv), grads, strict=True):
                whole.index_copy_(0, block.scatter, part.transpose(1, 2).reshape(-1, *whole.shape[1:]))
        for c in ctx.plan.crosses:
            keys, below = slice(c.start, c.end), slice(c.end, c.stop)
            parts = _attend_backward(
                grad[below], q[below], k[keys], v[keys], out[below], lse[below], scale, causal=False
            )
            for whole, where, part in zip((dq, dk, dv), (below, keys, keys), parts, strict=True):
                whole[where] += part
        return dq[:n], dk[:n], dv[:n], None, None


def _attend(q: Tensor, k: Tensor, v: Tensor, scale: float, *, causal: bool) -> tuple[Tensor, Tensor]:
    """[T, H, D] queries over [S, K, D] keys -> output [T, H, D] and log-sum-exp [T, H]."""
    out, lse = _flash(*(x.transpose(0, 1)[None] for x in (q, k, v)), 0.0, causal, scale=scale)
    return out[0].transpose(0, 1), lse[0].transpose(0, 1)


def _attend_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float, *, causal: bool
) -> tuple[Tensor, ...]:
    g4, q4, k4, v4, o4 = (x.transpose(0, 1)[None] for x in (grad, q, k, v, out))
    grads = _flash_backward(g4, q4, k4, v4, o4, lse.transpose(0, 1)[None], 0.0, causal, scale=scale)
    return tuple(x[0].transpose(0, 1) for x in grads)


def merge_(out: Tensor, lse: Tensor, other: Tensor, other_lse: Tensor) -> None:
    """Adds a partial result over further keys to ``out`` [T, H, D] and ``lse`` [T, H], in place."""
    weight = torch.sigmoid(other_lse - lse)
    out.lerp_(other, weight.to(out.dtype)[..., None])
    torch.logaddexp(lse, other_lse, out=lse)


@cache
def _flex(device_type: str) -> Callable[..., Tensor]:
    """Compiled on CUDA; elsewhere eager, forward only."""
    return cast("Callable[..., Tensor]", torch.compile(flex_attention) if device_type == "cuda" else flex_attention)


def _block_mask(plan: TreePlan) -> BlockMask:
    subtree_end, n = plan.subtree_end, len(plan)

    def visible(b: Tensor, h: Tensor, q_index: Tensor, k_index: Tensor) -> Tensor:
        return (k_index <= q_index) & (q_index < subtree_end[k_index])

    return create_block_mask(visible, None, None, n, n, device=str(subtree_end.device))
