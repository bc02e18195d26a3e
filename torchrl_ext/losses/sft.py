"""Supervised fine-tuning on packed trees."""

from __future__ import annotations

from tensordict import NestedKey, TensorDictBase
from torch import nn
from torchrl.objectives.llm.sft import SFTLossOutput

from torchrl_ext import functional as F
from torchrl_ext.losses.base import PolicyLoss, Reduction


class TreeSFTLoss(PolicyLoss):
    """Negative log-likelihood of the trainable tokens, under the weights and denominators of ``TreeGRPOLoss``.

    ``−(1/G) Σᵢ (1/Nᵢ) Σ_t w_t log π(t | ancestors)``.

    Args:
        actor_network: A Hugging Face causal LM, or a ``TreeActor``.

    The other arguments and the errors are those of ``TreeGRPOLoss``.
    """

    actor_network: nn.Module

    def __init__(
        self,
        actor_network: nn.Module,
        *,
        node_weight: F.NodeWeight = "once",
        normalisation: F.Normalisation = "rollout_mean",
        constant: float | None = None,
        temperature: float = 1.0,
        reduction: Reduction = "mean",
    ) -> None:
        super().__init__(
            actor_network,
            node_weight=node_weight,
            normalisation=normalisation,
            constant=constant,
            temperature=temperature,
            reduction=reduction,
        )

    @property
    def in_keys(self) -> list[NestedKey]:
        """Keys that every batch needs."""
        return self._structure_keys()

    @property
    def out_keys(self) -> list[NestedKey]:
        """Names of the outputs."""
        return ["loss_sft"]

    def forward(self, tensordict: TensorDictBase) -> SFTLossOutput:
        """Scores the batch once and returns the loss.

        Args:
            tensordict: Flat batch [N] of ``to_training_batch``; only read.

        Raises:
            ValueError: no token trains.
        """
        index_M = self.targets(tensordict)
        log_prob_M = self._score(tensordict, index_M).log_probs
        share_M = self._share(tensordict, index_M, log_prob_M.dtype, self.node_weight)
        return SFTLossOutput(loss_sft=self._sum(-log_prob_M * share_M, index_M, tensordict.shape[0]), batch_size=[])
