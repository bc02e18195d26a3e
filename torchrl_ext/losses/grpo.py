"""Tree GRPO and its variants."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from tensordict import NestedKey, TensorDictBase
from torch import Tensor, nn
from torchrl.objectives.llm import LLMLossOutput

from torchrl_ext import functional as F
from torchrl_ext.losses.base import PolicyLoss, Reduction, TreeActor
from torchrl_ext.models import TreeScores


class TreeGRPOLossOutput(LLMLossOutput):  # type: ignore[misc]
    """What ``TreeGRPOLoss`` returns: TorchRL's fields and the trainer-sampler consistency.

    Attributes:
        log_prob_gap_mean: mean |log π_old − log μ|.
        log_prob_gap_max: max |log π_old − log μ|.
        log_prob_gap_k3: K3 estimate of KL(μ ‖ π_old).
        tis_clipped: Share of tokens whose importance weight was truncated or rejected; 0 without correction.
    """

    log_prob_gap_mean: torch.Tensor | None = None
    log_prob_gap_max: torch.Tensor | None = None
    log_prob_gap_k3: torch.Tensor | None = None
    tis_clipped: torch.Tensor | None = None


class TreeGRPOLoss(PolicyLoss):
    """Tree GRPO with token-level importance correction (Eq 6 and 10, arXiv:2608.16798).

    ``−(1/G) Σᵢ (1/Nᵢ) Σ_t w_t · min(π_old/μ, c) · min(ρ_t Aᵢ, clip(ρ_t, 1−ε_lo, 1+ε_hi) Aᵢ)`` over the unique trainable
    token-nodes t of rollout i, with ρ = π/π_old and node weights w; plus ``β · KL_t`` under the same sum, as an output
    of its own (``loss_kl_to_ref``).

    π_old is read from ``old_log_prob``. Where the batch has none, μ takes its place (bypass): ρ = π/μ corrects for the
    sampler by itself, and no weight is applied on top of it.

    The advantage is [N], or [N, 2] where branches that share a token judge it differently: the means over the branches
    of the positive and of the negative parts (``functional.BranchAdvantage``), which make the clipped sum exact.

    The actor stays in the mode (train, eval) it is in; keep it in eval, or ρ is not 1 on the first update.

    Args:
        actor_network: A Hugging Face causal LM, or a ``TreeActor``.
        clip_epsilon: (ε_lo, ε_hi), or one number for both.
        objective: ``ppo``, ``gspo`` or ``cispo``; see ``functional.policy_objective``.
        dual_clip: c > 1 of the dual clip; ``None`` leaves it out.
        kl_to_ref_coeff: β; ``None`` leaves the term out, a number requires ``ref_log_prob`` in the batch.
        kl_estimator: KL_t; see ``functional.kl_estimate``.
        entropy_coeff: Bonus on the entropy; ``None`` leaves it out.
        tis_cap: c of the token-level truncated weight; ``None`` leaves the correction out.
        correction: Another correction, in the place of ``tis_cap``.
        node_weight: Weight of a token that several leaves share; see ``functional.node_weight``.
        normalisation: Denominators; see ``functional.token_share``.
        constant: C of ``normalisation="constant"``.
        temperature: Divides the logits, as it did when the tokens were sampled.
        reduction: ``mean`` applies ``normalisation``; ``sum`` adds weighted token losses; ``none`` keeps them, [N].

    Raises:
        ValueError: an option is unknown or out of range.
    """

    @dataclass
    class _AcceptedKeys(PolicyLoss._AcceptedKeys):
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
        objective: F.Objective = "ppo",
        dual_clip: float | None = None,
        kl_to_ref_coeff: float | None = None,
        kl_estimator: F.KLEstimator = "k3",
        entropy_coeff: float | None = None,
        tis_cap: float | None = 2.0,
        correction: F.Correction | None = None,
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
        if not (0 <= low <= 1 and high >= 0):
            raise ValueError(f"clip_epsilon must lie in [0, 1] below and be >= 0 above, got {(low, high)}")
        if tis_cap is not None and tis_cap <= 0:
            raise ValueError(f"tis_cap must be positive, or None for no correction, got {tis_cap}")
        if entropy_coeff is not None and isinstance(actor_network, TreeActor):
            raise ValueError("a TreeActor reports no entropy: entropy_coeff needs a Hugging Face causal LM")
        none = torch.zeros(0)  # refuses unknown options here, not at the first batch
        F.policy_objective(none, none, none, objective, dual_clip=dual_clip, rollout_M=none.long())
        F.kl_estimate(none, none, kl_estimator, sample_log_prob_M=none)
        self.clip_low, self.clip_high = low, high
        self.objective: F.Objective = objective
        self.dual_clip = dual_clip
        self.kl_to_ref_coeff = kl_to_ref_coeff
        self.kl_estimator: F.KLEstimator = kl_estimator
        self.entropy_coeff = entropy_coeff
        self.correction = F.Correction(high=tis_cap) if correction is None and tis_cap is not None else correction

    @property
    def in_keys(self) -> list[NestedKey]:
        """Keys that every batch needs; ``old_log_prob`` is optional."""
        keys = [*self._structure_keys(), self.tensor_keys.sample_log_prob, self.tensor_keys.advantage]
        return keys if self.kl_to_ref_coeff is None else [*keys, self.tensor_keys.ref_log_prob]

    @property
    def out_keys(self) -> list[NestedKey]:
        """Names of the outputs."""
        keys: list[NestedKey] = ["loss_objective", "clip_fraction", "kl_approx", "ESS"]
        if self.entropy_coeff is not None:
            keys += ["loss_entropy", "entropy"]
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
        self._read(tensordict, self.tensor_keys.advantage, index_M)  # before the forward, which is dear
        scores = self._score(tensordict, index_M, with_entropy=self.entropy_coeff is not None)
        return TreeGRPOLossOutput(**self._policy_terms(tensordict, index_M, scores), batch_size=[])

    def _policy_terms(self, tensordict: TensorDictBase, index_M: Tensor, scores: TreeScores) -> dict[str, Tensor]:
        """The outputs that concern the actor."""
        log_prob_M = scores.log_probs
        mu_M = self._read(tensordict, self.tensor_keys.sample_log_prob, index_M)
        bypass = tensordict.get(self.tensor_keys.old_log_prob, None) is None
        old_M = mu_M if bypass else self._read(tensordict, self.tensor_keys.old_log_prob, index_M)
        rollout_M = self._of_tokens(tensordict, "rollout", index_M)
        advantage = self._read(tensordict, self.tensor_keys.advantage, index_M)
        objective_M, clipped_M = F.policy_objective(
            log_prob_M,
            old_M,
            advantage if advantage.ndim == 1 else F.BranchAdvantage(*advantage.unbind(-1)),
            self.objective,
            clip_low=self.clip_low,
            clip_high=self.clip_high,
            dual_clip=self.dual_clip,
            rollout_M=rollout_M,
        )
        tis_clipped = torch.zeros_like(old_M[0])
        if self.correction is not None and not bypass:
            weight_M, altered_M = F.correction_weight(old_M, mu_M, rollout_M, self.correction)
            objective_M = objective_M * weight_M
            tis_clipped = altered_M.to(old_M.dtype).mean()
        share_M = self._share(tensordict, index_M, log_prob_M.dtype, self.node_weight)

        log_ratio_M = (log_prob_M - old_M).detach()
        gap = F.log_prob_gap(log_prob_M if bypass else old_M, mu_M)
        return {
            "loss_objective": self._sum(-objective_M * share_M, index_M, tensordict.shape[0]),
            "clip_fraction": clipped_M.to(log_prob_M.dtype).mean(),
            "kl_approx": -log_ratio_M.mean(),
            "ESS": F.effective_sample_size(log_ratio_M),
            **self._entropy_terms(tensordict, index_M, scores.entropy, share_M),
            **self._kl_terms(tensordict, index_M, log_prob_M, share_M, mu_M),
            "log_prob_gap_mean": gap.mean_abs,
            "log_prob_gap_max": gap.max_abs,
            "log_prob_gap_k3": gap.k3,
            "tis_clipped": tis_clipped,
        }

    def _entropy_terms(
        self, tensordict: TensorDictBase, index_M: Tensor, entropy_M: Tensor | None, share_M: Tensor
    ) -> dict[str, Tensor]:
        if self.entropy_coeff is None or entropy_M is None:
            return {}
        loss = self._sum(-self.entropy_coeff * entropy_M * share_M, index_M, tensordict.shape[0])
        return {"loss_entropy": loss, "entropy": entropy_M.detach().mean()}

    def _kl_terms(
        self, tensordict: TensorDictBase, index_M: Tensor, log_prob_M: Tensor, share_M: Tensor, mu_M: Tensor
    ) -> dict[str, Tensor]:
        if self.kl_to_ref_coeff is None:
            return {}
        ref_M = self._read(tensordict, self.tensor_keys.ref_log_prob, index_M)
        kl_M = F.kl_estimate(log_prob_M, ref_M, self.kl_estimator, sample_log_prob_M=mu_M)
        loss = self._sum(self.kl_to_ref_coeff * kl_M * share_M, index_M, tensordict.shape[0])
        return {"loss_kl_to_ref": loss, "kl_to_ref": kl_M.detach().mean()}
