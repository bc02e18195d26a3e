"""What a batch of rollouts does to the policy and the critic: one object an algorithm, for the loop of ``trainer``.

Invariant: an update holds all that outlives a batch (``parts``), so that a run goes on from its save; and it books
every rollout that it leaves out.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from tensordict import TensorClass, TensorDict, TensorDictBase, lazy_stack
from transformers import PreTrainedModel

from clawgym_env.rollout import Rollout
from torchrl_ext import functional as F
from torchrl_ext.critic import TreeCritic
from torchrl_ext.data import to_training_batch
from torchrl_ext.estimators import TreeGroupAdvantage
from torchrl_ext.losses import TreeGRPOLoss, TreePPOLoss, TreeValueLoss
from torchrl_ext.metrics import log_prob_gaps
from torchrl_ext.optim import descend, make_optimizer
from torchrl_ext.recipes.stages import CriticSettings, GRPOStage, PolicyStage, PPOStage, RolloutStage, ValueStage
from torchrl_ext.workbench import Stateful

POLICY_FIGURES = (
    "clip_fraction", "kl_approx", "entropy", "kl_to_ref", "log_prob_gap_mean", "log_prob_gap_max", "tis_clipped",
)  # fmt: skip
CRITIC_FIGURES = ("loss_critic", "explained_variance", "value_mean")


@dataclass(frozen=True, slots=True)
class Figures:
    """What an update tells of a step, as a whole and by harness."""

    whole: dict[str, float]
    by_harness: Mapping[str, dict[str, float]] = field(default_factory=dict)


class Update(ABC):
    """An algorithm's share in a step.

    Attributes:
        name: Of the stage: of its batches, its seeds and its rows in ``metrics.jsonl``.
        said: What a person calls one of its steps.
    """

    name: ClassVar[str]
    said: ClassVar[str] = "step"
    stage: RolloutStage

    @property
    @abstractmethod
    def parts(self) -> Mapping[str, Stateful]:
        """What is saved beside the policy."""

    @abstractmethod
    def __call__(self, batch: TensorDictBase, rollouts: Sequence[Rollout], lr_scale: float) -> Figures:
        """Learns from one batch.

        Args:
            batch: Lazy stack of ``tree_td`` TensorDicts, whole groups.
            rollouts: Their records, in whose ledgers is booked what does not train.
            lr_scale: Factor on the policy's learning rate.
        """


class PolicyUpdate(Update):
    """What tree GRPO and tree PPO share: π_old, the reference, epochs, figures.

    Args:
        model: The policy, in eval mode: with dropout the ratio of the first update would not be 1.
        temperature: That of the rollouts.
        reference: Required by ``kl_coeff``.
    """

    stage: PolicyStage
    loss_module: TreeGRPOLoss

    def __init__(
        self, model: PreTrainedModel, stage: PolicyStage, *, temperature: float, reference: PreTrainedModel | None
    ) -> None:
        self.stage = stage
        self.optimiser = make_optimizer(
            model, kind=stage.optimiser, lr=stage.lr, weight_decay=stage.weight_decay, betas=stage.betas
        )
        self.reference = None
        if stage.kl_coeff is not None:
            if reference is None:
                raise ValueError("kl_coeff needs a reference: the policy that the stage begins with")
            self.reference = TreeGRPOLoss(reference, temperature=temperature)

    @property
    def parts(self) -> Mapping[str, Stateful]:
        """The policy's optimiser."""
        return {"optimiser": self.optimiser}

    def __call__(self, batch: TensorDictBase, rollouts: Sequence[Rollout], lr_scale: float) -> Figures:
        """See ``Update``; a batch of which nothing trains makes no update."""
        self.optimiser.set_lr(self.stage.lr * lr_scale)
        useful, counted = self.choose(batch, rollouts)
        if not useful:
            return Figures({"trained_rollouts": 0})
        data = flat_batch(useful, counted)
        with torch.no_grad():
            data["old_log_prob"] = self.loss_module.log_prob(data)
            if self.reference is not None:
                data["ref_log_prob"] = self.reference.log_prob(data)
        found = self.learn(data)
        whole = {"trained_rollouts": len(useful), **found, "computed_tokens": int(data.shape[0])}
        return Figures(whole, log_prob_gaps(data, [td["harness"] for td in useful]))

    @abstractmethod
    def choose(
        self, batch: TensorDictBase, rollouts: Sequence[Rollout]
    ) -> tuple[list[TensorDictBase], list[TensorDictBase]]:
        """The rollouts that cost a forward, and those that the denominators count."""

    @abstractmethod
    def learn(self, data: TensorDict) -> dict[str, float]:
        """The epochs over a flat batch with ``old_log_prob``."""


class GRPOUpdate(PolicyUpdate):
    """Tree GRPO; rollouts that say nothing cost no forward and are booked as dropped."""

    name = "grpo"
    stage: GRPOStage

    def __init__(
        self,
        model: PreTrainedModel,
        stage: GRPOStage,
        *,
        temperature: float = 1.0,
        reference: PreTrainedModel | None = None,
    ) -> None:
        super().__init__(model, stage, temperature=temperature, reference=reference)
        self.loss_module = TreeGRPOLoss(model, temperature=temperature, **policy_options(stage))
        self.advantage = TreeGroupAdvantage(
            scale=stage.scale, baseline=stage.baseline, negative_weight=stage.negative_weight
        )

    def choose(
        self, batch: TensorDictBase, rollouts: Sequence[Rollout]
    ) -> tuple[list[TensorDictBase], list[TensorDictBase]]:
        """Without a term that hears of every token, rollouts whose advantage is 0 are left out."""
        stage = self.stage
        every = stage.kl_coeff is not None or stage.entropy_coeff is not None or stage.normalisation == "prompt_mean"
        tds = list(self.advantage.inv(batch).unbind(0))
        scored = [td for td in tds if bool(td["next", "scored"])]
        varied = {td["query"] for td in scored if _pushes(td)}
        counted = scored if stage.zero_variance == "zero" else [td for td in scored if td["query"] in varied]
        useful = []
        for td, rollout in zip(tds, rollouts, strict=True):
            if not bool(td["next", "scored"]):
                continue
            if _pushes(td) or (every and (stage.zero_variance == "zero" or td["query"] in varied)):
                useful.append(td)
            else:
                reason = "advantage of 0" if td["query"] in varied else "group without variance"
                rollout.ledger.drop(reason, rollout.ledger.trained)
        return [td for td in useful if _trains(td)], counted

    def learn(self, data: TensorDict) -> dict[str, float]:
        """See ``PolicyUpdate``."""
        for _ in range(self.stage.epochs):
            out = self.loss_module(data)
            loss, norm = descend(self.optimiser, [total_loss(out)], self.stage.max_grad_norm)
        lr = float(self.optimiser.param_groups[0]["lr"])
        return {"loss": loss, "grad_norm": norm, "lr": lr, **_read(out, POLICY_FIGURES)}


class CriticLearner:
    """A critic with its optimiser and its own loss, handed from its pretraining to PPO.

    Args:
        policy: Whose trunk the critic copies or shares.
        stage: Its estimator's settings.
    """

    def __init__(self, policy: PreTrainedModel, settings: CriticSettings, stage: PPOStage) -> None:
        self.settings = settings
        self.critic = TreeCritic.of_policy(policy, shared=settings.shared, detach=settings.detach).eval()
        self.optimiser = make_optimizer(
            self.critic, kind=settings.optimiser, lr=settings.lr, weight_decay=settings.weight_decay,
            betas=settings.betas,
        )  # fmt: skip
        self.pretraining = TreeValueLoss(self.critic)
        self.pretraining.make_value_estimator("tree_gae", gamma=stage.gamma, lmbda=1.0)  # Monte-Carlo returns
        self.loss_module = TreeValueLoss(self.critic, clip_value=settings.clip_value)

    @property
    def parts(self) -> Mapping[str, Stateful]:
        """The critic and its optimiser."""
        return {"critic": self.critic, "critic_optimiser": self.optimiser}

    def fit(self, loss_module: TreeValueLoss, data: TensorDict, epochs: int) -> dict[str, float]:
        """Updates of the critic alone; returns the figures from before the first."""
        figures: dict[str, float] = {}
        for _ in range(epochs):
            with self.critic.alone():
                out = loss_module(data)
            figures = figures or _read(out, CRITIC_FIGURES)
            descend(self.optimiser, [out.loss_critic], self.settings.max_grad_norm)
        return figures


class ValueUpdate(Update):
    """The critic's pretraining on the returns of a policy that stays as it is (VAPO, arXiv:2504.05118)."""

    name = "value"
    said = "critic step"
    stage: ValueStage

    def __init__(self, stage: ValueStage, learner: CriticLearner) -> None:
        self.stage, self.learner = stage, learner

    @property
    def parts(self) -> Mapping[str, Stateful]:
        """Those of the critic."""
        return self.learner.parts

    def __call__(self, batch: TensorDictBase, rollouts: Sequence[Rollout], lr_scale: float) -> Figures:
        """See ``Update``; the learning rate is the critic's own."""
        scored = _scored(batch)
        useful = [td for td in scored if _trains(td)]
        if not useful:
            return Figures({"trained_rollouts": 0})
        module = self.learner.pretraining
        data = module.value_estimator(flat_batch(useful, scored))
        found = self.learner.fit(module, data, self.stage.epochs)
        return Figures({"trained_rollouts": len(useful), **found, "computed_tokens": int(data.shape[0])})


class PPOUpdate(PolicyUpdate):
    """Tree PPO: advantages from the critic, each batch's before its first update; then both learn."""

    name = "ppo"
    stage: PPOStage
    loss_module: TreePPOLoss

    def __init__(
        self,
        model: PreTrainedModel,
        stage: PPOStage,
        learner: CriticLearner,
        *,
        temperature: float = 1.0,
        reference: PreTrainedModel | None = None,
    ) -> None:
        super().__init__(model, stage, temperature=temperature, reference=reference)
        self.learner = learner
        critic = learner.settings
        self.loss_module = TreePPOLoss(
            model, learner.critic, temperature=temperature, critic_coeff=critic.coeff, clip_value=critic.clip_value,
            **policy_options(stage),
        )  # fmt: skip
        self.loss_module.make_value_estimator(
            "tree_gae", gamma=stage.gamma, lmbda=stage.lmbda, lmbda_critic=stage.lmbda_critic, alpha=stage.alpha,
            branch_backup=stage.branch_backup, branch_advantage=stage.branch_advantage, average_gae=stage.average_gae,
        )  # fmt: skip

    @property
    def parts(self) -> Mapping[str, Stateful]:
        """The policy's optimiser, the critic and its optimiser."""
        return {**super().parts, **self.learner.parts}

    def choose(
        self, batch: TensorDictBase, rollouts: Sequence[Rollout]
    ) -> tuple[list[TensorDictBase], list[TensorDictBase]]:
        """All that is scored: the critic learns from every rollout."""
        scored = _scored(batch)
        return [td for td in scored if _trains(td)], scored

    def learn(self, data: TensorDict) -> dict[str, float]:
        """See ``PolicyUpdate``; the critic's figures are from before the first update: of rollouts it has not seen."""
        stage, learner = self.stage, self.learner
        self.loss_module.value_estimator(data)
        if stage.negative_weight < 1:
            advantage = data["advantage"]
            data["advantage"] = torch.where(advantage < 0, stage.negative_weight * advantage, advantage)
        critic: dict[str, float] = {}
        for _ in range(stage.epochs):
            out = self.loss_module(data)
            critic = critic or _read(out, CRITIC_FIGURES)
            learner.optimiser.zero_grad()
            loss, norm = descend(self.optimiser, [total_loss(out)], stage.max_grad_norm)
            critic_norm = learner.optimiser.clipped_step(learner.settings.max_grad_norm)
        learner.fit(learner.loss_module, data, learner.settings.more_epochs)
        lr = float(self.optimiser.param_groups[0]["lr"])
        figures = {"loss": loss, "grad_norm": norm, "critic_grad_norm": critic_norm, "lr": lr}
        return {**figures, **critic, **_read(out, POLICY_FIGURES)}


def policy_options(stage: PolicyStage) -> dict[str, Any]:
    """The settings that both losses of a policy take."""
    given = stage.correction
    return {
        "clip_epsilon": (stage.clip_low, stage.clip_high),
        "objective": stage.objective,
        "dual_clip": stage.dual_clip,
        "kl_to_ref_coeff": stage.kl_coeff,
        "kl_estimator": stage.kl_estimator,
        "entropy_coeff": stage.entropy_coeff,
        "tis_cap": stage.tis_cap,
        "correction": None if given is None else F.Correction(given.kind, given.high, given.low),
        "node_weight": stage.node_weight,
        "normalisation": stage.normalisation,
        "constant": stage.constant,
    }


def flat_batch(useful: Sequence[TensorDictBase], counted: Sequence[TensorDictBase]) -> TensorDict:
    """The flat batch of some rollouts under the denominators of more."""
    return to_training_batch(
        lazy_stack(list(useful)),
        n_rollouts=len(counted),
        n_tokens=sum(int(td["tree", "trainable"].sum()) for td in counted),
        n_prompts=len({td["query"] for td in counted}),
    )


def total_loss(out: TensorClass) -> torch.Tensor:
    """The sum of a loss module's ``loss_*`` outputs."""
    parts = [value for name, value in out.items() if name.startswith("loss_") and value is not None]
    return torch.stack(parts).sum()


def _read(out: TensorClass, names: Sequence[str]) -> dict[str, float]:
    """Those outputs that there are, as numbers."""
    found = {name: getattr(out, name, None) for name in names}
    return {name: float(value.detach()) for name, value in found.items() if value is not None}


def _scored(batch: TensorDictBase) -> list[TensorDictBase]:
    return [td for td in batch.unbind(0) if bool(td["next", "scored"])]


def _pushes(td: TensorDictBase) -> bool:
    return float(td["advantage"].abs().max()) > 0


def _trains(td: TensorDictBase) -> bool:
    return bool(td["tree", "trainable"].any())
