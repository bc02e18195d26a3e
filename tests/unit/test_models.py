"""Policies: created, saved, loaded; models whose attention is not plain are refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    BloomConfig,
    BloomForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    PreTrainedTokenizerFast,
)

from clawgym_env.errors import ConfigError
from torchrl_ext.models import PolicyConfig, create_policy, load_policy, save_policy, tree_log_probs

SMALL = PolicyConfig(vocab_size=40, width=32, layers=2, heads=4, kv_heads=2, head_dim=16, ff_width=48)
CHAIN = (torch.arange(4), torch.arange(-1, 3), torch.arange(4), torch.full((4,), 4))


@pytest.fixture
def tokenizer_dir(tmp_path: Path) -> Path:
    raw = Tokenizer(models.WordLevel({"<unk>": 0, "a": 1, "b": 2}, unk_token="<unk>"))
    raw.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=raw, unk_token="<unk>").save_pretrained(tmp_path / "tok")
    return tmp_path / "tok"


def test_default_policy_has_the_stated_size() -> None:
    model = create_policy()
    assert sum(p.numel() for p in model.parameters()) == pytest.approx(2.0e6, rel=0.05)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert model.config.max_position_embeddings == 4096


def test_seed_decides_the_weights_and_the_global_state_stays() -> None:
    state = torch.random.get_rng_state()
    a, b = create_policy(SMALL), create_policy(SMALL)
    c = create_policy(PolicyConfig(**{f: getattr(SMALL, f) for f in SMALL.__slots__ if f != "seed"}, seed=1))
    assert torch.equal(torch.random.get_rng_state(), state)
    assert all(torch.equal(x, y) for x, y in zip(a.parameters(), b.parameters(), strict=True))
    assert not torch.equal(a.lm_head.weight, c.lm_head.weight)


def test_odd_head_counts_are_refused() -> None:
    with pytest.raises(ConfigError, match="kv_heads"):
        create_policy(PolicyConfig(heads=4, kv_heads=3))


def test_saved_policy_loads_through_the_auto_classes(tmp_path: Path, tokenizer_dir: Path) -> None:
    model = create_policy(SMALL)
    tree_log_probs(model, *CHAIN)  # switches the attention, which must not end up in the folder
    out = save_policy(model, tokenizer_dir, tmp_path / "run" / "policy")
    again = AutoModelForCausalLM.from_pretrained(out)
    assert AutoTokenizer.from_pretrained(out)("a b a").input_ids == [1, 2, 1]
    for loaded in (again, load_policy(out)):
        assert loaded.config._attn_implementation == "sdpa"
        torch.testing.assert_close(loaded(torch.arange(9)[None]).logits, model(torch.arange(9)[None]).logits)
    save_policy(model, out, out)  # in place, as a later checkpoint does
    assert AutoTokenizer.from_pretrained(out)("b").input_ids == [2]


def test_missing_checkpoint_and_tokenizer_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config\.json"):
        load_policy(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "qwen3"}')
    with pytest.raises(ConfigError, match="cannot load"):
        load_policy(tmp_path)
    with pytest.raises(ConfigError, match="no tokenizer"):
        save_policy(create_policy(SMALL), tmp_path, tmp_path / "out")


def test_bfloat16_weights_load_as_float32_unless_asked(tmp_path: Path, tokenizer_dir: Path) -> None:
    out = save_policy(create_policy(SMALL).bfloat16(), tokenizer_dir, tmp_path / "p")
    assert load_policy(out).dtype == torch.float32
    assert load_policy(out, dtype=torch.bfloat16).dtype == torch.bfloat16


def test_soft_capped_logits_are_refused() -> None:
    gemma = Gemma2ForCausalLM(
        Gemma2Config(
            vocab_size=40, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2,
            num_key_value_heads=2, head_dim=16, layer_types=["full_attention"],
        )
    )  # fmt: skip
    with pytest.raises(ConfigError, match="final_logit_softcapping"):
        tree_log_probs(gemma, *CHAIN)


def test_dropout_is_refused_in_training_mode() -> None:
    model = create_policy(SMALL).train()
    model.model.layers[1].self_attn.attention_dropout = 0.1
    with pytest.raises(ConfigError, match="dropout"):
        tree_log_probs(model, *CHAIN)


def test_attention_of_its_own_kind_is_refused() -> None:
    bloom = BloomForCausalLM(BloomConfig(vocab_size=40, hidden_size=32, n_layer=1, n_head=2))
    with pytest.raises(ConfigError, match="AttentionInterface"):
        tree_log_probs(bloom, *CHAIN)


def test_a_layer_that_drops_the_plan_is_noticed() -> None:
    model = create_policy(SMALL)
    layer = model.model.layers[1].self_attn
    whole = layer.forward
    layer.forward = lambda *args, tree_plan, **kwargs: whole(*args, **kwargs)
    with pytest.raises(ConfigError, match="1 of 2 layers"):
        tree_log_probs(model, *CHAIN)


def test_bad_targets_and_temperature_are_refused() -> None:
    model = create_policy(SMALL)
    with pytest.raises(ConfigError, match="root"):
        tree_log_probs(model, *CHAIN, torch.tensor([0]))
    with pytest.raises(ConfigError, match="temperature"):
        tree_log_probs(model, *CHAIN, temperature=0.0)
