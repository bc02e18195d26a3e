"""Policies: a small Qwen3 to start from, local checkpoints, and log-probabilities over a packed prefix tree.

The model is an unchanged Hugging Face causal LM. One forward over the N unique tokens of a tree gives, for every token,
the log-probability that the per-path forwards would give it: the predictor of token ``t`` is ``parent[t]``, position
ids are depths, and attention follows the tree (``torchrl_ext.attention``).

Invariant: only the rows that predict a target reach the LM head, in chunks recomputed in backward; [N, V] never exists.

Shapes: N unique tokens, M targets, V vocabulary, E hidden width.
"""

from __future__ import annotations

import logging
import shutil
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from clawgym_env.errors import ConfigError
from torchrl_ext.attention import ATTENTION_NAME, PlanHandover, TreePlan, make_plan, register

logger = logging.getLogger(__name__)

HEAD_CHUNK_ELEMENTS = 1 << 22
"""Logits that exist at once (16 MiB in float32: bigger chunks spend their time in fresh pages)."""
HEAD_CHUNK_ROWS = 128
"""At least so many rows a chunk: fewer make the head's matrix product inefficient."""

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
)
_LOGIT_TRANSFORMS = ("final_logit_softcapping", "logit_scale", "logits_scaling", "lm_head_multiplier")


@dataclass(frozen=True, slots=True)
class PolicyConfig:
    """Shape of a Qwen3 policy; the defaults make about 1.9 million parameters, which two CPU cores train in minutes.

    Attributes:
        vocab_size: Rows of the embedding, at least the tokenizer's size.
        max_positions: Longest context in tokens.
        init_std: Standard deviation of the initial weights; narrow models want more than the usual 0.02.
    """

    vocab_size: int = 2048
    width: int = 192
    layers: int = 4
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 48
    ff_width: int = 512
    max_positions: int = 4096
    tie_embeddings: bool = True
    init_std: float = 0.03
    seed: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class TreeScores:
    """Scores of M target tokens.

    Attributes:
        log_probs: [M] float32 (float64 for a float64 model), with gradient.
        entropy: [M], of the distribution that each target was scored under, with gradient; ``None`` unless asked for.
    """

    log_probs: Tensor
    entropy: Tensor | None


def create_policy(config: PolicyConfig | None = None) -> Qwen3ForCausalLM:
    """Makes a freshly initialised Qwen3 on CPU in float32; the global random state is left alone.

    Raises:
        ConfigError: head counts that do not divide.
    """
    c = config or PolicyConfig()
    if c.heads % c.kv_heads or c.head_dim % 2:
        raise ConfigError(f"heads must be a multiple of kv_heads and head_dim even, got {c}")
    shape = Qwen3Config(
        vocab_size=c.vocab_size,
        hidden_size=c.width,
        num_hidden_layers=c.layers,
        num_attention_heads=c.heads,
        num_key_value_heads=c.kv_heads,
        head_dim=c.head_dim,
        intermediate_size=c.ff_width,
        max_position_embeddings=c.max_positions,
        tie_word_embeddings=c.tie_embeddings,
        initializer_range=c.init_std,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(c.seed)
        return Qwen3ForCausalLM(shape)


def load_policy(path: str | Path, *, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """Loads a causal LM from a local folder; nothing is fetched from a hub.

    Raises:
        ConfigError: no checkpoint there, or one that transformers cannot read.
    """
    folder = Path(path)
    if not (folder / "config.json").is_file():
        raise ConfigError(f"no Hugging Face checkpoint at {folder}: it needs config.json and model weights")
    try:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"cannot load a causal LM from {folder}: {error}") from error
    return cast(PreTrainedModel, model)


def save_policy(model: PreTrainedModel, tokenizer_dir: str | Path, out: str | Path) -> Path:
    """Writes weights, config and tokenizer so that transformers' Auto classes load the folder.

    Args:
        tokenizer_dir: Folder that holds the tokenizer's files.

    Raises:
        ConfigError: ``tokenizer_dir`` holds no tokenizer.
    """
    source, target = Path(tokenizer_dir), Path(out)
    files = [source / name for name in TOKENIZER_FILES if (source / name).is_file()]
    if not any(f.name in ("tokenizer.json", "tokenizer.model", "vocab.json") for f in files):
        raise ConfigError(f"no tokenizer in {source}: expected tokenizer.json, tokenizer.model or vocab.json")
    target.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(target)
    for file in files:
        if file.resolve() != (target / file.name).resolve():
            shutil.copyfile(file, target / file.name)
    return target


def tree_hidden_states(model: PreTrainedModel, tokens: Tensor, depth: Tensor, plan: TreePlan) -> Tensor:
    """Final hidden state (after the last norm) of every token of a packed tree.

    A model with layers that cannot take a tree mask is run path by path (``path_hidden_states``). Of any other the
    attention is switched to tree attention, which without a plan is sdpa, and stays so: recomputation under
    gradient checkpointing needs it in backward.

    Args:
        model: Any Hugging Face causal LM, or its trunk.
        tokens: [N] int64. depth: [N] int64, used as position ids.

    Returns:
        [N, E].

    Raises:
        ConfigError: the model transforms its logits, or its attention is neither plain nor told in its config.
    """
    check_tree_support(model)
    kinds = other_layers(model)
    if kinds:
        _say_paths(type(model).__name__, kinds)
        return path_hidden_states(model, tokens, depth, plan.subtree_end)
    _switch_attention(model)
    handover = PlanHandover(plan)
    # a 4-D mask is handed on untouched: transformers then builds none of its own
    placeholder = torch.zeros(1, 1, 1, 1, dtype=torch.bool, device=tokens.device)
    out = model.base_model(
        input_ids=tokens[None],
        attention_mask=placeholder,
        position_ids=depth[None],
        use_cache=False,
        tree_plan=handover,
    )
    if handover.layers < model.config.num_hidden_layers:
        raise ConfigError(
            f"{type(model).__name__} ran {handover.layers} of {model.config.num_hidden_layers} layers on the tree: its "
            "attention does not hand keyword arguments on; train on call rows instead"
        )
    return cast(Tensor, out.last_hidden_state[0])


def path_hidden_states(model: PreTrainedModel, tokens: Tensor, depth: Tensor, subtree_end: Tensor) -> Tensor:
    """As ``tree_hidden_states``, one root-to-leaf path after another: a shared prefix is computed once a leaf.

    A path's states are kept from where it leaves the path before it, so that in depth-first order they follow each
    other, and each token has one.

    Args:
        tokens, depth, subtree_end: [N] int64, a packed forest.
    """
    index = torch.arange(len(tokens), device=tokens.device)
    states, done = [], 0
    for leaf in (subtree_end == index + 1).nonzero().squeeze(-1).tolist():
        path = (subtree_end[: leaf + 1] > leaf).nonzero().squeeze(-1)
        out = model.base_model(input_ids=tokens[path][None], position_ids=depth[path][None], use_cache=False)
        states.append(out.last_hidden_state[0, len(path) - (leaf + 1 - done) :])
        done = leaf + 1
    return torch.cat(states)


def tree_scores(
    model: PreTrainedModel,
    tokens: Tensor,
    parent: Tensor,
    depth: Tensor,
    subtree_end: Tensor,
    targets: Tensor | None = None,
    *,
    temperature: float = 1.0,
    with_entropy: bool = False,
    plan: TreePlan | None = None,
) -> TreeScores:
    """Log-probability of each target given its ancestors, and optionally the entropy of its distribution.

    Args:
        tokens, parent, depth, subtree_end: [N] int64, a packed tree or forest (``clawgym_env.tree.pack``).
        targets: [M] int64, packed indices of the tokens to score; ``None``: all tokens that have a parent.
        temperature: Logits are divided by it, > 0.
        plan: Made by ``make_plan``; built here when not given. Give it when scoring one batch several times.

    Raises:
        ConfigError: a target without a predictor, a temperature <= 0, or an unsupported model.
    """
    if temperature <= 0:
        raise ConfigError(f"temperature must be > 0 to score tokens, got {temperature}: greedy rollouts score at 1.0")
    if targets is None:
        targets = torch.nonzero(parent >= 0)[:, 0]
    rows = parent[targets]
    if bool((rows < 0).any()):
        raise ConfigError("a root token has no predictor: leave it out of targets")
    if plan is None:
        plan = make_plan(parent.cpu().numpy(), subtree_end.cpu().numpy(), device=tokens.device)
    hidden = tree_hidden_states(model, tokens, depth, plan)
    return score_hidden(model, hidden.index_select(0, rows), tokens[targets], temperature, with_entropy=with_entropy)


def score_hidden(
    model: PreTrainedModel, hidden: Tensor, tokens: Tensor, temperature: float = 1.0, *, with_entropy: bool = False
) -> TreeScores:
    """Scores tokens from the states that predict them, for a trunk that serves more than the LM head.

    Args:
        hidden: [M, E] final hidden states.
        tokens: [M] int64, what each is to predict.
    """
    return _score(hidden, cast(nn.Module, model.get_output_embeddings()), tokens, temperature, with_entropy)


def tree_log_probs(
    model: PreTrainedModel,
    tokens: Tensor,
    parent: Tensor,
    depth: Tensor,
    subtree_end: Tensor,
    targets: Tensor | None = None,
    *,
    temperature: float = 1.0,
    plan: TreePlan | None = None,
) -> Tensor:
    """The log-probabilities of ``tree_scores``: [M]."""
    return tree_scores(model, tokens, parent, depth, subtree_end, targets, temperature=temperature, plan=plan).log_probs


def _switch_attention(model: PreTrainedModel) -> None:
    if model.config._attn_implementation == ATTENTION_NAME:
        return
    if not model._can_set_attn_implementation():
        raise ConfigError(
            f"{type(model).__name__}'s attention does not use transformers' AttentionInterface: train on call rows"
        )
    register()
    model.set_attn_implementation(ATTENTION_NAME)


def other_layers(model: PreTrainedModel) -> tuple[str, ...]:
    """Kinds of layers that cannot take a tree mask: linear attention, sliding windows and the like."""
    config = model.config
    kinds = set(getattr(config, "layer_types", None) or ()) - {"full_attention"}
    windowed = getattr(config, "sliding_window", None) is not None and getattr(config, "use_sliding_window", True)
    if windowed and not getattr(config, "layer_types", None):
        kinds.add("sliding_attention")
    return tuple(sorted(kinds))


@cache
def _say_paths(model: str, kinds: tuple[str, ...]) -> None:
    """Once a kind of model."""
    logger.warning("%s has %s layers: its trees are run path by path, shared prefixes once a leaf", model, kinds)


def check_tree_support(model: PreTrainedModel) -> None:
    """Refuses models whose logits are not the plain ones.

    Raises:
        ConfigError: naming what the model does otherwise.
    """
    config = model.config
    extra = [name for name in _LOGIT_TRANSFORMS if getattr(config, name, None) not in (None, 1, 1.0)]
    if extra:
        raise ConfigError(f"{type(model).__name__} transforms its logits ({extra}): tree scoring does not")


def _score(hidden: Tensor, head: nn.Module, tokens: Tensor, temperature: float, with_entropy: bool) -> TreeScores:
    """Scores [M, E] predictor states against [M] tokens, a chunk of rows at a time."""
    vocab = cast(Tensor, head.weight).shape[0]
    rows = max(HEAD_CHUNK_ROWS, HEAD_CHUNK_ELEMENTS // vocab)
    log_probs, entropies = [], []
    for start in range(0, len(tokens), rows):
        part = slice(start, start + rows)
        if torch.is_grad_enabled():
            scores = checkpoint(
                _score_chunk,
                hidden[part],
                head,
                tokens[part],
                temperature,
                with_entropy,
                use_reentrant=False,
                preserve_rng_state=False,
            )
        else:
            scores = _score_chunk(hidden[part], head, tokens[part], temperature, with_entropy)
        log_probs.append(scores[0])
        entropies.append(scores[1])
    if not log_probs:
        empty = hidden.new_zeros(0)
        return TreeScores(empty, empty if with_entropy else None)
    return TreeScores(torch.cat(log_probs), torch.cat(entropies) if with_entropy else None)


def _score_chunk(
    hidden: Tensor, head: nn.Module, tokens: Tensor, temperature: float, with_entropy: bool
) -> tuple[Tensor, Tensor]:
    logits = head(hidden)
    logits = logits if logits.dtype == torch.float64 else logits.float()
    if temperature != 1.0:
        logits = logits / temperature
    if not with_entropy:
        log_probs = -F.cross_entropy(logits, tokens, reduction="none")
        return log_probs, log_probs
    normalised = logits.log_softmax(-1)
    return normalised.gather(-1, tokens[:, None])[:, 0], -(normalised.exp() * normalised).sum(-1)
