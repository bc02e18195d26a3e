"""What trains, under which denominators, and what moves: the policy, the critic, or both."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, get_args

import pytest
import torch
from tensordict import TensorDictBase, lazy_stack
from torch import Tensor, nn
from torch.testing import assert_close

from clawgym_env.tree.ledger import Ledger
from clawgym_env.tree.pack import PackedTree
from tests.trees import Call, packed_of_calls, tiny_qwen3
from torchrl_ext import functional as F
from torchrl_ext.data import tree_td
from torchrl_ext.losses import TreeGRPOLoss, TreePPOLoss
from torchrl_ext.recipes.stages import (
    CorrectionSettings,
    CriticSettings,
    GRPOStage,
    PolicyStage,
    PPOStage,
    ValueStage,
)
from torchrl_ext.updates import CriticLearner, GRPOUpdate, PPOUpdate, ValueUpdate, flat_batch, policy_options

TREE = packed_of_calls([Call([0, 1], [2]), Call([0, 1, 2, 3, 4], [1]), Call([0, 1, 2, 3, 4], [2, 2])])
SHORT = packed_of_calls([Call([0, 1], [2, 3])])
NOTHING = packed_of_calls([Call([0, 1], [2])], keep=frozenset())
ONE_EPOCH: dict[str, Any] = {"epochs": 1, "warmup": 0}


def batch(*given: tuple[PackedTree, float | None, str]) -> tuple[TensorDictBase, Any]:
    """Rollouts of (tree, reward, group), and their records."""
    tds = [tree_td(tree, reward=reward, query=query) for tree, reward, query in given]
    records: Any = [SimpleNamespace(ledger=Ledger(captured=int(tree.trainable.sum()))) for tree, _, _ in given]
    return lazy_stack(tds), records


MIXED = (TREE, 1.0, "a"), (SHORT, 0.0, "a"), (SHORT, 1.0, "b"), (TREE, 1.0, "b"), (SHORT, None, "a")


def weights(module: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in module.parameters()]


def moved(module: nn.Module, before: Sequence[Tensor]) -> bool:
    return any(not torch.equal(a, b) for a, b in zip(module.parameters(), before, strict=True))


def grpo(**settings: Any) -> GRPOUpdate:
    return GRPOUpdate(tiny_qwen3(), GRPOStage(**ONE_EPOCH, **settings))


def test_the_settings_name_the_options_that_the_losses_have() -> None:
    def literal(stage: Any, name: str) -> set[str]:
        return set(get_args(stage.model_fields[name].annotation))

    assert literal(PolicyStage, "objective") == set(get_args(F.Objective))
    assert literal(PolicyStage, "kl_estimator") == set(get_args(F.KLEstimator))
    assert literal(PolicyStage, "node_weight") == set(get_args(F.NodeWeight))
    assert literal(PolicyStage, "normalisation") == set(get_args(F.Normalisation))
    assert literal(CorrectionSettings, "kind") == set(get_args(F.CorrectionKind))
    assert literal(GRPOStage, "scale") == set(get_args(F.Scale))
    assert literal(GRPOStage, "baseline") == set(get_args(F.Baseline))
    assert literal(PPOStage, "branch_backup") == set(get_args(F.BranchBackup))


def test_settings_reach_the_losses() -> None:
    correction = CorrectionSettings(kind="icepop", high=5, low=0.5)
    settings: dict[str, Any] = {
        "objective": "ppo", "dual_clip": 3.0, "clip_low": 0.1, "clip_high": 0.3, "kl_coeff": 0.01, "kl_estimator": "k2",
        "entropy_coeff": 0.02, "correction": correction, "node_weight": "sqrt", "normalisation": "prompt_mean",
    }  # fmt: skip
    model = tiny_qwen3()
    learner = CriticLearner(model, CriticSettings(clip_value=0.2, coeff=0.5), PPOStage())
    estimator = {"gamma": 0.9, "lmbda": 0.8, "lmbda_critic": 0.7, "alpha": 0.5, "branch_backup": "child_uniform"}
    ppo_stage = PPOStage(**settings, **estimator, branch_advantage="split", average_gae=False)
    ppo = PPOUpdate(model, ppo_stage, learner, temperature=0.7, reference=model)
    for loss in (
        GRPOUpdate(model, GRPOStage(**settings), temperature=0.7, reference=model).loss_module,
        ppo.loss_module,
    ):
        assert (loss.objective, loss.dual_clip, loss.clip_low, loss.clip_high) == ("ppo", 3.0, 0.1, 0.3)
        assert (loss.kl_to_ref_coeff, loss.kl_estimator, loss.entropy_coeff) == (0.01, "k2", 0.02)
        assert loss.correction == F.Correction("icepop", high=5, low=0.5)
        assert (loss.node_weight, loss.normalisation, loss.temperature) == ("sqrt", "prompt_mean", 0.7)
    assert isinstance(ppo.loss_module, TreePPOLoss)
    assert (ppo.loss_module.critic_coeff, ppo.loss_module.clip_value) == (0.5, 0.2)
    gae = ppo.loss_module.value_estimator
    assert (float(gae.gamma), float(gae.lmbda), gae.lmbda_critic, gae.alpha) == pytest.approx((0.9, 0.8, 0.7, 0.5))
    assert (gae.branch_backup, gae.branch_advantage, gae.average_gae) == ("child_uniform", "split", False)
    assert TreeGRPOLoss(model, **policy_options(GRPOStage())).correction == F.Correction("token_tis", high=2.0)
    assert TreeGRPOLoss(model, **policy_options(GRPOStage(tis_cap=None))).correction is None
    with pytest.raises(ValueError, match="kl_coeff needs a reference"):
        GRPOUpdate(model, GRPOStage(kl_coeff=0.1))


def test_a_rollout_whose_calls_were_all_filtered_out_makes_no_update() -> None:
    def step(*trees: PackedTree) -> dict[str, float]:
        return grpo()(*batch(*((tree, float(k), "q") for k, tree in enumerate(trees))), 1.0).whole

    assert step(NOTHING, NOTHING) == {"trained_rollouts": 0}
    assert step(NOTHING, SHORT)["trained_rollouts"] == 1


@pytest.mark.parametrize(
    ("settings", "useful", "counted", "dropped"),
    [
        ({}, 2, 4, 6),
        ({"zero_variance": "filter"}, 2, 2, 6),
        ({"entropy_coeff": 0.1}, 4, 4, 0),  # the bonus is over every token
        ({"normalisation": "prompt_mean"}, 4, 4, 0),  # a group's tokens are counted by the loss
        ({"normalisation": "prompt_mean", "zero_variance": "filter"}, 2, 2, 6),
        ({"negative_weight": 0.0}, 1, 4, 8),
    ],
    ids=str,
)
def test_what_costs_a_forward_and_what_is_counted(
    settings: dict[str, Any], useful: int, counted: int, dropped: int
) -> None:
    td, records = batch(*MIXED)
    chosen, denominators = grpo(**settings).choose(td, records)
    assert (len(chosen), len(denominators)) == (useful, counted)
    booked = sum((record.ledger.dropped for record in records), start=type(records[0].ledger.dropped)())
    assert sum(booked.values()) == dropped
    assert set(booked) <= {"group without variance", "advantage of 0"}
    assert ("advantage of 0" in booked) == ("negative_weight" in settings)


@pytest.mark.parametrize("normalisation", ["rollout_mean", "token_mean", "prompt_mean"])
def test_rollouts_without_an_advantage_count_in_the_denominators(normalisation: Any) -> None:
    """Leaving them out of the forward changes no loss."""
    update = grpo(normalisation=normalisation)
    td, records = batch(*MIXED)
    useful, counted = update.choose(td, records)
    short, whole = (update.loss_module(flat_batch(tds, counted)).loss_objective for tds in (useful, counted))
    assert_close(short, whole, rtol=1e-5, atol=1e-7)


def test_a_penalty_holds_the_policy_to_the_reference() -> None:
    """With no reward to follow, only the penalty moves the policy: back to where it came from."""
    policy, reference = tiny_qwen3(seed=1), tiny_qwen3(seed=0)
    stage = GRPOStage(**ONE_EPOCH, kl_coeff=1.0, kl_estimator="k2", lr=3e-3)
    update = GRPOUpdate(policy, stage, reference=reference)
    told = [update(*batch((TREE, 1.0, "a"), (TREE, 1.0, "a")), 1.0).whole for _ in range(12)]
    assert told[-1]["kl_to_ref"] < 0.5 * told[0]["kl_to_ref"]
    before = weights(policy)
    assert GRPOUpdate(policy, GRPOStage(**ONE_EPOCH))(*batch((TREE, 1.0, "a"), (TREE, 1.0, "a")), 1.0).whole == {
        "trained_rollouts": 0
    }
    assert not moved(policy, before)


@pytest.mark.parametrize("shared", [False, True])
def test_pretraining_fits_the_critic_and_leaves_the_policy(shared: bool) -> None:
    policy = tiny_qwen3()
    settings = CriticSettings(shared=shared, lr=3e-2 if shared else 3e-3)
    learner = CriticLearner(policy, settings, PPOStage())
    update = ValueUpdate(ValueStage(epochs=30), learner)
    before = weights(policy)
    told = [update(*batch((TREE, 1.0, "a"), (SHORT, 0.0, "a"), (SHORT, None, "a")), 1.0).whole for _ in range(3)]
    assert not moved(policy, before) and not learner.critic.detach
    assert told[0]["trained_rollouts"] == 2
    assert told[0]["explained_variance"] <= 0.01, "before the first update: a new critic says 0"
    assert told[-1]["explained_variance"] > 0.5 and told[-1]["loss_critic"] < 0.5 * told[0]["loss_critic"]


def ppo(shared: bool = False, stage: dict[str, Any] | None = None, **critic: Any) -> PPOUpdate:
    settings = PPOStage(**{**ONE_EPOCH, **(stage or {})})
    policy = tiny_qwen3()
    return PPOUpdate(policy, settings, CriticLearner(policy, CriticSettings(shared=shared, **critic), settings))


@pytest.mark.parametrize("shared", [False, True])
def test_ppo_moves_both_and_says_how_the_critic_did(shared: bool) -> None:
    update = ppo(shared)
    critic, policy = update.learner.critic, update.loss_module.actor_network
    before = weights(policy), weights(critic)
    td, records = batch(*MIXED)
    figures = update(td, records, 0.5)
    assert moved(policy, before[0]) and moved(critic, before[1])
    assert figures.whole["trained_rollouts"] == 4, "groups without variance teach the critic"
    assert figures.whole["lr"] == pytest.approx(0.5 * PPOStage().lr)
    assert {"explained_variance", "loss_critic", "value_mean", "critic_grad_norm"} <= set(figures.whole)
    assert figures.whole["value_mean"] == 0.0, "of the critic before its first update"
    assert all(not record.ledger.dropped for record in records)


def test_ppo_is_paper_s_advantage_times_the_weight_of_wrong_answers() -> None:
    """γ = λ = 1 without whitening, a critic that says 0: A_t = R; below 0 it is scaled."""
    seen: list[Tensor] = []
    update = ppo(stage={"average_gae": False, "negative_weight": 0.25}, more_epochs=0)
    nn.init.constant_(update.learner.critic.head.out.bias, 0.5)
    forward = update.loss_module.forward
    update.loss_module.forward = lambda td: (seen.append(td["advantage"].clone()), forward(td))[1]
    td, records = batch((TREE, 1.0, "a"), (SHORT, 0.0, "a"))
    update(td, records, 1.0)
    (advantage,) = seen
    assert sorted(set(advantage.tolist())) == [-0.125, 0.0, 0.5]


def test_more_epochs_are_the_critic_s_alone() -> None:
    updates = [ppo(more_epochs=n) for n in (0, 4)]
    for update in updates:
        update(*batch(*MIXED), 1.0)
    first, second = updates
    assert not moved(second.loss_module.actor_network, weights(first.loss_module.actor_network))
    assert moved(second.learner.critic, weights(first.learner.critic))


def test_parts_carry_everything_that_outlives_a_batch() -> None:
    """A new update with the parts of another goes the same way."""
    first = ppo()
    first(*batch(*MIXED), 1.0)
    second = ppo()
    second.loss_module.actor_network.load_state_dict(first.loss_module.actor_network.state_dict())
    assert set(first.parts) == {"optimiser", "critic", "critic_optimiser"}
    for name, part in second.parts.items():
        part.load_state_dict(copy.deepcopy(first.parts[name].state_dict()))
    told = [update(*batch(*MIXED), 1.0).whole for update in (first, second)]
    assert told[0] == told[1]
    assert not moved(second.learner.critic, weights(first.learner.critic))
    assert not moved(second.loss_module.actor_network, weights(first.loss_module.actor_network))
