"""On chains, tree GAE and tree PPO are TorchRL's own GAE and ClipPPOLoss; on trees they are those of the branches."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict
from tensordict.nn import ProbabilisticTensorDictModule, ProbabilisticTensorDictSequential, TensorDictModule
from torch import Tensor, nn
from torch.distributions import Categorical
from torch.testing import assert_close
from torchrl.objectives import ClipPPOLoss
from torchrl.objectives.value import GAE
from torchrl.objectives.value.functional import generalized_advantage_estimate, vec_generalized_advantage_estimate

from clawgym_env.tree.pack import PackedTree
from tests.forests import Forest, forests
from tests.trees import Call, TableActor, call_lists, packed_of_calls
from torchrl_ext import functional as F
from torchrl_ext.data import to_training_batch, tree_td
from torchrl_ext.losses import TreePPOLoss

#: Exact in float32: TorchRL's GAE multiplies γ and λ with integers, which makes them float32 whatever the values are.
UNIT = st.sampled_from([0.0, 0.5, 0.96875, 1.0])


def stock_gae(value: Tensor, reward: Tensor, gamma: float, lmbda: float, *, vec: bool) -> tuple[Tensor, Tensor]:
    """TorchRL's GAE of one finished trajectory [T]."""
    done = torch.zeros_like(value, dtype=torch.bool)
    done[-1] = True
    following = torch.cat([value[1:], value.new_zeros(1)])
    kind = vec_generalized_advantage_estimate if vec else generalized_advantage_estimate
    found = kind(gamma, lmbda, *(x[:, None] for x in (value, following, reward, done, done)))
    return found[0].squeeze(-1), found[1].squeeze(-1)


@given(forests(max_size=40), UNIT, UNIT, st.booleans())
@settings(max_examples=60)
def test_leaf_mean_of_torchrl_gae(f: Forest, gamma: float, lmbda: float, vec: bool) -> None:
    """Of chains: TorchRL's GAE; of trees: the mean over leaves. TorchRL's vectorised one fails where γλ is 0."""
    vec = vec and gamma * lmbda > 0
    tree = F.trainable_tree(f.parent, f.trainable, f.n_leaves)
    found = F.tree_gae(f.value[tree.index_M], f.reward[tree.index_M], tree, gamma=gamma, lmbda=lmbda)
    sums, count = torch.zeros(2, len(f), dtype=torch.float64), torch.zeros(len(f), dtype=torch.float64)
    for path in f.trajectories:
        sums[:, path] += torch.stack(stock_gae(f.value[path], f.reward[path], gamma, lmbda, vec=vec))
        count[path] += 1
    expected = (sums / count)[:, tree.index_M]
    assert_close(torch.stack(found), expected, rtol=1e-5, atol=1e-5)
    if not vec:
        assert_close(torch.stack(found), expected, rtol=1e-10, atol=1e-10)


class Values(nn.Module):
    """V from a table of (depth, previous token)."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(7, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1)))

    def tree_values(self, tokens: Tensor, parent: Tensor, depth: Tensor, end: Tensor, targets: Tensor) -> Tensor:
        """See ``torchrl_ext.critic.TreeValues``."""
        return self.table[depth[targets] % 7, tokens[parent[targets]]]


class AsModule(nn.Module):
    """A table's row of (depth, previous token), for TorchRL."""

    def __init__(self, table: nn.Parameter) -> None:
        super().__init__()
        self.table = table

    def forward(self, state: Tensor) -> Tensor:
        found = self.table[state[..., 0] % 7, state[..., 1]]
        return found if found.ndim > state.ndim - 1 else found[..., None]


def stock_loss(actor: TableActor, critic: Values, **options: Any) -> ClipPPOLoss:
    policy = ProbabilisticTensorDictSequential(
        TensorDictModule(AsModule(actor.table), in_keys=["state"], out_keys=["logits"]),
        ProbabilisticTensorDictModule(["logits"], ["action"], distribution_class=Categorical, return_log_prob=True),
    )
    value = TensorDictModule(AsModule(critic.table), in_keys=["state"], out_keys=["state_value"])
    return ClipPPOLoss(
        policy,
        value,
        entropy_bonus=False,
        loss_critic_type="l2",
        critic_coeff=0.5,
        normalize_advantage=False,
        **options,
    )


def stock_batch(tree: PackedTree, reward: float) -> TensorDict:
    """The trainable tokens of a chain as TorchRL sees them: the policy's steps, one after the other."""
    index = torch.from_numpy(tree.trainable).nonzero().squeeze(-1)
    token, parent, depth = (torch.from_numpy(x) for x in (tree.tokens, tree.parent, tree.depth))
    state = torch.stack([depth[index], token[parent[index]]], -1)
    done = torch.zeros(len(index), 1, dtype=torch.bool)
    done[-1] = True
    following = torch.cat([state[1:], state[-1:]])
    return TensorDict(
        {
            "state": state,
            "action": token[index],
            "action_log_prob": torch.from_numpy(tree.log_probs).double()[index],
            "next": {"state": following, "reward": reward * done.double(), "done": done, "terminated": done},
        },
        [len(index)],
    )


@given(call_lists(max_calls=1), st.floats(-1, 1), UNIT, UNIT, st.sampled_from([None, 0.1]))
@settings(max_examples=25)
def test_a_chain_equals_torchrl_ppo(
    calls: list[Call], reward: float, gamma: float, lmbda: float, clip: float | None
) -> None:
    """Objective, critic's loss, explained variance and both gradients, of several turns with tool output between.

    TorchRL keeps ε as float32, hence the tolerance.
    """
    history = calls[0].prompt + calls[0].response
    turns = [calls[0], Call([*history, 4, 3], [2, 0]), Call([*history, 4, 3, 2, 0, 1], [1, 4, 4])]
    tree = packed_of_calls(turns)
    actor, critic = TableActor(), Values()
    ours = TreePPOLoss(actor, critic, clip_epsilon=0.2, critic_coeff=0.5, clip_value=clip)
    ours.make_value_estimator("tree_gae", gamma=gamma, lmbda=lmbda)
    td = to_training_batch([tree_td(tree, reward=reward, query="q")])
    td["next", "reward"] = reward * td["next", "done"].double()
    ours.value_estimator(td)

    stock = stock_loss(actor, critic, clip_epsilon=0.2, clip_value=clip)
    batch = stock_batch(tree, reward)
    GAE(gamma=gamma, lmbda=lmbda, value_network=stock.critic_network, vectorized=False)(batch)
    assert_close(td["advantage"][td["masks", "all_assistant_mask"]], batch["advantage"].squeeze(-1))
    assert_close(td["value_target"][td["masks", "all_assistant_mask"]], batch["value_target"].squeeze(-1))
    with torch.no_grad():
        critic.table += 0.3  # so that the clip is felt
    a, b = ours(td), stock(batch)
    for name in ("loss_objective", "loss_critic"):  # clip_fraction: TorchRL also counts ratios whose clip is idle
        assert_close(a.get(name), b[name].to(a.get(name).dtype), rtol=1e-6, atol=1e-7)
    if float(batch["value_target"].var()) > 1e-9:
        assert_close(a.explained_variance, b["explained_variance"].reshape(()), rtol=1e-6, atol=1e-6)
    ours_grad = torch.autograd.grad(a.loss_objective + a.loss_critic, (actor.table, critic.table))
    theirs_grad = torch.autograd.grad(b["loss_objective"] + b["loss_critic"], list(stock.parameters()))
    shapes = {g.shape: g for g in theirs_grad}
    for g in ours_grad:
        assert_close(g, shapes[g.shape], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("weight", ["once", "leaf_fraction", "per_leaf", "sqrt"])
@given(calls=call_lists(max_calls=5), reward=st.floats(-1, 1))
@settings(max_examples=20)
def test_a_tree_equals_its_branches(weight: str, calls: list[Call], reward: float) -> None:
    """γ = λ = 1: the packed loss is every branch by itself, A = R − V, each token shared out among its branches."""
    tree = packed_of_calls(calls)
    actor, critic = TableActor(), Values()
    loss_fn = TreePPOLoss(actor, critic, clip_epsilon=0.2, node_weight=weight)  # type: ignore[arg-type]
    td = to_training_batch([tree_td(tree, reward=reward, query="q")])
    td["next", "reward"] = reward * td["next", "done"].double()
    out = loss_fn(td)
    parent, mask = td["tree", "parent"], td["masks", "all_assistant_mask"]
    forest = Forest(parent, mask, td["tree", "n_leaves"], torch.zeros(len(td)), torch.zeros(len(td)))
    paths, total = forest.trajectories, int(mask.sum())
    held = {t: sum(t in path for path in paths) for path in paths for t in path}
    share = {
        "once": lambda n: 1.0,
        "leaf_fraction": lambda n: n / len(paths),
        "per_leaf": float,
        "sqrt": lambda n: n**-0.5,
    }
    policy, value = torch.zeros(()), torch.zeros(())
    for path in paths:
        for t in path:
            structure = (td["token"], parent, td["tree", "depth"], td["tree", "subtree_end"], torch.tensor([t]))
            v = critic.tree_values(*structure)[0]
            ratio = (actor.tree_log_probs(*structure, temperature=1.0)[0] - td["token_log_prob"][t]).exp()
            a = reward - v.detach()
            objective = torch.minimum(ratio * a, ratio.clamp(0.8, 1.2) * a)
            policy = policy - objective * share[weight](held[t]) / held[t] / total
            value = value + (v - reward).square() / held[t] / total
    assert_close(out.loss_objective, policy, rtol=1e-9, atol=1e-9)
    assert_close(out.loss_critic, value, rtol=1e-9, atol=1e-9)
    for x, y, parameter in ((out.loss_objective, policy, actor.table), (out.loss_critic, value, critic.table)):
        assert_close(torch.autograd.grad(x, parameter)[0], torch.autograd.grad(y, parameter)[0], rtol=1e-9, atol=1e-9)
