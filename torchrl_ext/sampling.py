"""Draws one token a row under the row's own settings, with its log-probability in the distribution drawn from.

Invariant: a row's draw depends on its logits, its settings and its own uniform number only, so the other rows of a
batch cannot change it.

Shapes: B rows, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor


def filter_logits(logits: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """Masks what top-k and then top-p leave out.

    Args:
        logits: [B, V], already divided by the temperature.
        top_k: [B] int64, tokens kept; 0 keeps all.
        top_p: [B] float in (0, 1]: keeps the smallest set of most likely tokens (of those that top-k left) with at
            least this mass.

    Returns:
        [B, V], -inf where masked; at least one token a row stays.
    """
    ordered, index = logits.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(logits.shape[-1], device=logits.device)
    ordered = ordered.masked_fill((rank[None] >= top_k[:, None]) & (top_k[:, None] > 0), -torch.inf)
    probs = ordered.softmax(-1)
    mass_before = probs.cumsum(-1) - probs
    ordered = ordered.masked_fill((mass_before >= top_p[:, None]) & (rank[None] > 0), -torch.inf)
    return torch.empty_like(logits).scatter_(-1, index, ordered)


def draw(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor]:
    """Samples by inverting the cumulative distribution.

    Args:
        logits: [B, V] float32.
        temperature: [B]; 0 takes the most likely token and scores it under the untempered distribution.
        top_k: [B] int64. top_p: [B]. Both are ignored where the temperature is 0.
        uniform: [B] float64 in [0, 1).

    Returns:
        Tokens [B] int64 and their log-probabilities [B] float32 after temperature, top-k and top-p.
    """
    greedy = temperature == 0
    scale = torch.where(greedy, 1.0, temperature)
    if bool((scale != 1).any()):
        logits = logits / scale[:, None]
    filtered = torch.nonzero(((top_k > 0) | (top_p < 1)) & ~greedy)[:, 0]
    if len(filtered):
        kept = filter_logits(logits[filtered], top_k[filtered], top_p[filtered])
        logits = logits.index_copy(0, filtered, kept)
    log_probs = logits.log_softmax(-1)
    cumulative = log_probs.double().exp().cumsum(-1)
    drawn = torch.searchsorted(cumulative, (uniform * cumulative[:, -1])[:, None], right=True)[:, 0]
    tokens = torch.where(greedy, logits.argmax(-1), drawn.clamp(max=logits.shape[-1] - 1))
    return tokens, log_probs.gather(-1, tokens[:, None])[:, 0]
