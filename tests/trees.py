"""Trees, policies and references that several tests share.

``packed_trees`` draws trees that capture can produce: calls are attached to a real ``PrefixTree`` in random relation to
earlier ones (continued, re-sampled, rewritten in the middle, started anew), then packed with random calls kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
import torch
from hypothesis import strategies as st
from torch import Tensor, nn
from transformers import Qwen3Config, Qwen3ForCausalLM

from clawgym_env.tree.pack import PackedTree, pack
from clawgym_env.tree.prefix_tree import PrefixTree
from clawgym_env.types import Generation, TokenArray

VOCAB = 5


@dataclass(frozen=True)
class Call:
    """One call: ``prompt`` in full, then what was sampled."""

    prompt: list[int]
    response: list[int]


def tree_of(calls: Sequence[Call], *, log_probs: Sequence[Sequence[float]] | None = None) -> PrefixTree:
    """The prefix tree of calls 0, 1, ...; call k is made by policy version k; log-probs default to -1, -2, ..."""
    tree = PrefixTree()
    for k, call in enumerate(calls):
        size = len(call.response)
        lp = np.array(log_probs[k] if log_probs else -np.arange(1, size + 1), dtype=np.float32)
        generation = Generation(np.array(call.response), lp, np.full(size, k), "stop")
        tree.attach(k, np.array(call.prompt), generation)
    return tree


def packed_of_calls(calls: Sequence[Call], *, keep: frozenset[int] | None = None) -> PackedTree:
    """Packs the tree of some calls."""
    return pack(tree_of(calls), keep_calls=keep)


def tokens(low: int, high: int) -> st.SearchStrategy[list[int]]:
    """Between ``low`` and ``high`` tokens of a small vocabulary, so that prefixes collide."""
    return st.lists(st.integers(0, VOCAB - 1), min_size=low, max_size=high)


@st.composite
def call_lists(draw: st.DrawFn, max_calls: int = 6) -> list[Call]:
    """Calls of one rollout, in the relations that harnesses produce."""
    calls: list[Call] = []
    for _ in range(draw(st.integers(1, max_calls))):
        if calls and draw(st.booleans()):
            base = draw(st.sampled_from(calls))
            history = base.prompt + base.response
            cut = draw(st.integers(1, len(history))) if draw(st.booleans()) else len(history)
            prompt = history[:cut] + draw(tokens(0, 3))
        else:
            prompt = [0, 1, *draw(tokens(0, 4))]
        calls.append(Call(prompt, draw(tokens(1, 4))))
    return calls


@st.composite
def packed_trees(draw: st.DrawFn, max_calls: int = 6, *, keep_all: bool = False) -> PackedTree:
    """A packed tree; unless ``keep_all``, some calls may be dropped (perhaps all)."""
    calls = draw(call_lists(max_calls))
    if keep_all or draw(st.booleans()):
        return packed_of_calls(calls)
    return packed_of_calls(calls, keep=frozenset(draw(st.sets(st.integers(0, len(calls) - 1)))))


def path_of(parent: TokenArray, position: int) -> list[int]:
    """Positions from the root down to ``position``, by walking up."""
    out = []
    while position >= 0:
        out.append(position)
        position = int(parent[position])
    return out[::-1]


def assert_same_tree(a: PackedTree, b: PackedTree) -> None:
    """Field by field, NaN equal to NaN."""
    for f in fields(PackedTree):
        np.testing.assert_array_equal(getattr(a, f.name), getattr(b, f.name), err_msg=f.name)


def tiny_qwen3(vocab: int = VOCAB, *, hidden: int = 32, layers: int = 2, seed: int = 0) -> Qwen3ForCausalLM:
    """A random Qwen3 in eval mode, float32, with logits far from uniform."""
    config = Qwen3Config(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        initializer_range=0.3,
        attn_implementation="sdpa",
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return Qwen3ForCausalLM(config).eval()


class DenseTreeActor(nn.Module):
    """The plainest tree forward: one [N, N] mask. A reference for faster ones."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def tree_log_probs(
        self, tokens: Tensor, parent: Tensor, depth: Tensor, subtree_end: Tensor, targets: Tensor, *, temperature: float
    ) -> Tensor:
        """See ``torchrl_ext.losses.TreeActor``."""
        i = torch.arange(len(tokens))
        mask = (i[None, :] <= i[:, None]) & (i[:, None] < subtree_end[None, :])
        logits = self.model(
            input_ids=tokens[None], attention_mask=mask[None, None], position_ids=depth[None], use_cache=False
        ).logits[0]
        log_probs = (logits[parent[targets]] / temperature).log_softmax(-1)
        return log_probs.gather(-1, tokens[targets][:, None]).squeeze(-1)


class TableActor(nn.Module):
    """Log-probabilities that depend on the token's path alone, without a transformer: for exact, fast properties.

    The logit of a token is ``table[depth % 7, previous token]``; float64.
    """

    def __init__(self, vocab: int = VOCAB, seed: int = 0) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.table = nn.Parameter(torch.randn(7, vocab, vocab, generator=generator, dtype=torch.float64))

    def tree_log_probs(
        self, tokens: Tensor, parent: Tensor, depth: Tensor, subtree_end: Tensor, targets: Tensor, *, temperature: float
    ) -> Tensor:
        """See ``torchrl_ext.losses.TreeActor``."""
        logits = self.table[depth[targets] % 7, tokens[parent[targets]]]
        return (logits / temperature).log_softmax(-1).gather(-1, tokens[targets][:, None]).squeeze(-1)


def path_log_probs(model: nn.Module, ids: Tensor) -> Tensor:
    """[T] log-probabilities of one plain sequence; NaN at the first token."""
    log_probs = model(input_ids=ids[None]).logits[0, :-1].log_softmax(-1).gather(-1, ids[1:, None]).squeeze(-1)
    return torch.cat([log_probs.new_full((1,), torch.nan), log_probs])
