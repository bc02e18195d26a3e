"""Attention and log-probabilities on packed trees: equal to the dense mask, and to each path run alone."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from clawgym_env.errors import ConfigError
from clawgym_env.types import TokenArray
from tests import forests
from torchrl_ext import attention
from torchrl_ext.attention import make_plan, tree_attention
from torchrl_ext.models import PolicyConfig, create_policy, tree_log_probs, tree_scores

VOCAB = 31


def tree_arrays(parent: TokenArray) -> tuple[TokenArray, TokenArray]:
    """(depth, subtree_end) of depth-first parents."""
    n = len(parent)
    depth, end = np.zeros(n, dtype=np.int64), np.arange(1, n + 1)
    for i in range(n):
        depth[i] = depth[parent[i]] + 1 if parent[i] >= 0 else 0
    for i in range(n - 1, 0, -1):
        if parent[i] >= 0:
            end[parent[i]] = max(end[parent[i]], end[i])
    return depth, end


def comb(spine: int) -> TokenArray:
    """A spine with a one-token branch before each of its tokens: the worst case for cutting into chains."""
    parent = [-1]
    last = 0
    for _ in range(spine):
        parent += [last, last]
        last = len(parent) - 1
    return np.array(parent, dtype=np.int64)


def star(branches: int, stem: int = 3) -> TokenArray:
    return np.array([*range(-1, stem - 1), *[stem - 1] * branches], dtype=np.int64)


def chain(n: int) -> TokenArray:
    return np.arange(-1, n - 1)


def random_parents(n: int, fork: float, root: float, seed: int) -> TokenArray:
    """Those of a random forest; see :func:`forests.random_parents`."""
    return np.array(forests.random_parents(n, fork, root, np.random.default_rng(seed)), dtype=np.int64)


parents = st.builds(
    random_parents,
    n=st.integers(1, 120),
    fork=st.sampled_from([0.0, 0.05, 0.3, 0.9]),
    root=st.sampled_from([0.0, 0.02]),
    seed=st.integers(0, 2**32 - 1),
)


def both(parent: TokenArray, scale: float = 0.25) -> list[tuple[Tensor, Tensor]]:
    """(split, dense) of the output and the three gradients, in float64."""
    _, end = tree_arrays(parent)
    generator = torch.Generator().manual_seed(len(parent))
    q, k, v = (
        torch.randn(len(parent), heads, 16, dtype=torch.float64, generator=generator).requires_grad_()
        for heads in (4, 2, 2)
    )
    grad = torch.randn(q.shape, dtype=torch.float64, generator=generator)
    results = []
    for method in ("split", "dense"):
        out = tree_attention(q, k, v, make_plan(parent, end, method=method), scale)
        results.append([out, *torch.autograd.grad(out, (q, k, v), grad)])
    return list(zip(*results, strict=True))


@settings(max_examples=60, deadline=None)
@given(parent=parents, block=st.sampled_from([1, 8, 128]), long_chain=st.sampled_from([4, 512]))
def test_split_equals_dense(parent: TokenArray, block: int, long_chain: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "DENSE_BLOCK", block)
        patch.setattr(attention, "PADDED_CHAIN", long_chain)
        for split, dense in both(parent):
            torch.testing.assert_close(split, dense, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("parent", [comb(150), star(2500), chain(900), chain(1), star(0, 1)], ids=len)
def test_split_equals_dense_at_the_extremes(parent: TokenArray) -> None:
    for split, dense in both(parent):
        torch.testing.assert_close(split, dense, rtol=1e-10, atol=1e-12)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@settings(max_examples=20, deadline=None)
@given(parent=parents)
def test_flex_mask_equals_dense(parent: TokenArray) -> None:
    _, end = tree_arrays(parent)
    q, k, v = (torch.randn(len(parent), heads, 16) for heads in (4, 2, 2))
    flex, dense = (tree_attention(q, k, v, make_plan(parent, end, method=m), 0.25) for m in ("flex", "dense"))
    torch.testing.assert_close(flex, dense, rtol=1e-5, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_flex_on_cuda_equals_dense() -> None:
    parent = random_parents(700, 0.05, 0.01, 0)
    _, end = tree_arrays(parent)
    q, k, v = (torch.randn(700, heads, 64, device="cuda").requires_grad_() for heads in (4, 2, 2))
    results = []
    for method in (None, "dense"):
        out = tree_attention(q, k, v, make_plan(parent, end, device="cuda", method=method), 0.125)
        results.append([out, *torch.autograd.grad(out.square().sum(), (q, k, v))])
    for flex, dense in zip(*results, strict=True):
        torch.testing.assert_close(flex, dense, rtol=2e-2, atol=2e-2)


@settings(max_examples=100, deadline=None)
@given(parent=parents)
def test_plan_covers_each_visible_pair_once(parent: TokenArray) -> None:
    _, end = tree_arrays(parent)
    plan = make_plan(parent, end)
    seen = torch.zeros(len(parent), len(parent), dtype=torch.int64)
    for a, b in plan.singles:
        seen[a:b, a:b] += torch.ones(b - a, b - a, dtype=torch.int64).tril()
    for c in plan.crosses:
        seen[c.end : c.stop, c.start : c.end] += 1
    for block in plan.padded:
        rows = block.scatter.view(block.size)
        for i, row in enumerate(rows):
            visible = torch.ones(len(row), len(row)).tril() if block.mask is None else block.mask[i, 0] == 0
            q, k = visible.nonzero(as_tuple=True)
            real = (row[q] < len(parent)) & (row[k] < len(parent))
            seen.index_put_((row[q][real], row[k][real]), torch.ones(int(real.sum()), dtype=torch.int64), True)
    assert torch.equal(seen, plan.visible().long())
    assert plan.pairs() == int(seen.sum())


@pytest.mark.parametrize(
    ("parent", "end"),
    [
        ([-1, 0, 0], [3, 2, 2]),  # a subtree that ends before its own token
        ([-1, 0, 1, 0, 1], [5, 5, 3, 4, 5]),  # token 4 hangs below a closed subtree
        ([-1, -1], [2, 2]),  # a root that claims the next root
        ([-1, 0], [3, 3]),  # beyond the end
        ([], []),
        ([-1, 0], [2]),
    ],
)
def test_plan_refuses_what_is_not_depth_first(parent: list[int], end: list[int]) -> None:
    with pytest.raises(ConfigError):
        make_plan(np.array(parent, dtype=np.int64), np.array(end, dtype=np.int64))


def test_split_is_refused_off_the_cpu() -> None:
    parent = chain(3)
    with pytest.raises(ConfigError, match="flex"):
        make_plan(parent, tree_arrays(parent)[1], device="meta", method="split")


def qwen3() -> PreTrainedModel:
    return create_policy(
        PolicyConfig(vocab_size=VOCAB, width=32, layers=2, heads=4, kv_heads=2, head_dim=16, ff_width=48, init_std=0.3)
    )


def llama() -> PreTrainedModel:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return LlamaForCausalLM(
            LlamaConfig(
                vocab_size=VOCAB,
                hidden_size=32,
                intermediate_size=48,
                num_hidden_layers=2,
                num_attention_heads=4,
                num_key_value_heads=2,
                initializer_range=0.3,
            )
        )


MODELS = {"qwen3": qwen3(), "llama": llama()}


def tensors(parent: TokenArray, seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    depth, end = tree_arrays(parent)
    tokens = np.random.default_rng(seed).integers(0, VOCAB, len(parent))
    return torch.from_numpy(tokens), torch.from_numpy(parent), torch.from_numpy(depth), torch.from_numpy(end)


def per_path_log_probs(model: PreTrainedModel, tokens: Tensor, parent: Tensor) -> Tensor:
    """Log-prob of each token that has a parent, from a forward of its own path alone."""
    out = []
    for i in torch.nonzero(parent >= 0)[:, 0].tolist():
        path = []
        while i >= 0:
            path.append(i)
            i = int(parent[i])
        ids = tokens[path[::-1]]
        out.append(model(input_ids=ids[None]).logits[0, -2].log_softmax(-1)[ids[-1]])
    return torch.stack(out)


@pytest.mark.parametrize("name", MODELS)
@settings(max_examples=8, deadline=None)
@given(parent=parents.filter(lambda p: bool((p >= 0).any())), seed=st.integers(0, 100))
def test_log_probs_and_gradients_equal_per_path_forwards(name: str, parent: TokenArray, seed: int) -> None:
    model = MODELS[name]
    arrays = tensors(parent, seed)
    parameters = list(model.parameters())
    ours = tree_log_probs(model, *arrays)
    theirs = per_path_log_probs(model, *arrays[:2])
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    weight = torch.linspace(-1, 1, len(ours))
    gradients = (torch.autograd.grad((x * weight).sum(), parameters) for x in (ours, theirs))
    for a, b in zip(*gradients, strict=True):
        # the norm of the whole is the yardstick: a single entry may be rounding alone
        assert (a - b).norm() <= 1e-5 * b.norm() + 1e-6


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 1000))
def test_one_branch_never_sees_another(seed: int) -> None:
    stem, branch = 7, 5
    ends = (stem, stem + branch, stem + 2 * branch)
    parent = np.arange(-1, ends[2] - 1)
    parent[ends[1]] = stem - 1
    tokens, *rest = tensors(parent, seed)
    edited = tokens.clone()
    edited[ends[1] :] = (edited[ends[1] :] + 1) % VOCAB
    with torch.no_grad():
        before, after = (tree_log_probs(MODELS["qwen3"], t, *rest) for t in (tokens, edited))
    first = ends[1] - 1  # the root has no log-prob
    assert torch.equal(before[:first], after[:first])
    assert not torch.equal(before[first:], after[first:])


def replaced(tokens: Tensor, index: int, token: int) -> Tensor:
    tokens = tokens.clone()
    tokens[index] = token
    return tokens


def test_targets_temperature_and_entropy() -> None:
    arrays = tensors(random_parents(60, 0.2, 0.0, 5), 5)
    model, targets = MODELS["qwen3"], torch.tensor([9, 3, 41])
    scores = tree_scores(model, *arrays, targets, temperature=0.7, with_entropy=True)
    every = tree_log_probs(model, *arrays, temperature=0.7)
    torch.testing.assert_close(scores.log_probs, every[targets - 1])
    for target, entropy in zip(targets.tolist(), scores.entropy.tolist(), strict=True):
        mass = torch.cat(
            [
                tree_log_probs(model, replaced(arrays[0], target, w), *arrays[1:], at, temperature=0.7)
                for at in (torch.tensor([target]),)
                for w in range(VOCAB)
            ]
        ).detach()
        assert float(mass.exp().sum()) == pytest.approx(1.0, abs=1e-4)
        assert float(-(mass.exp() * mass).sum()) == pytest.approx(entropy, abs=1e-4)


def test_the_head_in_chunks_gives_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    arrays, model = tensors(random_parents(100, 0.2, 0.0, 1), 1), MODELS["qwen3"]
    results = []
    for rows in (1000, 7):
        monkeypatch.setattr("torchrl_ext.models.HEAD_CHUNK_ROWS", rows)
        monkeypatch.setattr("torchrl_ext.models.HEAD_CHUNK_ELEMENTS", 1)
        log_probs = tree_log_probs(model, *arrays)
        results.append([log_probs, *torch.autograd.grad(log_probs.sum(), list(model.parameters()))])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_gradient_checkpointing_recomputes_on_the_tree() -> None:
    arrays, model = tensors(random_parents(80, 0.2, 0.0, 2), 2), qwen3()
    plain = torch.autograd.grad(tree_log_probs(model, *arrays).sum(), list(model.parameters()))
    model.train()
    model.activation_checkpointing_enable()
    again = torch.autograd.grad(tree_log_probs(model, *arrays).sum(), list(model.parameters()))
    for a, b in zip(plain, again, strict=True):
        torch.testing.assert_close(a, b)


def test_no_targets_give_no_scores() -> None:
    scores = tree_scores(MODELS["qwen3"], *tensors(chain(1), 0), with_entropy=True)
    assert scores.log_probs.shape == (0,)
    assert scores.entropy is not None and scores.entropy.shape == (0,)


def test_a_switched_model_still_serves_plain_forwards() -> None:
    model, ids = qwen3(), torch.arange(12)[None]
    mask = torch.ones(1, 12, dtype=torch.int64)
    mask[0, :4] = 0
    with torch.no_grad():
        before = model(input_ids=ids).logits, model(input_ids=ids, attention_mask=mask).logits[:, 4:]
        tree_log_probs(model, *tensors(chain(5), 0))
        after = model(input_ids=ids).logits, model(input_ids=ids, attention_mask=mask).logits[:, 4:]
    for a, b in zip(before, after, strict=True):
        torch.testing.assert_close(a, b)
