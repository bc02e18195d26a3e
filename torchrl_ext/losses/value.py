"""The critic's loss, and what losses with a critic share: its values, its targets, the estimator of advantages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
from tensordict import NestedKey, TensorClass, TensorDictBase
from torch import Tensor, nn
from torchrl.objectives.utils import dispatch_value_estimator
from torchrl.objectives.value import ValueEstimatorBase

from torchrl_ext import functional as F
from torchrl_ext.critic import TreeValues
from torchrl_ext.estimators import TreeGAE
from torchrl_ext.losses.base import Reduction, TreeLoss

#: Keys of a loss that its value estimator reads or writes under the same name.
ESTIMATOR_KEYS = ("advantage", "value", "value_target", "reward", "done", "terminated", "action", "mask", "tree")


class Critic(TreeLoss):
    """A loss with a critic and a value estimator."""

    critic_network: nn.Module
    critic_coeff: float
    clip_value: float | None
    default_value_estimator = "tree_gae"

    def make_value_estimator(
        self, value_type: str | ValueEstimatorBase | type[ValueEstimatorBase] | None = None, **hyperparams: Any
    ) -> Critic:
        """Builds the estimator of advantages and value targets.

        Args:
            value_type: ``"tree_gae"``, or a ``TreeGAE``, or a subclass of it.
            hyperparams: As ``TreeGAE`` takes them.

        Raises:
            NotImplementedError: another of TorchRL's estimators; they know time, not trees.
        """
        name, found = self._prepare_value_estimator_kwargs(value_type, **hyperparams)
        if name is not None:
            dispatch_value_estimator(self, name, supported=("tree_gae",), **found)
        elif not isinstance(self._value_estimator, TreeGAE):
            raise NotImplementedError(f"{type(self._value_estimator).__name__} knows time, not trees: take TreeGAE")
        self._forward_value_estimator_keys()
        return self

    def _default_value_estimator(self) -> None:
        self.make_value_estimator()

    def _forward_value_estimator_keys(self, **kwargs: NestedKey) -> None:
        if self._value_estimator is not None:
            self._value_estimator.set_keys(**{name: getattr(self.tensor_keys, name) for name in ESTIMATOR_KEYS})

    def _values(self, tensordict: TensorDictBase, index_M: Tensor) -> Tensor:
        return cast(TreeValues, self.critic_network).tree_values(*self._structure(tensordict), index_M)

    def values(self, tensordict: TensorDictBase) -> Tensor:
        """[N]: V of the state before each trainable token, 0 elsewhere; for ``state_value`` before the first update."""
        index_M = self.targets(tensordict)
        value_M = self._values(tensordict, index_M)
        return value_M.new_zeros(tensordict.shape[0]).index_put((index_M,), value_M)

    def _estimated(self, tensordict: TensorDictBase, index_M: Tensor, value_M: Tensor) -> TensorDictBase:
        """The batch with advantages and targets: its own, or estimated from these values."""
        keys = self.tensor_keys
        missing = [k for k in (keys.advantage, keys.value_target) if tensordict.get(k, None) is None]
        if not missing:
            return tensordict
        out = tensordict.copy()
        if out.get(keys.value, None) is None:
            value_M = value_M.detach()
            out.set(keys.value, value_M.new_zeros(out.shape[0]).index_put((index_M,), value_M))
        return cast(TensorDictBase, self.value_estimator(out))

    def _critic_terms(self, tensordict: TensorDictBase, index_M: Tensor, value_M: Tensor) -> dict[str, Tensor]:
        """The outputs that concern the critic; each unique token counts once, whatever the policy's node weights."""
        target_M = self._read(tensordict, self.tensor_keys.value_target, index_M)
        old_M = None if self.clip_value is None else self._read(tensordict, self.tensor_keys.value, index_M)
        loss_M, clipped_M = F.value_loss(value_M, target_M, old_value_M=old_M, clip=self.clip_value)
        share_M = self._share(tensordict, index_M, value_M.dtype, "once")
        return {
            "loss_critic": self._sum(self.critic_coeff * loss_M * share_M, index_M, tensordict.shape[0]),
            "explained_variance": F.explained_variance(value_M, target_M, torch.ones_like(target_M)),
            "value_clip_fraction": clipped_M.to(value_M.dtype).mean(),
            "value_mean": value_M.detach().mean(),
        }


def check_critic(critic_network: nn.Module, critic_coeff: float, clip_value: float | None) -> None:
    """Refuses what no critic's loss can take.

    Raises:
        TypeError: a network without ``tree_values``.
        ValueError: a coefficient or a clip out of range.
    """
    if not isinstance(critic_network, TreeValues):
        raise TypeError(f"{type(critic_network).__name__} has no tree_values: wrap the trunk in a TreeCritic")
    if critic_coeff < 0:
        raise ValueError(f"critic_coeff must not be negative, got {critic_coeff}")
    if clip_value is not None and clip_value <= 0:
        raise ValueError(f"clip_value must be positive, or None for the plain squared error, got {clip_value}")


class TreeValueLossOutput(TensorClass["nocast"]):  # type: ignore[misc, name-defined]
    """What ``TreeValueLoss`` returns; see ``TreePPOLossOutput``."""

    loss_critic: torch.Tensor
    explained_variance: torch.Tensor
    value_clip_fraction: torch.Tensor
    value_mean: torch.Tensor


class TreeValueLoss(Critic):
    """The critic alone, for its pretraining: ``(1/G) Σᵢ (1/Nᵢ) Σ_t (V_t − G_t)²`` over unique trainable tokens.

    Without a ``value_target`` in the batch the estimator makes one; its defaults, γ = λ = 1, give Monte-Carlo returns,
    VAPO's value pretraining (arXiv:2504.05118).

    Args:
        critic_network: A ``TreeCritic``, or another module with ``tree_values``.
        critic_coeff: Factor on the loss.
        clip_value: See ``functional.value_loss``; needs ``state_value`` in the batch.
        normalisation, constant, reduction: As in ``TreeGRPOLoss``.

    Raises:
        TypeError, ValueError: a network or an option that does not fit.
    """

    @dataclass
    class _AcceptedKeys(TreeLoss._AcceptedKeys):
        """Keys of the flat batch, [N] each; ``reward``, ``done`` and ``terminated`` lie under ``"next"``."""

        advantage: NestedKey = "advantage"
        value: NestedKey = "state_value"
        value_target: NestedKey = "value_target"
        reward: NestedKey = "reward"
        done: NestedKey = "done"
        terminated: NestedKey = "terminated"

    default_keys = _AcceptedKeys
    tensor_keys: _AcceptedKeys
    critic_network: nn.Module

    def __init__(
        self,
        critic_network: nn.Module,
        *,
        critic_coeff: float = 1.0,
        clip_value: float | None = None,
        normalisation: F.Normalisation = "rollout_mean",
        constant: float | None = None,
        reduction: Reduction = "mean",
    ) -> None:
        super().__init__(node_weight="once", normalisation=normalisation, constant=constant, reduction=reduction)
        check_critic(critic_network, critic_coeff, clip_value)
        self.critic_network = critic_network
        self.critic_coeff = critic_coeff
        self.clip_value = clip_value

    @property
    def in_keys(self) -> list[NestedKey]:
        """Keys that every batch needs; a ``value_target`` takes the place of the rewards."""
        return [*self._structure_keys(), ("next", self.tensor_keys.reward)]

    @property
    def out_keys(self) -> list[NestedKey]:
        """Names of the outputs."""
        return ["loss_critic", "explained_variance", "value_clip_fraction", "value_mean"]

    def forward(self, tensordict: TensorDictBase) -> TreeValueLossOutput:
        """Values the batch once and returns the loss.

        Args:
            tensordict: Flat batch [N] of ``to_training_batch``; only read.

        Raises:
            ValueError: no token trains.
        """
        index_M = self.targets(tensordict)
        value_M = self._values(tensordict, index_M)
        terms = self._critic_terms(self._estimated(tensordict, index_M, value_M), index_M, value_M)
        return TreeValueLossOutput(**terms, batch_size=[])
