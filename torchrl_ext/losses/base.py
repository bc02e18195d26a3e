"""What losses over packed trees share: which tokens train, how they are scored, how their losses are summed.

Invariants: each unique trainable token enters a loss once, with its node weight; only ``loss_*`` outputs carry a
gradient, and their sum is what to minimise; the losses of a batch's micro-batches add up to the batch's loss.

Shape legend: ``N`` token-nodes of the flat batch (``data.to_training_batch``), ``M`` trainable ones among them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol, cast, runtime_checkable

import torch
from tensordict import NestedKey, TensorDictBase
from torch import Tensor, nn
from torchrl.objectives.common import LossModule
from transformers import PreTrainedModel

from torchrl_ext import functional as F
from torchrl_ext.models import TreeScores, tree_scores

Reduction = Literal["mean", "sum", "none"]


@runtime_checkable
class TreeActor(Protocol):
    """A module that scores tree tokens itself; any other actor is taken as a Hugging Face causal LM."""

    def tree_log_probs(
        self, tokens: Tensor, parent: Tensor, depth: Tensor, subtree_end: Tensor, targets: Tensor, *, temperature: float
    ) -> Tensor:
        """[M]: log-probability of ``tokens[targets]``, each given its ancestors."""
        ...


class TreeLoss(LossModule):  # type: ignore[misc]
    """Keys, targets, shares and sums."""

    @dataclass
    class _AcceptedKeys:
        """Keys of the flat batch; ``tree`` and ``batch`` name the sub-TensorDicts of ``to_training_batch``."""

        action: NestedKey = "token"
        mask: NestedKey = ("masks", "all_assistant_mask")
        tree: NestedKey = "tree"
        batch: NestedKey = "batch"

    default_keys = _AcceptedKeys
    reduction: Reduction

    def __init__(
        self,
        *,
        node_weight: F.NodeWeight,
        normalisation: F.Normalisation,
        constant: float | None,
        reduction: Reduction,
    ) -> None:
        super().__init__()
        if reduction not in ("mean", "sum", "none"):
            raise ValueError(f"reduction must be 'mean', 'sum' or 'none', got {reduction!r}")
        one = torch.ones(1, dtype=torch.int64)  # refuses unknown options here, not at the first batch
        F.token_share(F.node_weight(one, one, node_weight), one, 1, normalisation, constant=constant, prompt_M=one)
        self.node_weight: F.NodeWeight = node_weight
        self.normalisation: F.Normalisation = normalisation
        self.constant = constant
        self.reduction = reduction

    @property
    def functional(self) -> bool:
        """False: networks stay plain submodules, so that sharding and adapters work on them."""
        return False

    def _forward_value_estimator_keys(self, **kwargs: NestedKey) -> None:
        """There is no value estimator to tell; ``in_keys`` follow ``tensor_keys`` by themselves."""

    def _tree_key(self, name: str) -> tuple[str, ...]:
        return (*as_tuple(self.tensor_keys.tree), name)

    def _structure_keys(self) -> list[NestedKey]:
        names = ["parent", "depth", "subtree_end", "rollout", "n_leaves", "rollout_leaves"]
        totals = ["n_rollouts", "n_tokens"]
        if self.normalisation == "prompt_mean":
            names.append("prompt")
            totals.append("n_prompts")
        keys = [*map(self._tree_key, names), *((*as_tuple(self.tensor_keys.batch), name) for name in totals)]
        return [self.tensor_keys.action, self.tensor_keys.mask, *keys]

    def targets(self, tensordict: TensorDictBase) -> Tensor:
        """[M] int64: positions of the tokens that enter the loss.

        Raises:
            ValueError: there is none, so the batch has no loss.
        """
        mask_N = tensordict.get(self.tensor_keys.mask)
        for key in self._loss_mask_keys():
            extra = tensordict.get(key, None)
            if extra is not None:
                mask_N = mask_N & self._expand_loss_mask(extra, mask_N)
        index_M = mask_N.nonzero().squeeze(-1)
        if index_M.numel() == 0:
            raise ValueError("the batch holds no trainable token: skip this step")
        return index_M

    def _structure(self, tensordict: TensorDictBase) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Tokens, parents, depths and ends of subtrees, [N] each."""
        tokens, parent, depth, end = (
            tensordict.get(key)
            for key in (self.tensor_keys.action, *map(self._tree_key, ("parent", "depth", "subtree_end")))
        )
        return tokens, parent, depth, end

    def _of_tokens(self, tensordict: TensorDictBase, name: str, index_M: Tensor) -> Tensor:
        return cast(Tensor, tensordict.get(self._tree_key(name))[index_M])

    def _total(self, tensordict: TensorDictBase, name: str) -> int:
        return int(tensordict.get((*as_tuple(self.tensor_keys.batch), name))[0])

    def _share(
        self, tensordict: TensorDictBase, index_M: Tensor, dtype: torch.dtype, node_weight: F.NodeWeight
    ) -> Tensor:
        """[M]: factor of each token in a loss of reduction "mean"; its node weight alone otherwise."""
        rollout_M, n_leaves_M, leaves_M = (
            self._of_tokens(tensordict, name, index_M) for name in ("rollout", "n_leaves", "rollout_leaves")
        )
        weight_M = F.node_weight(n_leaves_M, leaves_M, node_weight, dtype=dtype)
        if self.reduction != "mean":
            return weight_M
        prompts: dict[str, Tensor | int] = {}
        if self.normalisation == "prompt_mean":
            prompts = {
                "prompt_M": self._of_tokens(tensordict, "prompt", index_M),
                "n_prompts": self._total(tensordict, "n_prompts"),
            }
        return F.token_share(
            weight_M,
            rollout_M,
            self._total(tensordict, "n_rollouts"),
            self.normalisation,
            constant=self.constant,
            n_tokens=self._total(tensordict, "n_tokens"),
            **prompts,
        )

    def _sum(self, loss_M: Tensor, index_M: Tensor, size: int) -> Tensor:
        """A scalar; under reduction "none" [N], 0 where nothing trains."""
        if self.reduction == "none":
            return loss_M.new_zeros(size).index_put((index_M,), loss_M)
        return loss_M.sum()

    @staticmethod
    def _read(tensordict: TensorDictBase, key: NestedKey, index_M: Tensor) -> Tensor:
        value_N = tensordict.get(key, None)
        if value_N is None:
            raise KeyError(f"the batch has no {key!r}; it holds {sorted(map(str, tensordict.keys(True, True)))}")
        value_M: Tensor = value_N[index_M].detach()
        if not bool(torch.isfinite(value_M).all()):
            raise ValueError(f"{key!r} is not finite at a trainable token: was it scored for this very batch?")
        return value_M


class PolicyLoss(TreeLoss):
    """A loss of an actor."""

    actor_network: nn.Module

    def __init__(
        self,
        actor_network: nn.Module,
        *,
        node_weight: F.NodeWeight,
        normalisation: F.Normalisation,
        constant: float | None,
        temperature: float,
        reduction: Reduction,
    ) -> None:
        super().__init__(node_weight=node_weight, normalisation=normalisation, constant=constant, reduction=reduction)
        if temperature <= 0:
            raise ValueError(f"temperature must be positive, got {temperature}: greedy sampling has no ratio")
        self.actor_network = actor_network
        self.temperature = temperature

    def log_prob(self, tensordict: TensorDictBase) -> Tensor:
        """Scores the batch's trainable tokens: for π_old before the first update, or with a reference actor.

        Returns:
            [N], NaN where the token does not train.
        """
        index_M = self.targets(tensordict)
        log_prob_M = self._score(tensordict, index_M).log_probs
        out_N = log_prob_M.new_full((tensordict.shape[0],), torch.nan)
        return out_N.index_put((index_M,), log_prob_M)

    def _score(self, tensordict: TensorDictBase, index_M: Tensor, *, with_entropy: bool = False) -> TreeScores:
        structure = self._structure(tensordict)
        actor = self.actor_network
        if isinstance(actor, TreeActor):
            log_probs = actor.tree_log_probs(*structure, index_M, temperature=self.temperature)
            return TreeScores(log_probs, None)
        return tree_scores(
            cast(PreTrainedModel, actor), *structure, index_M, temperature=self.temperature, with_entropy=with_entropy
        )


def as_tuple(key: NestedKey) -> tuple[str, ...]:
    """A key as its path."""
    return (key,) if isinstance(key, str) else tuple(key)
