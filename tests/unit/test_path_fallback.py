"""Models whose layers cannot take a tree mask are trained path by path, to the same result."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.testing import assert_close
from transformers import (
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)

from tests.trees import VOCAB, Call, packed_of_calls, path_log_probs, path_of
from torchrl_ext import models
from torchrl_ext.models import tree_log_probs

TINY: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2,
    "num_key_value_heads": 2, "head_dim": 16, "initializer_range": 0.3,
}  # fmt: skip


def _windowed() -> PreTrainedModel:
    config = Qwen3Config(**TINY, num_hidden_layers=2, use_sliding_window=True, sliding_window=3, max_window_layers=1)
    return Qwen3ForCausalLM(config).eval()


def _all_windowed() -> PreTrainedModel:
    return MistralForCausalLM(MistralConfig(**TINY, num_hidden_layers=1, sliding_window=3)).eval()


def _linear() -> PreTrainedModel:
    config = Qwen3NextConfig(
        **TINY, num_hidden_layers=2, layer_types=["linear_attention", "full_attention"], linear_num_key_heads=2,
        linear_num_value_heads=2, linear_key_head_dim=8, linear_value_head_dim=8, num_experts=2,
        num_experts_per_tok=1, moe_intermediate_size=16, shared_expert_intermediate_size=16,
    )  # fmt: skip
    return Qwen3NextForCausalLM(config).eval()


@pytest.mark.parametrize("make", [_windowed, _all_windowed, _linear])
def test_layers_without_a_tree_mask_are_run_path_by_path(
    make: Callable[[], PreTrainedModel], caplog: pytest.LogCaptureFixture
) -> None:
    """The same log-probs and gradients as each path alone, on a forest; said once."""
    torch.manual_seed(0)
    model = make()
    calls = [
        Call([0, 1, 2, 3], [2]),
        Call([0, 1, 2, 3, 2, 4, 1], [1, 3]),
        Call([0, 1, 2, 3, 2, 1], [2, 2]),
        Call([3], [1]),
    ]
    packed = packed_of_calls(calls)
    arrays = [torch.from_numpy(a) for a in (packed.tokens, packed.parent, packed.depth, packed.subtree_end)]
    targets = torch.from_numpy(packed.trainable).nonzero().squeeze(-1)
    models._say_paths.cache_clear()
    found = tree_log_probs(model, *arrays, targets)
    alone = torch.stack([path_log_probs(model, arrays[0][path_of(packed.parent, int(t))])[-1] for t in targets])
    assert_close(found, alone, rtol=1e-4, atol=1e-5)
    weight = torch.linspace(-1, 1, len(targets))
    parameters = [p for p in model.parameters() if p.requires_grad]
    a, b = (torch.autograd.grad((x * weight).sum(), parameters, allow_unused=True) for x in (found, alone))
    a, b = (torch.cat([g.reshape(-1) for g in grads if g is not None]) for grads in (a, b))
    assert float((a - b).norm()) <= 1e-5 * float(b.norm())
    assert [r.getMessage().partition(":")[0] for r in caplog.records if r.name == models.__name__] == [
        f"{type(model).__name__} has {models.other_layers(model)} layers"
    ]
