"""One batched forward step of a Qwen3 model over sequences that live in a slot storage.

A step takes some tokens of several sequences at once: a chunk of a prompt here, one sampled token there. Everything but
attention runs on all T tokens together. Attention has parts whose results merge by log-sum-exp: rows that refer to the same
prefix read it in one kernel call; the rest of all single-token rows is gathered into one more; prompt chunks and long rests
get calls of their own.

Invariant: parameters are read from the model at each step and never copied; log-probabilities equal the model's own to
float32 rounding.

Shapes: T tokens of a step, B single-token rows, H query heads, K key-value heads, D head dim, E width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel, Qwen3ForCausalLM

from clawgym_env.errors import ConfigError
from torchrl_ext.attention import merge_
from torchrl_ext.prefix_cache import Slot

GATHERED_REST = 512
"""Single-token rows with more keys of their own than this read them in place: gathering would copy too much."""

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


@dataclass(frozen=True, slots=True, eq=False)
class Segment:
    """The next ``count`` tokens of a slot's sequence, those from ``slot.length`` on."""

    slot: Slot
    count: int


@dataclass(frozen=True, slots=True)
class _Span:
    """Query rows ``first..last-1`` see the stored keys ``start..stop-1`` of a slot; causally when the keys are their own."""

    first: int
    last: int
    slot: int
    start: int
    stop: int
    causal: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class _Step:
    """Everything about one step that all layers share.

    Attributes:
        tokens, positions: [T] int64. where: [T] int64, rows of the storage to write.
        local: Spans that start a row's result, each row in exactly one (or in the gathered rests).
        rest: [B*M] int64, storage rows gathered for the first B rows; rest_mask: [B, 1, 1, M] additive float32.
        shared: Spans merged in afterwards.
    """

    tokens: Tensor
    positions: Tensor
    where: Tensor
    rest: Tensor | None
    rest_mask: Tensor | None
    local: tuple[_Span, ...]
    shared: tuple[_Span, ...]


def check_model(model: PreTrainedModel, max_context: int) -> None:
    """Refuses what the embedded engine does not compute.

    Raises:
        ConfigError: naming the reason and what to use instead.
    """
    config = model.config
    instead = "serve this model with the vLLM engine"
    if not isinstance(model, Qwen3ForCausalLM):
        raise ConfigError(f"the embedded engine runs dense Qwen3 models, not {type(model).__name__}: {instead}")
    if set(config.layer_types) != {"full_attention"}:
        raise ConfigError(f"the embedded engine has no sliding-window attention: {instead}")
    if config.rope_parameters.get("rope_type", "default") != "default" or config.hidden_act != "silu":
        raise ConfigError(f"the embedded engine knows default rotary embeddings and silu only: {instead}")
    if model.device.type != "cpu":
        raise ConfigError(f"the embedded engine runs on CPU, the model is on {model.device}: move it, or {instead}")
    if not 1 < max_context <= config.max_position_embeddings:
        raise ConfigError(
            f"max_context {max_context} must lie in 2..{config.max_position_embeddings}, the model's position limit"
        )


class SlotDecoder:
    """Runs steps of a Qwen3 model over a storage of ``slots`` sequences of up to ``max_context`` tokens.

    The storage is [layers, slots * max_context, 2*K*D], keys then values in a row; its pages cost memory once written.
    """

    def __init__(self, model: Qwen3ForCausalLM, slots: int, max_context: int):
        check_model(model, max_context)
        c = model.config
        self.model = model
        self.max_context = max_context
        self.heads, self.kv_heads, self.head_dim = c.num_attention_heads, c.num_key_value_heads, c.head_dim
        self.scale = c.head_dim**-0.5
        width = 2 * c.num_key_value_heads * c.head_dim
        # zeros, not empty: a masked key must still be a number
        self.storage = torch.zeros(c.num_hidden_layers, slots * max_context, width, dtype=model.dtype)
        angles = torch.outer(torch.arange(max_context).float(), model.model.rotary_emb.inv_freq.float())
        self.cos = torch.cat([angles.cos(), angles.cos()], -1).to(model.dtype)[:, None]
        self.sin = torch.cat([-angles.sin(), angles.sin()], -1).to(model.dtype)[:, None]

    def copy(self, source: Slot, target: Slot, start: int, stop: int) -> None:
        """Copies stored tokens ``start..stop-1`` of ``source``, which has them itself, to ``target``."""
        a, b = source.index * self.max_context, target.index * self.max_context
        self.storage[:, b + start : b + stop] = self.storage[:, a + start : a + stop]

    def forward(self, segments: Sequence[Segment]) -> Tensor:
        """Computes and stores the segments' tokens.

        Returns:
            [S, V] float32 logits after each segment's last token, in the order given.
        """
        order = sorted(range(len(segments)), key=lambda i: _order_key(segments[i]))
        ordered = [segments[i] for i in order]
        step = self._plan(ordered)
        body = self.model.model
        cos, sin = self.cos[step.positions], self.sin[step.positions]
        x = F.embedding(step.tokens, body.embed_tokens.weight)
        eps = self.model.config.rms_norm_eps
        for i, layer in enumerate(body.layers):
            attn, mlp = layer.self_attn, layer.mlp
            h = F.rms_norm(x, x.shape[-1:], layer.input_layernorm.weight, eps)
            q = attn.q_proj(h).view(-1, self.heads, self.head_dim)
            k = attn.k_proj(h).view(-1, self.kv_heads, self.head_dim)
            q = F.rms_norm(q, (self.head_dim,), attn.q_norm.weight, eps)
            k = F.rms_norm(k, (self.head_dim,), attn.k_norm.weight, eps)
            q, k = self._rotate(torch.cat([q, k], 1), cos, sin).split([self.heads, self.kv_heads], 1)
            self.storage[i].index_copy_(0, step.where, torch.cat([k.flatten(1), attn.v_proj(h)], -1))
            x = x + attn.o_proj(self._attention(q, self.storage[i], step).flatten(1))
            h = F.rms_norm(x, x.shape[-1:], layer.post_attention_layernorm.weight, eps)
            x = x + mlp.down_proj(F.silu(mlp.gate_proj(h)).mul_(mlp.up_proj(h)))
        last = torch.tensor([s.count for s in ordered]).cumsum(0) - 1
        inverse = torch.empty(len(order), dtype=torch.int64)
        inverse[torch.tensor(order)] = last
        h = F.rms_norm(x[inverse], x.shape[-1:], body.norm.weight, eps)
        return self.model.lm_head(h).float()

    def _rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Rotary embedding of [T, H, D]; ``sin`` carries the sign of the half it multiplies."""
        a, b = x.chunk(2, -1)
        return torch.addcmul(x * cos, torch.cat([b, a], -1), sin)

    def _plan(self, segments: Sequence[Segment]) -> _Step:
        """Lays out the attention of a step; segments come in ``_order_key`` order, gathered single rows first."""
        c = self.max_context
        counts = np.array([s.count for s in segments])
        starts = np.array([s.slot.length for s in segments])
        offsets = np.repeat(starts - np.cumsum(counts) + counts, counts)
        positions = offsets + np.arange(counts.sum())
        where = positions + np.repeat([s.slot.index * c for s in segments], counts)
        tokens = np.concatenate([s.slot.tokens[s.slot.length : s.slot.length + s.count] for s in segments])

        gathered = [s for s in segments if _is_gathered(s)]
        rest = rest_mask = None
        if gathered:
            cuts = np.array([_shared_part(s.slot)[1] for s in gathered])
            own = starts[: len(gathered)] + 1 - cuts
            column = np.arange(own.max())
            base = np.array([s.slot.index * c for s in gathered]) + cuts
            rest = torch.from_numpy((base[:, None] + np.minimum(column, own[:, None] - 1)).ravel())
            rest_mask = torch.zeros(len(gathered), 1, 1, len(column), dtype=self.storage.dtype)
            rest_mask.masked_fill_(torch.from_numpy(column >= own[:, None])[:, None, None], -torch.inf)
        local, shared = _spans(segments)
        as_tensor = torch.from_numpy
        return _Step(as_tensor(tokens), as_tensor(positions), as_tensor(where), rest, rest_mask, local, shared)

    def _attention(self, q: Tensor, stored: Tensor, step: _Step) -> Tensor:
        """[T, H, D] queries over one layer's storage [slots * max_context, 2*K*D] -> [T, H, D]."""
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        lse = torch.empty(q.shape[:2], dtype=torch.float32)
        if step.rest is not None and step.rest_mask is not None:
            rows = step.rest_mask.shape[0]
            k, v = self._keys_values(stored.index_select(0, step.rest).view(rows, -1, stored.shape[-1]))
            folded = q[:rows].reshape(rows, self.kv_heads, -1, self.head_dim)
            o, part = _flash(folded, k, v, 0.0, False, attn_mask=step.rest_mask, scale=self.scale)
            out[:rows], lse[:rows] = o.reshape(rows, -1, self.head_dim), part.reshape(rows, -1)
        for span in step.local:
            out[span.first : span.last], lse[span.first : span.last] = self._attend(q, stored, span)
        for span in step.shared:
            merge_(out[span.first : span.last], lse[span.first : span.last], *self._attend(q, stored, span))
        return out

    def _attend(self, q: Tensor, stored: Tensor, span: _Span) -> tuple[Tensor, Tensor]:
        """Output [n, H, D] and log-sum-exp [n, H] of a span's rows over its keys."""
        row = span.slot * self.max_context
        k, v = self._keys_values(stored[row + span.start : row + span.stop][None])
        queries, n = q[span.first : span.last], span.last - span.first
        if span.causal:
            o, lse = _flash(queries.transpose(0, 1)[None], k, v, 0.0, True, scale=self.scale)
            return o[0].transpose(0, 1), lse[0].transpose(0, 1)
        # the query group joins the rows: each key is read once for all of them
        grouped = queries.view(n, self.kv_heads, -1, self.head_dim).transpose(0, 1)
        folded = grouped.reshape(1, self.kv_heads, -1, self.head_dim)
        o, lse = _flash(folded, k, v, 0.0, False, scale=self.scale)
        o = o.view(self.kv_heads, n, -1, self.head_dim).transpose(0, 1)
        return o.reshape(n, -1, self.head_dim), lse.view(self.kv_heads, n, -1).transpose(0, 1).reshape(n, -1)

    def _keys_values(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """[B, M, 2*K*D] storage rows -> keys and values [B, K, M, D], views."""
        split = rows.view(*rows.shape[:2], 2, self.kv_heads, self.head_dim)
        return split[:, :, 0].transpose(1, 2), split[:, :, 1].transpose(1, 2)


def _shared_part(slot: Slot) -> tuple[int, int]:
    """The storage row and length of the prefix that this slot reads together with others; a base is its own base."""
    if slot.base is not None:
        return slot.base.index, slot.cut
    return slot.index, min(slot.pinned(), slot.length)


def _is_gathered(segment: Segment) -> bool:
    return segment.count == 1 and segment.slot.length + 1 - _shared_part(segment.slot)[1] <= GATHERED_REST


def _order_key(segment: Segment) -> tuple[bool, bool, int, int]:
    """Gathered single rows first, grouped by the prefix they share."""
    return not _is_gathered(segment), segment.count > 1, *_shared_part(segment.slot)


def _spans(segments: Sequence[Segment]) -> tuple[tuple[_Span, ...], tuple[_Span, ...]]:
    local: list[_Span] = []
    shared: list[_Span] = []
    row = 0
    for s in segments:
        base, cut = _shared_part(s.slot)
        end, length, index = row + s.count, s.slot.length, s.slot.index
        if s.count > 1:
            local.append(_Span(row, end, index, length, length + s.count, causal=True))
            if length > cut:
                shared.append(_Span(row, end, index, cut, length))
        elif not _is_gathered(s):
            local.append(_Span(row, end, index, cut, length + 1))
        previous = shared[-1] if shared else None
        if cut and previous and previous.last == row and (previous.slot, previous.start, previous.stop) == (base, 0, cut):
            shared[-1] = _Span(previous.first, end, base, 0, cut)
        elif cut:
            shared.append(_Span(row, end, base, 0, cut))
        row = end
    return tuple(local), tuple(shared)
