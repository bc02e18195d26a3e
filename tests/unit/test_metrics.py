"""Figures by harness are those of its own rollouts, and add up to the whole."""

from __future__ import annotations

import math

import pytest
import torch

from clawgym_env.types import Status
from tests.trees import Call, packed_of_calls, tiny_qwen3
from tests.unit.test_report import rollout
from torchrl_ext.data import to_training_batch, tree_td
from torchrl_ext.losses import TreeSFTLoss
from torchrl_ext.metrics import log_prob_gaps, rollout_metrics
from torchrl_ext.sft import shared_prompts
from torchrl_ext.trainer import _by_prompt


def test_by_harness() -> None:
    made = [rollout("a0", True), rollout("a1", False), rollout("b0", True), rollout("b1", None)]
    for k, one in enumerate(made):
        one.harness, one.group = ("pi", "q0") if k < 2 else ("codex", "q1")
        one.seconds = {"start": 1.0 + k, "harness": 2.0}
    row = rollout_metrics(made)
    assert (row["rollouts"], row["pass_at_1"], row["captured"]) == (4, pytest.approx(2 / 3), 16)
    pi, codex = row["by_harness"]["pi"], row["by_harness"]["codex"]
    assert (pi["pass_at_1"], pi["reward"], pi["group_variance"]) == (0.5, 0.5, 0.25)
    assert (codex["pass_at_1"], codex["group_variance"], codex["unscored"]) == (1.0, 0.0, {"sandbox_error": 1})
    assert pi["seconds"] == {"start": 1.5, "harness": 2.0} and codex["seconds"]["start"] == 3.5
    for key in ("rollouts", "captured", "trained", "unique_tokens", "total_tokens"):
        assert row[key] == pi[key] + codex[key]


def test_nothing_scored_has_no_variance() -> None:
    one = rollout("a0", None)
    assert one.status is Status.SANDBOX_ERROR
    assert math.isnan(rollout_metrics([one])["by_harness"]["pi"]["group_variance"])


def test_log_prob_gaps_by_hand() -> None:
    trees = [packed_of_calls([Call([0, 1], [2, 3])]), packed_of_calls([Call([0, 1], [4])])]
    batch = to_training_batch([tree_td(t, reward=1.0, query="q", advantage=1.0) for t in trees])
    mask = batch["masks", "all_assistant_mask"]
    mu = batch["token_log_prob"]
    gaps = torch.zeros_like(mu)
    own = mask & (batch["tree", "rollout"] == 0)
    gaps[own] = torch.tensor([0.1, -0.3])
    batch["old_log_prob"] = mu + gaps
    found = log_prob_gaps(batch, ["pi", "codex"])
    assert found["pi"] == pytest.approx({"log_prob_gap_mean": 0.2, "log_prob_gap_max": 0.3}, abs=1e-6)
    assert found["codex"] == {"log_prob_gap_mean": 0.0, "log_prob_gap_max": 0.0}


def test_the_losses_of_the_harnesses_add_up_to_the_batch_s() -> None:
    model = tiny_qwen3(16)
    trees = [packed_of_calls([Call([0, 1, k], [2, 3 + k])]) for k in range(4)]
    rows = [tree_td(t, reward=1.0, query="q", harness="ab"[k % 2]) for k, t in enumerate(trees)]
    loss = TreeSFTLoss(model, normalisation="token_mean")
    whole = loss(to_training_batch(rows)).loss_sft
    parts = [loss(part).loss_sft for part in _by_prompt(rows, None, {})]
    assert len(parts) == 2
    torch.testing.assert_close(sum(parts), whole)


def test_each_harness_s_own_prompt_is_shortened() -> None:
    prompts = {"a": list(range(40)), "b": list(range(50, 80))}
    rows = [
        tree_td(packed_of_calls([Call([*prompts[h], 90 + k], [2])]), reward=1.0, query="q", harness=h)
        for k, h in enumerate("aabb")
    ]
    shared = shared_prompts(rows)
    assert shared == {"a": 40, "b": 30}
    parts = [part["token"].tolist() for part in _by_prompt(rows, 4, shared)]
    assert [p[:12] for p in parts] == [[*range(8), *range(36, 40)], [*range(50, 58), *range(76, 80)]]
    (alone,) = _by_prompt(rows[:1], 4, shared)
    assert alone["token"].tolist() == [*range(8), *range(36, 40), 90, 2], "the task is not the prompt's end"
    assert shared_prompts(rows[:1]) == {"a": 0}
    (unknown,) = _by_prompt(rows[:1], 4, {"a": 0})
    assert len(unknown) == 42
