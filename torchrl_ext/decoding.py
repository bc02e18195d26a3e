"""One batched forward step of a Qwen3 model over sequences that live in a slot storage.

A step takes some tokens of several sequences at once: a chunk of a prompt here, one sampled token there. Everything
but attention runs on all T tokens together. Attention has parts whose results merge by log-sum-exp: rows that refer to
the same prefix read it in one kernel call; the rest of all single-token rows is gathered into one more; prompt chunks
and long rests get calls of their own.

Invariant: parameters are read from the model at each step and never copied; log-probabilities equal the model's own to
float32 rounding.

Shapes: T tokens of a step, B single-token rows, H query heads, K key-value heads, D head dim, E width.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
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
    """Query rows ``first..last-1`` see a slot's keys ``start..stop-1``, causally when the keys are their own."""

    first: int
    last: int
    slot: int
    start: int
    stop: int
    causal: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class _Part:
    """A span with its keys and values, a view [1, K, M, D] for each layer."""

    span: _Span
    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]


@dataclass(frozen=True, slots=True, eq=False)
class _Step:
    """Everything about one step that all layers share.

    Attributes:
        tokens, positions: [T] int64. where: [T] int64, rows of the storage to write.
        rest: [B*M] int64, storage rows gathered for the first B rows; rest_mask: [B, 1, 1, M] additive.
        local: Parts that start a row's result, each row in exactly one (or in the gathered rests).
        shared: Parts merged in afterwards.
    """

    tokens: Tensor
    positions: Tensor
    where: Tensor
    rest: Tensor | None
    rest_mask: Tensor | None
    local: tuple[_Part, ...]
    shared: tuple[_Part, ...]


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
    if model.dtype != torch.float32:
        raise ConfigError(f"the embedded engine computes in float32, not in {model.dtype}: convert it, or {instead}")
    if not 1 < max_context <= config.max_position_embeddings:
        raise ConfigError(
            f"max_context {max_context} must lie in 2..{config.max_position_embeddings}, the model's position limit"
        )


class SlotDecoder:
    """Runs steps of a Qwen3 model over a storage of ``slots`` sequences of up to ``max_context`` tokens.

    The storage is [layers, slots * max_context, 2*K*D], keys then values in a row; its pages cost memory once written.
    """

    def __init__(self, model: PreTrainedModel, slots: int, max_context: int):
        check_model(model, max_context)
        c = model.config
        self.model = model
        self.max_context = max_context
        self.heads, self.kv_heads, self.head_dim = c.num_attention_heads, c.num_key_value_heads, c.head_dim
        self.scale = c.head_dim**-0.5
        rows = slots * max_context
        self.storage = _zeros(c.num_hidden_layers, rows, 2 * self.kv_heads * self.head_dim)
        split = self.storage.view(c.num_hidden_layers, 1, rows, 2, self.kv_heads, self.head_dim)
        self.heads_view = split.permute(3, 0, 1, 4, 2, 5)  # [2, layers, 1, K, rows, D]
        self.eps = torch.tensor(c.rms_norm_eps)
        angles = torch.outer(torch.arange(max_context).float(), model.model.rotary_emb.inv_freq.float())
        self.cos = torch.cat([angles.cos(), angles.cos()], -1)[:, None]
        self.sin = torch.cat([-angles.sin(), angles.sin()], -1)[:, None]

    def copy(self, source: Slot, target: Slot, start: int, stop: int) -> None:
        """Copies stored tokens ``start..stop-1`` of ``source``, which has them itself, to ``target``."""
        a, b = source.index * self.max_context, target.index * self.max_context
        self.storage[:, b + start : b + stop] = self.storage[:, a + start : a + stop]

    def forward(self, segments: Sequence[Segment]) -> Tensor:
        """Computes and stores the segments' tokens.

        Returns:
            [S, V] float32 logits after each segment's last token, in the order given.
        """
        bases = {s.slot.base.index for s in segments if s.slot.base is not None}
        order = sorted(range(len(segments)), key=lambda i: _order_key(segments[i], bases))
        ordered = [segments[i] for i in order]
        step = self._plan(ordered, bases)
        body = self.model.model
        cos, sin = self.cos[step.positions], self.sin[step.positions]
        x = F.embedding(step.tokens, body.embed_tokens.weight)
        for i, layer in enumerate(body.layers):
            attn, mlp = layer.self_attn, layer.mlp
            h = self._norm(x, layer.input_layernorm.weight)
            q, k = self._queries_keys(h, attn, cos, sin)
            v = _linear(h, attn.v_proj)
            self.storage[i].index_copy_(0, step.where, torch.cat([k.flatten(1), v], -1))
            x = x + _linear(self._attention(q, i, step).flatten(1), attn.o_proj)
            h = self._norm(x, layer.post_attention_layernorm.weight)
            x = x + _linear(F.silu(_linear(h, mlp.gate_proj)).mul_(_linear(h, mlp.up_proj)), mlp.down_proj)
        last = torch.tensor([s.count for s in ordered]).cumsum(0) - 1
        inverse = torch.empty_like(last)
        inverse[torch.tensor(order)] = last
        return _linear(self._norm(x[inverse], body.norm.weight), self.model.lm_head)

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        """RMS norm over the last axis; on CPU fewer and cheaper kernels than ``F.rms_norm``."""
        square_sum = (x * x).sum(-1, keepdim=True)
        return (x * torch.add(self.eps, square_sum, alpha=1 / x.shape[-1]).rsqrt_()).mul_(weight)

    def _queries_keys(self, h: Tensor, attn: nn.Module, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Normed and rotated queries [T, H, D] and keys [T, K, D], computed as one tensor of H + K heads."""
        x = torch.cat([_linear(h, attn.q_proj), _linear(h, attn.k_proj)], -1).view(h.shape[0], -1, self.head_dim)
        q_weight, k_weight = attn.q_norm.weight, attn.k_norm.weight
        weight = torch.cat([q_weight.expand(self.heads, -1), k_weight.expand(self.kv_heads, -1)])
        x = self._norm(x, weight)
        a, b = x.chunk(2, -1)
        x = torch.addcmul(x * cos, torch.cat([b, a], -1), sin)
        return x[:, : self.heads], x[:, self.heads :]

    def _plan(self, segments: Sequence[Segment], bases: set[int]) -> _Step:
        """Lays out the attention of a step; segments come in ``_order_key`` order, gathered single rows first."""
        c = self.max_context
        counts = np.array([s.count for s in segments])
        starts = np.array([s.slot.length for s in segments])
        offsets = np.repeat(starts - np.cumsum(counts) + counts, counts)
        positions = offsets + np.arange(counts.sum())
        where = positions + np.repeat([s.slot.index * c for s in segments], counts)
        tokens = np.concatenate([s.slot.tokens[s.slot.length : s.slot.length + s.count] for s in segments])

        gathered = [s for s in segments if _is_gathered(s, bases)]
        rest = rest_mask = None
        if gathered:
            cuts = np.array([_shared_part(s.slot, bases)[1] for s in gathered])
            own = starts[: len(gathered)] + 1 - cuts
            column = np.arange(own.max())
            base = np.array([s.slot.index * c for s in gathered]) + cuts
            rest = torch.from_numpy((base[:, None] + np.minimum(column, own[:, None] - 1)).ravel())
            rest_mask = torch.zeros(len(gathered), 1, 1, len(column))
            rest_mask.masked_fill_(torch.from_numpy(column >= own[:, None])[:, None, None], -torch.inf)
        local, shared = (tuple(self._part(span) for span in spans) for spans in _spans(segments, bases))
        as_tensor = torch.from_numpy
        return _Step(as_tensor(tokens), as_tensor(positions), as_tensor(where), rest, rest_mask, local, shared)

    def _part(self, span: _Span) -> _Part:
        row = span.slot * self.max_context
        stored = self.heads_view[:, :, :, :, row + span.start : row + span.stop]
        return _Part(span, stored[0].unbind(0), stored[1].unbind(0))

    def _attention(self, q: Tensor, layer: int, step: _Step) -> Tensor:
        """[T, H, D] queries over what one layer has stored -> [T, H, D]."""
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        lse = torch.empty(q.shape[:2], dtype=torch.float32)
        if step.rest is not None and step.rest_mask is not None:
            rows = step.rest_mask.shape[0]
            stored = self.storage[layer].index_select(0, step.rest)
            k, v = stored.view(rows, -1, 2, self.kv_heads, self.head_dim).permute(2, 0, 3, 1, 4).unbind(0)
            folded = q[:rows].reshape(rows, self.kv_heads, -1, self.head_dim)
            o, part = _flash(folded, k, v, 0.0, False, attn_mask=step.rest_mask, scale=self.scale)
            out[:rows], lse[:rows] = o.reshape(rows, -1, self.head_dim), part.reshape(rows, -1)
        for local in step.local:
            rows_of = slice(local.span.first, local.span.last)
            out[rows_of], lse[rows_of] = self._attend(q[rows_of], local, layer)
        for shared in step.shared:
            rows_of = slice(shared.span.first, shared.span.last)
            merge_(out[rows_of], lse[rows_of], *self._attend(q[rows_of], shared, layer))
        return out

    def _attend(self, q: Tensor, part: _Part, layer: int) -> tuple[Tensor, Tensor]:
        """Output [n, H, D] and log-sum-exp [n, H] of a part's rows ``q`` [n, H, D] over its keys."""
        k, v, n = part.keys[layer], part.values[layer], q.shape[0]
        if part.span.causal:
            o, lse = _flash(q.transpose(0, 1)[None], k, v, 0.0, True, scale=self.scale)
            return o[0].transpose(0, 1), lse[0].transpose(0, 1)
        # the query group joins the rows: each key is read once for all of them
        grouped = q.reshape(n, self.kv_heads, -1, self.head_dim).transpose(0, 1)
        o, lse = _flash(grouped.reshape(1, self.kv_heads, -1, self.head_dim), k, v, 0.0, False, scale=self.scale)
        o = o.view(self.kv_heads, n, -1, self.head_dim).transpose(0, 1)
        return o.reshape(n, -1, self.head_dim), lse.view(self.kv_heads, n, -1).transpose(0, 1).reshape(n, -1)


def _zeros(*shape: int) -> Tensor:
    """Float32 zeros (a masked key must still be a number) whose pages cost nothing until written."""
    try:
        return torch.from_numpy(np.zeros(shape, dtype=np.float32))
    except MemoryError as error:
        gib = 4 * math.prod(shape) / 2**30
        raise ConfigError(f"no {gib:.0f} GiB for keys and values: lower max_slots or max_context") from error


def _linear(x: Tensor, module: nn.Module) -> Tensor:
    """The module's product without the cost of a module call."""
    return F.linear(x, cast(Tensor, module.weight), cast("Tensor | None", module.bias))


def _shared_part(slot: Slot, bases: set[int]) -> tuple[int, int]:
    """The slot and length of the prefix that this slot reads together with others; a base in use is its own base."""
    if slot.base is not None:
        return slot.base.index, slot.cut
    return slot.index, min(slot.pinned(), slot.length) if slot.index in bases else 0


def _is_gathered(segment: Segment, bases: set[int]) -> bool:
    return segment.count == 1 and segment.slot.length + 1 - _shared_part(segment.slot, bases)[1] <= GATHERED_REST


def _order_key(segment: Segment, bases: set[int]) -> tuple[bool, bool, int, int]:
    """Gathered single rows first, grouped by the prefix they share."""
    return not _is_gathered(segment, bases), segment.count > 1, *_shared_part(segment.slot, bases)


def _spans(segments: Sequence[Segment], bases: set[int]) -> tuple[list[_Span], list[_Span]]:
    """Parts that start a row's result, and parts that merge into it: the shared prefix, earlier chunks of a prompt."""
    local: list[_Span] = []
    shared: list[_Span] = []
    row = 0
    for s in segments:
        base, cut = _shared_part(s.slot, bases)
        end, length, index = row + s.count, s.slot.length, s.slot.index
        if s.count > 1:
            local.append(_Span(row, end, index, length, length + s.count, causal=True))
            if length > cut:
                shared.append(_Span(row, end, index, cut, length))
        elif not _is_gathered(s, bases):
            local.append(_Span(row, end, index, cut, length + 1))
        if cut and shared and shared[-1] == _Span(shared[-1].first, row, base, 0, cut):
            shared[-1] = _Span(shared[-1].first, end, base, 0, cut)
        elif cut:
            shared.append(_Span(row, end, base, 0, cut))
        row = end
    return local, shared
