"""Advantage estimators: of rollouts within their group, and of tokens from a critic over the tree.

Invariant: an estimator reads scores and writes advantages. It drops nothing unless it is told to filter; rollouts
without a score stay in the batch, out of every baseline, with advantage 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, cast

import torch
from tensordict import NestedKey, TensorDictBase, lazy_stack
from torch import Tensor
from torchrl.envs.transforms import Transform
from torchrl.objectives.utils import register_value_estimator
from torchrl.objectives.value import ValueEstimatorBase

from torchrl_ext import functional as F
from torchrl_ext.critic import TreeValues


class TreeGroupAdvantage(Transform):  # type: ignore[misc]
    """Group-relative advantages of rollout TensorDicts (Eq 7, arXiv:2608.16798), as a replay-buffer transform.

    It stands beside TorchRL's ``MCAdvantage``: it acts when the buffer is extended, with a lazy stack of whole groups.
    Unlike there, the unit is a rollout whatever its number of branches, σ is the population's, and unscored rollouts
    are left out of the baseline. Without a buffer, ``inv(batch)`` returns the batch with advantages.

    Args:
        scale: ``std`` or ``none`` (Dr.GRPO); see ``functional.group_advantage``.
        baseline: ``mean`` or ``leave_one_out``.
        eps: Added to σ.
        zero_variance: ``zero``: rollouts of a group whose scores are all equal stay, with advantage 0. ``filter``: they
            leave the batch, and so do rollouts without a score (DAPO's dynamic sampling, arXiv:2503.14476); where none
            is left, ``None``, which a replay buffer takes as nothing to write.
        negative_weight: Factor in [0, 1] on advantages below 0; 1 leaves them as they are. Below 1 the advantages of a
            group no longer sum to 0.
        group_key: str a rollout; rollouts of equal value form a group.
        reward_key: One number a rollout; not read where the rollout is not scored.
        scored_key: [1] bool a rollout.
        advantage_key: Written, in the reward's shape.
    """

    def __init__(
        self,
        *,
        scale: F.Scale = "std",
        baseline: F.Baseline = "mean",
        eps: float = 1e-6,
        zero_variance: Literal["zero", "filter"] = "zero",
        negative_weight: float = 1.0,
        group_key: NestedKey = "query",
        reward_key: NestedKey = ("next", "reward"),
        scored_key: NestedKey = ("next", "scored"),
        advantage_key: NestedKey = "advantage",
    ) -> None:
        super().__init__()
        empty = torch.zeros(0)  # refuses unknown options here, not at the first batch
        F.group_advantage(empty, empty.long(), valid_R=empty.bool(), scale=scale, baseline=baseline, eps=eps)
        self.in_keys = [group_key, reward_key, scored_key]
        self.out_keys = [advantage_key]
        if not 0.0 <= negative_weight <= 1.0:
            raise ValueError(f"negative_weight must lie in [0, 1], got {negative_weight}")
        self.scale, self.baseline, self.eps = scale, baseline, eps
        if zero_variance not in ("zero", "filter"):
            raise ValueError(f"zero_variance must be 'zero' or 'filter', got {zero_variance!r}")
        self.zero_variance = zero_variance
        self.negative_weight = negative_weight
        self.group_key, self.reward_key, self.scored_key = group_key, reward_key, scored_key
        self.advantage_key = advantage_key

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Sampling from the buffer leaves the advantages as they are."""
        return tensordict

    def _inv_call(self, tensordict: TensorDictBase) -> TensorDictBase | None:
        tds = list(tensordict.unbind(0))
        names: dict[str, int] = {}
        group_R = torch.tensor([names.setdefault(td[self.group_key], len(names)) for td in tds], dtype=torch.int64)
        reward_R = torch.cat([td[self.reward_key].reshape(1) for td in tds])
        scored_R = torch.cat([td[self.scored_key].reshape(1) for td in tds])
        found = F.group_advantage(
            reward_R,
            group_R.to(reward_R.device),
            valid_R=scored_R,
            scale=self.scale,
            baseline=self.baseline,
            eps=self.eps,
        )
        advantage_R = torch.where(found.advantage_R < 0, self.negative_weight * found.advantage_R, found.advantage_R)
        for td, advantage in zip(tds, advantage_R, strict=True):
            td[self.advantage_key] = advantage.expand_as(td[self.reward_key]).clone()
        if self.zero_variance == "zero":
            return tensordict
        kept = [td for td, useful in zip(tds, found.has_variance_R.tolist(), strict=True) if useful]
        return lazy_stack(kept) if kept else None


@register_value_estimator("tree_gae", default_kwargs={"gamma": 1.0, "lmbda": 1.0})
class TreeGAE(ValueEstimatorBase):  # type: ignore[misc]
    """Generalised advantage estimation over the flat forest of ``to_training_batch``; see ``functional.tree_gae``.

    Writes ``advantage`` and ``value_target``, [N], 0 where nothing trains. The advantage is times the token's credit
    (``filters`` of the recipes); the target is not. What is estimated carries no gradient.

    Args:
        gamma: γ in [0, 1].
        lmbda: λ in [0, 1] of the policy's advantage.
        lmbda_critic: λ of the value target; ``None``: the same (VAPO: 1).
        alpha: λ = 1 − 1/(α l) by the length of the rollout's trajectories, in the place of ``lmbda``
            (``functional.length_adaptive_lambda``); ``None``: ``lmbda``.
        branch_backup: ``leaf_mean`` or ``child_uniform``.
        branch_advantage: ``mean``: one advantage a token. ``split``: [N, 2], the means over its branches of the
            positive and of the negative parts, for an exact clipped objective where branches disagree about a shared
            token; costs memory for the sum of the trajectories' lengths.
        average_gae: Whitens the advantage over the batch, each unique token counted once, before credit.
        value_network: Has ``tree_values``; asked where the batch has no ``state_value``. A loss passes its critic.
        device: Of the buffers.

    Raises:
        ValueError: an option is unknown or out of range.
    """

    @dataclass
    class _AcceptedKeys(ValueEstimatorBase._AcceptedKeys):  # type: ignore[misc]
        """Every inherited key is declared again: ``set_keys`` looks into this very class."""

        advantage: NestedKey = "advantage"
        value_target: NestedKey = "value_target"
        value: NestedKey = "state_value"
        reward: NestedKey = "reward"
        done: NestedKey = "done"
        terminated: NestedKey = "terminated"
        steps_to_next_obs: NestedKey = "steps_to_next_obs"
        sample_log_prob: NestedKey | None = "token_log_prob"
        action: NestedKey = "token"
        mask: NestedKey = ("masks", "all_assistant_mask")
        tree: NestedKey = "tree"

    default_keys = _AcceptedKeys
    tensor_keys: _AcceptedKeys
    value_network: TreeValues | None

    def __init__(
        self,
        *,
        gamma: float = 1.0,
        lmbda: float = 1.0,
        lmbda_critic: float | None = None,
        alpha: float | None = None,
        branch_backup: F.BranchBackup = "leaf_mean",
        branch_advantage: Literal["mean", "split"] = "mean",
        average_gae: bool = False,
        value_network: TreeValues | None = None,
        device: torch.device | None = None,
    ) -> None:
        super().__init__(value_network=value_network, device=device)
        if branch_advantage not in ("mean", "split"):
            raise ValueError(f"branch_advantage must be 'mean' or 'split', got {branch_advantage!r}")
        none = torch.zeros(0)  # refuses unknown options here, not at the first batch
        tree = F.trainable_tree(none.long(), none.bool(), none.long(), branch_backup)
        F.tree_gae(none, none, tree, gamma=gamma, lmbda=lmbda, lmbda_critic=lmbda_critic)
        if alpha is not None:
            F.length_adaptive_lambda(none.long(), none.long(), alpha, tree)
        self.register_buffer("gamma", torch.tensor(float(gamma), device=self._device))
        self.register_buffer("lmbda", torch.tensor(float(lmbda), device=self._device))
        self.lmbda_critic, self.alpha = lmbda_critic, alpha
        self.branch_backup: F.BranchBackup = branch_backup
        self.branch_advantage = branch_advantage
        self.average_gae = average_gae

    def _tree(self, name: str) -> NestedKey:
        tree = self.tensor_keys.tree
        return (tree, name) if isinstance(tree, str) else (*tree, name)

    @property
    def in_keys(self) -> list[NestedKey]:
        """Keys that every batch needs; ``state_value`` only without a value network."""
        keys = [self.tensor_keys.mask, ("next", self.tensor_keys.reward)]
        keys += [self._tree(name) for name in ("parent", "rollout", "n_leaves", "credit")]
        if self.value_network is None:
            return [*keys, self.tensor_keys.value]
        return [*keys, self.tensor_keys.action, self._tree("depth"), self._tree("subtree_end")]

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def forward(
        self,
        tensordict: TensorDictBase,
        *,
        params: TensorDictBase | None = None,
        target_params: TensorDictBase | None = None,
    ) -> TensorDictBase:
        """Writes advantages and value targets, and ``state_value`` where the value network was asked.

        Args:
            tensordict: Flat batch [N] of ``to_training_batch``.
            params, target_params: Refused: the value network is not functional.

        Raises:
            KeyError: no ``state_value`` and no value network.
            TypeError: functional parameters were given.
        """
        if params is not None or target_params is not None:
            raise TypeError("the critic of a tree is a plain module: it takes no functional parameters")
        keys = self.tensor_keys
        mask_N = tensordict.get(keys.mask)
        value_N = self._state_value(tensordict, mask_N)
        tree = F.trainable_tree(
            tensordict.get(self._tree("parent")), mask_N, tensordict.get(self._tree("n_leaves")), self.branch_backup
        )
        index_M = tree.index_M
        reward_M = tensordict.get(("next", keys.reward))[index_M].to(value_N.dtype)
        lmbda = self._lmbda(tensordict, tree)
        gamma = float(self.gamma)
        found = F.tree_gae(value_N[index_M], reward_M, tree, gamma=gamma, lmbda=lmbda, lmbda_critic=self.lmbda_critic)
        advantage_M = self._advantage(found, value_N[index_M], reward_M, tree, gamma, lmbda)
        credit_M = tensordict.get(self._tree("credit"))[index_M].to(value_N.dtype)
        advantage_M = advantage_M * credit_M.reshape(-1, *[1] * (advantage_M.ndim - 1))
        zero_N = torch.zeros_like(value_N)
        shape = (len(zero_N), *advantage_M.shape[1:])
        tensordict.set(keys.advantage, zero_N.new_zeros(shape).index_put((index_M,), advantage_M))
        tensordict.set(keys.value_target, zero_N.index_put((index_M,), found.value_target_M))
        return tensordict

    def value_estimate(self, tensordict: TensorDictBase, **kwargs: TensorDictBase | None) -> Tensor:
        """[N]: the value target."""
        return cast(Tensor, self.forward(tensordict.copy(), **kwargs).get(self.tensor_keys.value_target))

    def _state_value(self, tensordict: TensorDictBase, mask_N: Tensor) -> Tensor:
        value_N = tensordict.get(self.tensor_keys.value, None)
        if value_N is not None:
            return cast(Tensor, value_N.detach())
        if self.value_network is None:
            raise KeyError(f"the batch has no {self.tensor_keys.value!r}, and TreeGAE no value network to ask")
        index_M = mask_N.nonzero().squeeze(-1)
        tokens = tensordict.get(self.tensor_keys.action)
        parent, depth, end = (tensordict.get(self._tree(name)) for name in ("parent", "depth", "subtree_end"))
        value_M = self.value_network.tree_values(tokens, parent, depth, end, index_M)
        value_N = value_M.new_zeros(tensordict.shape[0]).index_put((index_M,), value_M)
        tensordict.set(self.tensor_keys.value, value_N)
        return value_N

    def _lmbda(self, tensordict: TensorDictBase, tree: F.TrainableTree) -> float | Tensor:
        if self.alpha is None:
            return float(self.lmbda)
        n_leaves_M, rollout_M = (tensordict.get(self._tree(k))[tree.index_M] for k in ("n_leaves", "rollout"))
        return F.length_adaptive_lambda(n_leaves_M, rollout_M, self.alpha, tree)

    def _advantage(
        self,
        found: F.TreeEstimate,
        value_M: Tensor,
        reward_M: Tensor,
        tree: F.TrainableTree,
        gamma: float,
        lmbda: float | Tensor,
    ) -> Tensor:
        """[M] or, split, [M, 2]."""
        mean, std = torch.zeros_like(value_M[:1]).sum(), torch.ones_like(value_M[:1]).sum()
        if self.average_gae:
            mean, std = F.moments(found.advantage_M, torch.ones_like(value_M))
            std = std + 1e-8
        if self.branch_advantage == "mean":
            return (found.advantage_M - mean) / std
        advantage_P, node_P, weight_P = F.branch_gae(value_M, reward_M, tree, gamma=gamma, lmbda=lmbda)
        return torch.stack(F.split_advantage((advantage_P - mean) / std, node_P, weight_P, len(value_M)), -1)
