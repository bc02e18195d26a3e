"""What tree PPO, its critic and its estimator promise around the mathematics."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torch import Tensor, nn
from torch.testing import assert_close
from torchrl.objectives import ValueEstimators
from torchrl.objectives.llm import LLMLossOutput
from torchrl.objectives.value import GAE, ValueEstimatorBase

from clawgym_env.errors import ConfigError
from tests.trees import Call, TableActor, packed_of_calls, path_log_probs, path_of, tiny_qwen3
from torchrl_ext import functional as F
from torchrl_ext.critic import TreeCritic
from torchrl_ext.data import to_training_batch, tree_td
from torchrl_ext.estimators import TreeGAE
from torchrl_ext.losses import TreeGRPOLoss, TreePPOLoss, TreeValueLoss

TREE = packed_of_calls([Call([0, 1], [2, 3]), Call([0, 1, 2, 3, 4], [1]), Call([0, 1, 2, 3, 4], [2, 2])])
OTHER = packed_of_calls([Call([0, 1, 1], [4])])


class TableValues(nn.Module):
    """V by depth and previous token."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.linspace(-1, 1, 35, dtype=torch.float64).view(7, 5))

    def tree_values(self, tokens: Tensor, parent: Tensor, depth: Tensor, end: Tensor, targets: Tensor) -> Tensor:
        """See ``torchrl_ext.critic.TreeValues``."""
        return self.table[depth[targets] % 7, tokens[parent[targets]]]


def batch() -> TensorDict:
    return to_training_batch([tree_td(TREE, reward=1, query="q"), tree_td(OTHER, reward=0, query="q")])


def loss(**options: Any) -> TreePPOLoss:
    return TreePPOLoss(TableActor(), TableValues(), **options)


def test_reads_and_writes_the_keys_it_names() -> None:
    for loss_fn in (loss(), loss(normalisation="prompt_mean"), TreeValueLoss(TableValues())):
        extra = [] if isinstance(loss_fn, TreeValueLoss) else [("tree", "credit")]
        td = batch().select(*loss_fn.in_keys, *loss_fn.value_estimator.in_keys, *extra)
        out = loss_fn(td)
        assert {k for k, v in out.items() if v is not None} == set(loss_fn.out_keys)
    assert isinstance(loss()(batch()), LLMLossOutput)


def test_only_losses_carry_a_gradient_and_each_its_own_network() -> None:
    loss_fn = loss()
    out = loss_fn(batch())
    assert {k for k, v in out.items() if v is not None and v.requires_grad} == {"loss_objective", "loss_critic"}
    actor, critic = loss_fn.actor_network.table, loss_fn.critic_network.table
    assert torch.autograd.grad(out.loss_objective, critic, retain_graph=True, allow_unused=True) == (None,)
    assert torch.autograd.grad(out.loss_critic, actor, allow_unused=True) == (None,)


def test_input_is_only_read() -> None:
    td = batch()
    before = set(td.keys(True, True))
    loss()(td)
    assert set(td.keys(True, True)) == before


def test_estimated_before_or_within_is_the_same() -> None:
    loss_fn = loss(critic_coeff=0.5).make_value_estimator("tree_gae", gamma=0.9, lmbda=0.8)
    td = batch()
    within = loss_fn(td)
    loss_fn.value_estimator(td)
    assert {"advantage", "value_target", "state_value"} <= set(td.keys())
    before = loss_fn(td)
    assert_close(before.loss_objective, within.loss_objective)
    assert_close(before.loss_critic, within.loss_critic)
    grpo = TreeGRPOLoss(TableActor())(td)
    assert_close(grpo.loss_objective, within.loss_objective)


def test_every_key_can_be_renamed() -> None:
    plain_fn = loss(clip_value=0.1)
    plain, td = plain_fn(batch()), batch()
    loss_fn = loss(clip_value=0.1)
    fields = TreePPOLoss._AcceptedKeys.__dataclass_fields__
    under_next = {"reward", "done", "terminated"}
    loss_fn.set_keys(**{name: f"moved_{name}" if name in under_next else ("moved", name) for name in fields})
    for name in fields:
        old = getattr(plain_fn.tensor_keys, name)
        old = ("next", old) if name in under_next else old
        if old in td.keys(True):
            td.rename_key_(old, ("next", f"moved_{name}") if name in under_next else ("moved", name))
    out = loss_fn(td)
    assert_close(out.loss_objective, plain.loss_objective)
    assert_close(out.loss_critic, plain.loss_critic)
    td = loss_fn.value_estimator(td)
    assert ("moved", "advantage") in td.keys(True) and ("moved", "value_target") in td.keys(True)


def test_estimators_are_made_the_ways_torchrl_makes_them() -> None:
    by_name = loss().make_value_estimator("tree_gae", gamma=0.5, branch_backup="child_uniform")
    assert isinstance(by_name.value_estimator, TreeGAE) and isinstance(by_name.value_estimator, ValueEstimatorBase)
    assert float(by_name.value_estimator.gamma) == 0.5 and float(by_name.value_estimator.lmbda) == 1.0
    instance = TreeGAE(gamma=0.5, branch_backup="child_uniform", value_network=TableValues())
    by_instance = loss().make_value_estimator(instance)
    by_class = loss().make_value_estimator(TreeGAE, gamma=0.5, branch_backup="child_uniform")
    assert by_instance.value_estimator is instance
    expected = by_name(batch()).loss_objective
    for other in (by_instance, by_class):
        assert_close(other(batch()).loss_objective, expected)
    assert float(loss().value_estimator.gamma) == 1.0
    assert not torch.isclose(expected, loss()(batch()).loss_objective)
    for wrong in (ValueEstimators.GAE, "gae", GAE(gamma=0.9, lmbda=0.9, value_network=None)):
        with pytest.raises(NotImplementedError, match=r"tree|Tree"):
            loss().make_value_estimator(wrong)  # type: ignore[arg-type]


def test_estimator_writes_zeros_where_nothing_trains_and_multiplies_credit() -> None:
    td = batch()
    td["tree", "credit"] = torch.where(td["tree", "rollout"] == 0, 0.5, 1.0)
    estimator = TreeGAE(value_network=TableValues())
    out = estimator(td.clone())
    mask = td["masks", "all_assistant_mask"]
    assert (out["advantage"][~mask] == 0).all() and (out["value_target"][~mask] == 0).all()
    value = TableValues().tree_values(*(td[k] for k in ("token", ("tree", "parent"), ("tree", "depth"))), None, mask.nonzero().squeeze(-1))  # type: ignore[arg-type]  # noqa: E501  # fmt: skip
    reward = (td["tree", "rollout"][mask] == 0).double()
    assert_close(out["value_target"][mask], reward)
    assert_close(out["advantage"][mask], (reward - value.detach()) * td["tree", "credit"][mask].double())
    assert_close(estimator.value_estimate(td), out["value_target"])
    assert "advantage" not in td


def test_split_advantages_go_through_the_loss() -> None:
    """[N, 2]; where γ = λ = 1 and one reward, no branch disagrees and the loss is that of the mean."""
    losses = {}
    for name, lmbda in (("agree", 1.0), ("differ", 0.0)):
        for branch in ("mean", "split"):
            loss_fn = loss().make_value_estimator("tree_gae", lmbda=lmbda, branch_advantage=branch)
            td = batch()
            td["state_value"] = torch.zeros(len(td), dtype=torch.float64)
            td["state_value"][td["tree", "depth"] == 5] = torch.tensor([3.0, -3.0], dtype=torch.float64)
            loss_fn.value_estimator(td)
            assert td["advantage"].shape == ((len(td),) if branch == "mean" else (len(td), 2))
            losses[name, branch] = loss_fn(td)
    assert_close(losses["agree", "split"].loss_objective, losses["agree", "mean"].loss_objective)
    assert_close(losses["differ", "split"].loss_critic, losses["differ", "mean"].loss_critic)
    difference = losses["differ", "split"].loss_objective - losses["differ", "mean"].loss_objective
    assert abs(float(difference.detach())) > 1e-4


def test_length_adaptive_and_decoupled_options() -> None:
    td = batch()
    estimator = TreeGAE(lmbda_critic=1.0, alpha=0.5, value_network=TableValues())
    out = estimator(td.clone())
    assert_close(out["value_target"], TreeGAE(value_network=TableValues())(td.clone())["value_target"])
    # trajectories of 3 and 4 tokens: l = 3.5, λ = 1 − 1/1.75; the other rollout has one token, λ does not matter
    by_hand = TreeGAE(lmbda=1 - 1 / 1.75, value_network=TableValues())(td.clone())
    assert_close(out["advantage"], by_hand["advantage"], rtol=1e-6, atol=1e-6)


def test_refusals() -> None:
    for match, options in (("branch_backup", {"branch_backup": "x"}), ("branch_advantage", {"branch_advantage": "x"}), ("gamma", {"gamma": 2.0}), ("alpha", {"alpha": 0.0})):  # noqa: E501  # fmt: skip
        with pytest.raises(ValueError, match=match):
            TreeGAE(**options)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="TreeCritic"):
        TreePPOLoss(TableActor(), nn.Linear(1, 1))
    with pytest.raises(ValueError, match="clip_value"):
        loss(clip_value=0.0)
    with pytest.raises(ValueError, match="critic_coeff"):
        loss(critic_coeff=-1.0)
    with pytest.raises(ValueError, match="entropy"):
        loss(entropy_coeff=0.1)
    with pytest.raises(KeyError, match="state_value"):
        TreeGAE()(batch())
    with pytest.raises(TypeError, match="functional"):
        TreeGAE(value_network=TableValues())(batch(), params=TensorDict())


# The critic on a language model


def forward_of(critic: TreeCritic, td: TensorDict) -> Tensor:
    targets = td["masks", "all_assistant_mask"].nonzero().squeeze(-1)
    return critic.tree_values(
        td["token"], td["tree", "parent"], td["tree", "depth"], td["tree", "subtree_end"], targets
    )


def drawn(critic: TreeCritic) -> TreeCritic:
    """With a head that says something."""
    torch.manual_seed(0)
    nn.init.normal_(critic.head.out.weight, std=0.2)
    return critic


def test_values_are_those_of_each_path_alone() -> None:
    policy, td = tiny_qwen3(), batch()
    critic = drawn(TreeCritic.of_policy(policy))
    targets = td["masks", "all_assistant_mask"].nonzero().squeeze(-1)
    found = forward_of(critic, td)
    parent = td["tree", "parent"].numpy()
    for value, target in zip(found, targets.tolist(), strict=True):
        before = td["token"][path_of(parent, target)[:-1]]
        hidden = policy.base_model(input_ids=before[None]).last_hidden_state[0, -1]
        assert_close(value, critic.head(hidden), rtol=1e-5, atol=1e-5)


def test_gradient_equals_that_of_the_paths() -> None:
    """The packed critic's loss against one forward a trajectory prefix, relative 1e-5 in float32."""
    policy, td = tiny_qwen3(), batch()
    critic = drawn(TreeCritic(policy))
    packed = TreeValueLoss(critic)(td).loss_critic
    targets = td["masks", "all_assistant_mask"].nonzero().squeeze(-1)
    parent, alone = td["tree", "parent"].numpy(), []
    for target in targets.tolist():
        rollout = int(td["tree", "rollout"][target])
        hidden = policy.base_model(input_ids=td["token"][path_of(parent, target)[:-1]][None]).last_hidden_state[0, -1]
        alone.append((critic.head(hidden) - (1 - rollout)).square() / (2 * (5, 1)[rollout]))
    parameters = list(critic.parameters())
    a, b = (
        torch.cat([g.reshape(-1) for g in torch.autograd.grad(x, parameters, allow_unused=True) if g is not None])
        for x in (packed, torch.stack(alone).sum())
    )
    assert float((a - b).norm()) <= 1e-5 * float(b.norm())


def test_shared_trunk_is_run_once_and_gives_the_same() -> None:
    policy, td = tiny_qwen3(), batch()
    shared = drawn(TreeCritic.of_policy(policy, shared=True))
    apart = drawn(TreeCritic(policy.base_model))
    calls: list[int] = []
    policy.base_model.register_forward_hook(lambda *_: calls.append(1))
    results = []
    for critic, forwards in ((shared, 1), (apart, 2)):
        calls.clear()
        out = TreePPOLoss(policy, critic, entropy_coeff=0.01)(td)
        assert len(calls) == forwards
        total = out.loss_objective + out.loss_critic + out.loss_entropy
        results.append([total.detach(), *torch.autograd.grad(total, [*policy.parameters(), *critic.head.parameters()])])
    for a, b in zip(*results, strict=True):
        assert_close(a, b, rtol=1e-4, atol=1e-5)
    assert {id(p) for p in TreePPOLoss(policy, shared).parameters()} == {
        id(p) for p in (*policy.parameters(), *shared.head.parameters())
    }


def test_detached_values_leave_the_trunk_alone() -> None:
    policy = tiny_qwen3()
    for critic in (drawn(TreeCritic(policy, shared=True, detach=True)), drawn(TreeCritic(policy, detach=True))):
        out = TreePPOLoss(policy, critic)(batch())
        grads = torch.autograd.grad(out.loss_critic, list(policy.parameters()), allow_unused=True, retain_graph=True)
        assert all(g is None for g in grads)
        (head,) = torch.autograd.grad(out.loss_critic, [critic.head.out.weight])
        assert float(head.norm()) > 0


def test_a_new_critic_says_zero_and_learns() -> None:
    critic = TreeCritic.of_policy(tiny_qwen3())
    assert (forward_of(critic, batch()) == 0).all()
    loss_fn = TreeValueLoss(critic)
    optimiser = torch.optim.Adam(loss_fn.parameters(), lr=3e-3)
    td = loss_fn.value_estimator(batch())
    first = float(loss_fn(td).loss_critic.detach())
    for _ in range(40):
        optimiser.zero_grad()
        out = loss_fn(td)
        out.loss_critic.backward()
        optimiser.step()
    assert float(out.loss_critic.detach()) < 0.05 * first
    assert float(out.explained_variance) > 0.9


@pytest.mark.parametrize("shared", [False, True])
def test_checkpoint(shared: bool, tmp_path: Path) -> None:
    policy = tiny_qwen3()
    critic = drawn(TreeCritic.of_policy(policy, shared=shared))
    critic.save(tmp_path / "critic")
    other = TreeCritic.of_policy(tiny_qwen3(seed=0 if shared else 1), shared=shared)
    other.load(tmp_path / "critic")
    assert torch.equal(forward_of(other, batch()), forward_of(critic, batch()))
    with pytest.raises(ConfigError, match="no critic"):
        other.load(tmp_path)
    with pytest.raises(ConfigError, match="fit"):
        TreeCritic.of_policy(tiny_qwen3(hidden=64), shared=shared).load(tmp_path / "critic")


def test_outputs_are_numbers_for_a_logger() -> None:
    out = loss()(batch())
    row = {k: float(v.detach()) for k, v in out.items() if v is not None}
    assert json.loads(json.dumps(row)) == row and set(row) == set(loss().out_keys)


def test_ratio_of_a_policy_to_itself_is_one() -> None:
    policy, td = tiny_qwen3(), batch()
    loss_fn = TreePPOLoss(policy, TreeCritic.of_policy(policy, shared=True))
    with torch.no_grad():
        td["old_log_prob"] = loss_fn.log_prob(td)
    path = path_of(td["tree", "parent"].numpy(), 3)
    assert_close(td["old_log_prob"][3], path_log_probs(policy, td["token"][path])[-1], rtol=1e-5, atol=1e-5)
    out = loss_fn(td)
    assert abs(float(out.kl_approx)) < 1e-5 and float(out.clip_fraction) == 0


@pytest.mark.parametrize(
    "options",
    [
        {"objective": "gspo"},
        {"objective": "cispo"},
        {"dual_clip": 1.01},
        {"correction": F.Correction("icepop", high=5.0, low=0.5)},
        {"correction": F.Correction("geometric", high=1.001, low=0.999)},
        {"kl_to_ref_coeff": 0.1, "kl_estimator": "k2"},
        {"normalisation": "prompt_mean"},
    ],
    ids=str,
)
def test_options_change_the_loss(options: dict[str, Any]) -> None:
    td = batch()
    generator = torch.Generator().manual_seed(0)
    td["token_log_prob"] = TreeGRPOLoss(TableActor()).log_prob(td).detach()
    td["old_log_prob"] = td["token_log_prob"] + 0.8 * torch.randn(len(td), generator=generator, dtype=torch.float64)
    td["token_log_prob"] = td["old_log_prob"] + 0.8 * torch.randn(len(td), generator=generator, dtype=torch.float64)
    td["ref_log_prob"] = td["token_log_prob"] - 0.3
    td["advantage"] = torch.randn(len(td), generator=generator, dtype=torch.float64)
    td["value_target"] = torch.zeros_like(td["advantage"])
    plain, other = loss(), loss(**options)

    def total(fn: TreePPOLoss) -> float:
        return sum(float(v.detach()) for k, v in fn(td).items() if k.startswith("loss_") and v is not None)

    assert abs(total(plain) - total(other)) > 1e-4
