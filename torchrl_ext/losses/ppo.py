"""Tree PPO: the actor's losses of tree GRPO, with advantages from a critic over the tree."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
from tensordict import NestedKey, TensorDictBase
from torch import Tensor, nn
from transformers import PreTrainedModel

from torchrl_ext.attention import make_plan
from torchrl_ext.critic import TreeCritic
from torchrl_ext.losses.grpo import TreeGRPOLoss, TreeGRPOLossOutput
from torchrl_ext.losses.value import Critic, check_critic
from torchrl_ext.models import TreeScores, score_hidden, tree_hidden_states


class TreePPOLossOutput(TreeGRPOLossOutput):
    """What ``TreePPOLoss`` returns.

    Attributes:
        loss_critic: The critic's loss, times its coefficient.
        explained_variance: 1 − Var(G − V)/Var(G) over unique trainable tokens.
        value_clip_fraction: Share of values beyond the clip; 0 without one.
        value_mean: Mean of V over unique trainable tokens.
    """

    loss_critic: torch.Tensor | None = None
    explained_variance: torch.Tensor | None = None
    value_clip_fraction: torch.Tensor | None = None
    value_mean: torch.Tensor | None = None


class TreePPOLoss(Critic, TreeGRPOLoss):
    """PPO on trees with a critic (Eq 8, arXiv:2608.16798, and its generalisation by tree GAE).

    The policy's terms are those of ``TreeGRPOLoss``. Advantages and value targets are read from the batch, where
    ``loss.value_estimator(batch)`` puts them *before* a batch's first update; where they are missing, they are
    estimated from the critic's present values on every call. The critic's term is ``critic_coeff · (V_t − G_t)²`` over
    unique trainable tokens.

    A critic on the policy's own trunk (``TreeCritic(policy, shared=True)``) costs no forward of its own.

    Args:
        actor_network: A Hugging Face causal LM, or a ``TreeActor``.
        critic_network: A ``TreeCritic``, or another module with ``tree_values``.
        critic_coeff: Factor on the critic's loss.
        clip_value: ε of the clipped critic; ``None``: plain squared error. Needs ``state_value`` in the batch.
        options: Those of ``TreeGRPOLoss``.

    Raises:
        TypeError, ValueError: a network or an option that does not fit.
    """

    @dataclass
    class _AcceptedKeys(TreeGRPOLoss._AcceptedKeys):
        """Keys of the flat batch, [N] each; ``reward``, ``done`` and ``terminated`` lie under ``"next"``."""

        value: NestedKey = "state_value"
        value_target: NestedKey = "value_target"
        reward: NestedKey = "reward"
        done: NestedKey = "done"
        terminated: NestedKey = "terminated"

    default_keys = _AcceptedKeys
    tensor_keys: _AcceptedKeys
    actor_network: nn.Module
    critic_network: nn.Module

    def __init__(
        self,
        actor_network: nn.Module,
        critic_network: nn.Module,
        *,
        critic_coeff: float = 1.0,
        clip_value: float | None = None,
        **options: Any,
    ) -> None:
        TreeGRPOLoss.__init__(self, actor_network, **options)
        check_critic(critic_network, critic_coeff, clip_value)
        self.critic_network = critic_network
        self.critic_coeff = critic_coeff
        self.clip_value = clip_value

    @property
    def in_keys(self) -> list[NestedKey]:
        """Keys that every batch needs; with ``advantage`` and ``value_target`` the rewards are not read."""
        keys = [key for key in super().in_keys if key != self.tensor_keys.advantage]
        return [*keys, ("next", self.tensor_keys.reward)]

    @property
    def out_keys(self) -> list[NestedKey]:
        """Names of the outputs."""
        critic: list[NestedKey] = ["loss_critic", "explained_variance", "value_clip_fraction", "value_mean"]
        return [*super().out_keys, *critic]

    def forward(self, tensordict: TensorDictBase) -> TreePPOLossOutput:
        """Scores and values the batch once and returns the losses.

        Args:
            tensordict: Flat batch [N] of ``to_training_batch``; only read.

        Raises:
            KeyError: a key is missing.
            ValueError: no token trains, or a trainable token has no behaviour log-prob.
        """
        index_M = self.targets(tensordict)
        scores, value_M = self._score_and_value(tensordict, index_M)
        tensordict = self._estimated(tensordict, index_M, value_M)
        terms = self._policy_terms(tensordict, index_M, scores)
        return TreePPOLossOutput(**terms, **self._critic_terms(tensordict, index_M, value_M), batch_size=[])

    def _score_and_value(self, tensordict: TensorDictBase, index_M: Tensor) -> tuple[TreeScores, Tensor]:
        critic, with_entropy = self.critic_network, self.entropy_coeff is not None
        if not (isinstance(critic, TreeCritic) and critic.trunk is self.actor_network):
            return self._score(tensordict, index_M, with_entropy=with_entropy), self._values(tensordict, index_M)
        actor = cast(PreTrainedModel, self.actor_network)
        tokens, parent, depth, end = self._structure(tensordict)
        plan = make_plan(parent.cpu().numpy(), end.cpu().numpy(), device=tokens.device)
        hidden_M = tree_hidden_states(actor, tokens, depth, plan).index_select(0, parent[index_M])
        scores = score_hidden(actor, hidden_M, tokens[index_M], self.temperature, with_entropy=with_entropy)
        return scores, critic.values_of(hidden_M)
