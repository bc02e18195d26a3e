"""Losses over packed trees: thin LossModule shells around ``functional.py``.

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
from torchrl.objectives.llm import LLMLossOutput
from torchrl.objectives.llm.sft import SFTLossOutput
from transformers import PreTrainedModel

from torchrl_ext import functional as F
from torchrl_ext.models import tree_log_probs

Reduction = Literal["mean", "sum", "none"]


@runtime_checkable
class TreeActor(Protocol):
    """A module that scores tree tokens itself; any other actor is taken as a Hugging Face causal LM."""

    def tree_log_probs(
        self, tokens: Tensor, parent: Tensor, depth: Tensor, subtree_end: Tensor, targets: Tensor, *, temperature: float
    ) -> Tensor:
        """[M]: log-probability of ``tokens[targets]``, each given its ancestors."""
        ...


class TreeGRPOLossOutput(LLMLossOutput):  # type: ignore[misc]
    """What ``TreeGRPOLoss`` returns: TorchRL's fields and the trainer-sampler consistency.

    Attributes:
        log_prob_gap_mean: mean |log π_old − log μ|.
        log_prob_gap_max: max |log π_old − log μ|.
        log_prob_gap_k3: K3 estimate of KL(μ ‖ π_old).
        tis_clipped: Share of tokens whose importance weight was truncated; 0 without correction.
    """

    log_prob_gap_mean: torch.Tensor | None = None
    log_prob_gap_max: torch.Tensor | None = None
    log_prob_gap_k3: torch.Tensor | None = None
    tis_clipped: torch.Tensor | None = None


class _TreeLoss(LossModule):  # type: ignore[misc]
    """What tree losses share: which tokens train, how they are scored, how their losses are summed."""

    @dataclass
    class _AcceptedKeys:
        """Keys of the flat batch; ``tree`` and ``batch`` name the sub-TensorDicts of ``to_training_batch``."""

        action: NestedKey = "token"
        mask: NestedKey = ("masks", "all_assistant_mask")
        tree: NestedKey = "tree"
        batch: NestedKey = "batch"

    default_keys = _AcceptedKeys
    actor_network: nn.Module
    reduction: Reduction

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
        super().__init__()
        if temperature <= 0:
            raise ValueError(f"temperature must be positive, got {temperature}: greedy sampling has no ratio")
        if reduction not in ("mean", "sum", "none"):
            raise ValueError(f"reduction must be 'mean', 'sum' or 'none', got {reduction!r}")
        one = torch.ones(1, dtype=torch.int64)  # refuses unknown options here, not at the first batch
        F.token_share(F.node_weight(one, one, node_weight), one, 1, normalisation, constant=constant)
        self.actor_network = actor_network
        self.node_weight: F.NodeWeight = node_weight
        self.normalisation: F.Normalisation = normalisation
        self.constant = constant
        self.temperature = temperature
        self.reduction = reduction

    @property
    def functional(self) -> bool:
        """False: the actor stays a plain submodule, so that sharding and adapters work on it."""
        return False

    def _forward_value_estimator_keys(self, **kwargs: NestedKey) -> None:
        """There is no value estimator to tell; ``in_keys`` follow ``tensor_keys`` by themselves."""

    def _tree_key(self, name: str) -> tuple[str, ...]:
        return (*_as_tuple(self.tensor_keys.tree), name)

    def _structure_keys(self) -> list[NestedKey]:
        names = ("parent", "depth", "subtree_end", "rollout", "n_leaves", "rollout_leaves")
        totals = [(*_as_tuple(self.tensor_keys.batch), name) for name in ("n_rollouts", "n_tokens")]
        return [self.tensor_keys.action, self.tensor_keys.mask, *(self._tree_key(n) for n in names), *totals]

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

    def log_prob(self, tensordict: TensorDictBase) -> Tensor:
        """Scores the batch's trainable tokens: for π_old before the first update, or with a reference actor.

        Returns:
            [N], NaN where the token does not train.
        """
        index_M = self.targets(tensordict)
        log_prob_M = self._log_prob(tensordict, index_M)
        out_N = log_prob_M.new_full((tensordict.shape[0],), torch.nan)
        return out_N.index_put((index_M,), log_prob_M)

    def _log_prob(self, tensordict: TensorDictBase, index_M: Tensor) -> Tensor:
        tokens, parent, depth, end = (
            tensordict.get(key)
            for key in (self.tensor_keys.action, *map(self._tree_key, ("parent", "depth", "subtree_end")))
        )
        actor = self.actor_network
        if isinstance(actor, TreeActor):
            return actor.tree_log_probs(tokens, parent, depth, end, index_M, temperature=self.temperature)
        return tree_log_probs(
            cast(PreTrainedModel, actor), tokens, parent, depth, end, index_M, temperature=self.temperature
        )

    def _share(self, tensordict: TensorDictBase, index_M: Tensor, dtype: torch.dtype) -> Tensor:
        """[M]: factor of each token in a loss of reduction "mean"; its node weight alone otherwise."""
        rollout_M, n_leaves_M, leaves_M = (
            tensordict.get(self._tree_key(name))[index_M] for name in ("rollout", "n_leaves", "rollout_leaves")
        )
        weight_M = F.node_weight(n_leaves_M, leaves_M, self.node_weight, dtype=dtype)
        if self.reduction != "mean":
            return weight_M
        n_rollouts, n_tokens = (
            int(tensordict.get((*_as_tuple(self.tensor_keys.batch), name))[0]) for name in ("n_rollouts", "n_tokens")
        )
        return F.token_share(
            weight_M, rollout_M, n_rollouts, self.normalisation, constant=self.constant, n_tokens=n_tokens
        )

    def _sum(self, loss_M: Tensor, index_M: Tensor, size: int) -> Tensor:
        """A scalar; under reduction "none" [N], 0 where nothing trains."""
        if self.reduction == "none":
            return loss_M.new_zeros(size).index_put((index_M,), loss_M)
        return loss_M.sum()


class TreeGRPOLoss(_TreeLoss):
    """Tree GRPO with token-level importance correction (Eq 6 and 10, arXiv:2608.16798).

    ``−(1/G) Σᵢ (1/Nᵢ) Σ_t w_t · min(π_old/μ, c) · min(ρ_t Aᵢ, clip(ρ_t, 1−ε_lo, 1+ε_hi) Aᵢ)`` over the unique trainable
    token-nodes t of rollout i, with ρ = π/π_old and node weights w; plus ``β · KL_t`` under the same sum, as an output
    of its own (``loss_kl_to_ref``).

    π_old is read from ``old_log_prob``. Where the batch has none, μ takes its place (bypass): ρ = π/μ corrects for the
    sampler by itself, and the weight min(π_old/μ, c) is not applied on top of it.

    The actor stays in the mode (train, eval) it is in; keep it in eval, or ρ is not 1 on the first update.

    Args:
        actor_network: A Hugging Face causal LM, or a ``TreeActor``.
        clip_epsilon: (ε_lo, ε_hi), or one number for both.
        kl_to_ref_coeff: β; ``None`` leaves the term out, a number requires ``ref_log_prob`` in the batch.
        tis_cap: c; ``None`` leaves the correction out.
        node_weight: Weight of a token that several leaves share; see ``functional.node_weight``.
        normalisation: Denominators; see ``functional.token_share``.
        constant: C of ``normalisation="constant"``.
        temperature: Divides the logits, as it did when the tokens were sampled.
        reduction: ``mean`` applies ``normalisation``; ``sum`` adds weighted token losses; ``none`` keeps them, [N].

    Raises:
        ValueError: an option is unknown or out of range.
    """

    @dataclass
    class _AcceptedKeys(_TreeLoss._AcceptedKeys):
        """Keys of the flat batch, [N] each; ``old_log_prob`` is optional."""

        advantage: NestedKey = "advantage"
        sample_log_prob: NestedKey = "token_log_prob"
        old_log_prob: NestedKey = "old_log_prob"
        ref_log_prob: NestedKey = "ref_log_prob"

    default_keys = _AcceptedKeys
    tensor_keys: _AcceptedKeys
    actor_network: nn.Module

    def __init__(
        self,
        actor_network: nn.Module,
        *,
        clip_epsilon: float | tuple[float, float] = 0.2,
        kl_to_ref_coeff: float | None = None,
        tis_cap: float | None = 2.0,
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
        low, high = clip_epsilon if isinstance(clip_epsilon, tuple) else (clip_epsilon, clip_epsilon)
        if not (0 <= low < 1 and high >= 0):
            raise ValueError(f"clip_epsilon must lie in [0, 1) below and be >= 0 above, got {(low, high)}")
        if tis_cap is not None and tis_cap <= 0:
            raise ValueError(f"tis_cap must be positive, or None for no correction, got {tis_cap}")
        self.clip_low, self.clip_high = low, high
        self.kl_to_ref_coeff = kl_to_ref_coeff
        self.tis_cap = tis_cap

    @property
    def in_keys(self) -> list[NestedKey]:
        """Keys that every batch needs; ``old_log_prob`` is optional."""
        keys = [*self._structure_keys(), self.tensor_keys.sample_log_prob, self.tensor_keys.advantage]
        return keys if self.kl_to_ref_coeff is None else [*keys, self.tensor_keys.ref_log_prob]

    @property
    def out_keys(self) -> list[NestedKey]:
        """Names of the outputs."""
        keys: list[NestedKey] = ["loss_objective", "clip_fraction", "kl_approx", "ESS"]
        if self.kl_to_ref_coeff is not None:
            keys += ["loss_kl_to_ref", "kl_to_ref"]
        return [*keys, "log_prob_gap_mean", "log_prob_gap_max", "log_prob_gap_k3", "tis_clipped"]

    def forward(self, tensordict: TensorDictBase) -> TreeGRPOLossOutput:
        """Scores the batch once and returns the losses.

        Args:
            tensordict: Flat batch [N] of ``to_training_batch`` with an advantage; only read.

        Raises:
            KeyError: the advantage is missing, or ``ref_log_prob`` where β is set.
            ValueError: no token trains, or a trainable token has no behaviour log-prob.
        """
        index_M = self.targets(tensordict)
        mu_M = self._read(tensordict, self.tensor_keys.sample_log_prob, index_M)
        advantage_M = self._read(tensordict, self.tensor_keys.advantage, index_M)
        bypass = tensordict.get(self.tensor_keys.old_log_prob, None) is None
        old_M = mu_M if bypass else self._read(tensordict, self.tensor_keys.old_log_prob, index_M)

        log_prob_M = self._log_prob(tensordict, index_M)
        objective_M, clipped_M = F.grpo_objective(log_prob_M, old_M, advantage_M, self.clip_low, self.clip_high)
        tis_clipped = torch.zeros_like(old_M[0])
        if self.tis_cap is not None and not bypass:
            tis_M = F.token_tis(old_M, mu_M, self.tis_cap)
            objective_M = objective_M * tis_M
            tis_clipped = (tis_M >= self.tis_cap).to(old_M.dtype).mean()
        share_M = self._share(tensordict, index_M, log_prob_M.dtype)
        size = tensordict.shape[0]
        loss_kl, kl = self._kl_to_ref(tensordict, index_M, log_prob_M, share_M)

        log_ratio_M = (log_prob_M - old_M).detach()
        gap = F.log_prob_gap(log_prob_M if bypass else old_M, mu_M)
        return TreeGRPOLossOutput(
            loss_objective=self._sum(-objective_M * share_M, index_M, size),
            clip_fraction=clipped_M.to(log_prob_M.dtype).mean(),
            kl_approx=-log_ratio_M.mean(),
            ESS=F.effective_sample_size(log_ratio_M),
            loss_kl_to_ref=loss_kl,
            kl_to_ref=kl,
            log_prob_gap_mean=gap.mean_abs,
            log_prob_gap_max=gap.max_abs,
            log_prob_gap_k3=gap.k3,
            tis_clipped=tis_clipped,
            batch_size=[],
        )

    def _kl_to_ref(
        self, tensordict: TensorDictBase, index_M: Tensor, log_prob_M: Tensor, share_M: Tensor
    ) -> tuple[Tensor | None, Tensor | None]:
        if self.kl_to_ref_coeff is None:
            return None, None
        kl_M = F.kl_k3(log_prob_M, self._read(tensordict, self.tensor_keys.ref_log_prob, index_M))
        loss = self._sum(self.kl_to_ref_coeff * kl_M * share_M, index_M, tensordict.shape[0])
        return loss, kl_M.detach().mean()

    @staticmethod
    def _read(tensordict: TensorDictBase, key: NestedKey, index_M: Tensor) -> Tensor:
        value_N = tensordict.get(key, None)
        if value_N is None:
            raise KeyError(f"the batch has no {key!r}; it holds {sorted(map(str, tensordict.keys(True, True)))}")
        value_M: Tensor = value_N[index_M].detach()
        if not bool(torch.isfinite(value_M).all()):
            raise ValueError(f"{key!r} is not finite at a trainable token: was it scored for this very batch?")
        return value_M


class TreeSFTLoss(_TreeLoss):
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
        log_prob_M = self._log_prob(tensordict, index_M)
        share_M = self._share(tensordict, index_M, log_prob_M.dtype)
        return SFTLossOutput(loss_sft=self._sum(-log_prob_M * share_M, index_M, tensordict.shape[0]), batch_size=[])


def _as_tuple(key: NestedKey) -> tuple[str, ...]:
    return (key,) if isinstance(key, str) else tuple(key)
