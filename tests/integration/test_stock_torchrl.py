"""Stock TorchRL runs on our rows unchanged, and agrees with our loss where both apply."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDictBase, lazy_stack
from torch import Tensor, nn
from torch.testing import assert_close
from torchrl.data import LazyStackStorage, ReplayBuffer, SamplerWithoutReplacement
from torchrl.objectives.llm import DAPO, CISPOLoss, GRPOLoss, MCAdvantage

from clawgym_env.tree.pack import PackedTree
from tests.stock import scorer
from tests.trees import Call, packed_of_calls, path_log_probs, path_of, tiny_qwen3
from torchrl_ext.data import call_rows, path_rows, to_training_batch, tree_td
from torchrl_ext.estimators import TreeGroupAdvantage
from torchrl_ext.losses import TreeGRPOLoss

VOCAB = 259  # the byte tokenizer's
RNG = np.random.default_rng(0)
KINDS = {"call": call_rows, "path": path_rows}


def ids(size: int) -> list[int]:
    return RNG.integers(0, 256, size=size).tolist()


def scored_by(model: nn.Module, tree: PackedTree, *, noise: float = 0.0) -> PackedTree:
    """The tree with the model's own log-probs as behaviour, up to noise."""
    log_probs = tree.log_probs.copy()
    with torch.no_grad():
        for t in np.flatnonzero(tree.sampled):
            path = path_of(tree.parent, int(t))
            log_probs[t] = path_log_probs(model, torch.from_numpy(tree.tokens[path]))[-1]
    log_probs += RNG.normal(scale=noise, size=len(tree)).astype(np.float32) if noise else 0.0
    return replace(tree, log_probs=log_probs)


def chain(turns: int = 3) -> PackedTree:
    """Several turns, each with tool output between: one path."""
    history, calls = ids(6), []
    for _ in range(turns):
        response = ids(4)
        calls.append(Call(list(history), response))
        history += response + ids(3)
    return packed_of_calls(calls)


def fork() -> PackedTree:
    """One answer with two continuations."""
    prompt, answer = ids(5), ids(4)
    history = prompt + answer
    return packed_of_calls([Call(prompt, answer), Call(history + ids(2), ids(3)), Call(history + ids(3), ids(5))])


def gradient(model: nn.Module, loss: Tensor) -> Tensor:
    return torch.cat([g.reshape(-1) for g in torch.autograd.grad(loss, list(model.parameters()))])


def stock_loss(model: nn.Module, rows: TensorDictBase, strategy: str = "rlhf", **options: Any) -> Tensor:
    loss = GRPOLoss(scorer(model), masking_strategy=strategy, entropy_bonus=False, **options)  # type: ignore[arg-type]
    return loss(rows).loss_objective


def test_a_chain_equals_stock_grpo() -> None:
    """Tolerance 1e-5 relative: both in float32, through different attention masks."""
    model = tiny_qwen3(VOCAB)
    tree = scored_by(model, chain(), noise=0.3)
    ours = TreeGRPOLoss(model, clip_epsilon=(0.2, 0.28))(
        to_training_batch([tree_td(tree, reward=1, query="q", advantage=0.7)])
    )
    rows = path_rows(tree, reward=1, query="q", advantage=0.7)
    assert rows.batch_size == (1,)
    stock = GRPOLoss(scorer(model), masking_strategy="rlhf", entropy_bonus=False, clip_epsilon=(0.2, 0.28))(rows)
    assert_close(ours.loss_objective, stock.loss_objective, rtol=1e-5, atol=1e-6)
    assert_close(ours.ESS, stock.ESS, rtol=1e-4, atol=1e-5)
    a, b = gradient(model, ours.loss_objective), gradient(model, stock.loss_objective)
    assert float((a - b).norm()) <= 1e-5 * float(b.norm())


@pytest.mark.parametrize(("kind", "strategy"), [("call", "sft"), ("path", "rlhf"), ("path", "sft")])
def test_a_fork_equals_stock_grpo_on_its_rows(kind: str, strategy: str) -> None:
    """Each trainable token lies unmasked in one row, so the token mean is that of the tree's unique tokens."""
    model = tiny_qwen3(VOCAB)
    tree = scored_by(model, fork(), noise=0.3)
    batch = to_training_batch([tree_td(tree, reward=1, query="q", advantage=-0.7)])
    ours = TreeGRPOLoss(model, normalisation="token_mean")(batch).loss_objective
    stock = stock_loss(model, KINDS[kind](tree, reward=1, query="q", advantage=-0.7), strategy)
    assert_close(ours, stock, rtol=1e-5, atol=1e-6)
    a, b = gradient(model, ours), gradient(model, stock)
    assert float((a - b).norm()) <= 1e-5 * float(b.norm())


def test_naive_linearisation_equals_per_leaf() -> None:
    model = tiny_qwen3(VOCAB)
    tree = scored_by(model, fork(), noise=0.3)
    rows = path_rows(tree, reward=1, query="q", advantage=0.7, node_weight="per_leaf")
    batch = to_training_batch([tree_td(tree, reward=1, query="q", advantage=0.7)])
    ours = TreeGRPOLoss(model, node_weight="per_leaf", reduction="sum")(batch).loss_objective
    in_rows = sum(int(m.sum()) for m in rows.get(("masks", "all_assistant_mask"), as_list=True))
    assert_close(ours / in_rows, stock_loss(model, rows), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", ["call", "path"])
def test_stock_inner_loop_learns(kind: str) -> None:
    """MCAdvantage, a replay buffer, GRPOLoss and an optimiser, as in TorchRL's GRPO scripts."""
    model = tiny_qwen3(VOCAB)
    rb = ReplayBuffer(
        storage=LazyStackStorage(64),
        sampler=SamplerWithoutReplacement(),
        transform=MCAdvantage(grpo_size=4, prompt_key="query", trajectory_return="sum"),
    )
    trees = [scored_by(model, t) for t in (chain(), fork(), chain(2), fork())]
    for k, tree in enumerate(trees):
        assert len(rb) == 0  # the group is not complete yet
        rb.extend(KINDS[kind](tree, reward=float(k % 2), query="task", rollout=k))
    rows = rb[:]
    advantage = {int(row["tree", "rollout"]): round(float(row["advantage"]), 4) for row in rows.unbind(0)}
    assert advantage == {0: -0.866, 1: 0.866, 2: -0.866, 3: 0.866}  # sample std of 0, 1, 0, 1

    loss_fn = GRPOLoss(scorer(model), masking_strategy="sft", entropy_bonus=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    before = loss_fn(rows)
    assert_close(before.kl_approx, torch.tensor(0.0), rtol=0, atol=1e-5)  # on policy: ρ = 1
    before.loss_objective.backward()
    optimizer.step()
    after = loss_fn(rows)
    assert after.loss_objective.item() < before.loss_objective.item() - 1e-3
    assert rb.sample(4).batch_size == (4,)


@pytest.mark.parametrize("loss_type", [DAPO, CISPOLoss])
def test_other_stock_losses_take_the_rows(loss_type: Any) -> None:
    model = tiny_qwen3(VOCAB)
    rows = path_rows(scored_by(model, fork()), reward=1, query="q", advantage=1.0)
    out = loss_type(scorer(model), masking_strategy="rlhf", entropy_bonus=False)(rows)
    assert torch.isfinite(out.loss_objective)
    assert float(gradient(model, out.loss_objective).norm()) > 0


def test_our_inner_loop_learns() -> None:
    """The same through a replay buffer of whole rollouts and the packed loss; the policy moves towards the reward."""
    model = tiny_qwen3(VOCAB)
    trees = [scored_by(model, t) for t in (chain(), fork(), chain(2), fork())]
    rb = ReplayBuffer(
        storage=LazyStackStorage(8), sampler=SamplerWithoutReplacement(), batch_size=4, transform=TreeGroupAdvantage()
    )
    rb.extend(lazy_stack([tree_td(t, reward=float(k % 2), query="task") for k, t in enumerate(trees)]))
    batch = to_training_batch(rb.sample())
    loss_fn = TreeGRPOLoss(model)
    optimizer = torch.optim.SGD(loss_fn.parameters(), lr=0.05)
    before = loss_fn(batch)
    assert_close(before.loss_objective, torch.tensor(0.0), rtol=0, atol=1e-5)
    before.loss_objective.backward()
    optimizer.step()
    change = loss_fn.log_prob(batch).detach() - batch["token_log_prob"]
    assert float(change[batch["advantage"] > 0].nanmean()) > 0 > float(change[batch["advantage"] < 0].nanmean())
