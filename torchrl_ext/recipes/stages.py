"""Typed settings of the stages that recipes are made of."""

from __future__ import annotations

from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator


class Settings(BaseModel):
    """Unknown keys are refused, values are checked, nothing changes after the start."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)


class DemosStage(Settings):
    """Rollouts of an imperfect demonstrator, captured through the harness."""

    rollouts: int = Field(350, ge=1)
    skill: float = Field(0.4, ge=0, le=1)
    """Share of demonstrations that solve their task; the rest is what reinforcement learning has to unlearn."""
    batch: int = Field(35, ge=1)
    """Rollouts between two saves."""


class SFTStage(Settings):
    """Supervised fine-tuning on captured rollouts."""

    steps: int = Field(160, ge=0)
    batch: int = Field(32, ge=1)
    optimiser: Literal["adamw", "muon"] = "muon"
    lr: float = Field(3e-3, gt=0)
    warmup: int = Field(20, ge=0)
    weight_decay: float = Field(0.01, ge=0)
    max_grad_norm: float = Field(1.0, gt=0)
    min_score: float | None = None
    """Rejection sampling: rollouts below this score are left out; ``None`` keeps all."""
    curriculum: tuple[tuple[float, int], ...] = ((0.45, 16), (0.55, 128), (0.65, 512))
    """(share of the steps, tokens): until then only that many last tokens of the common prompt are shown. A policy made
    from scratch learns to copy from a short context first; empty for one that can read already."""
    save_every: int = Field(20, ge=1)


class MixDemosStage(DemosStage):
    """As above, under each harness of a mix."""

    rollouts: int = Field(420, ge=0)
    """Over all harnesses, by their weights; 0 leaves the stage out, for a policy that can act already."""
    held_out: bool = True
    """Whether held-out harnesses are demonstrated, too. A policy made from scratch is lost under a harness that it has
    never seen; reinforcement learning leaves them out either way."""


class MixSFTStage(SFTStage):
    """As above; each harness's own prompt is shortened, and the longest come last."""

    curriculum: tuple[tuple[float, int], ...] = ((0.45, 16), (0.55, 128), (0.65, 512), (0.8, 1536))


class WholePromptSFTStage(SFTStage):
    """Fine-tuning of a policy that can read already: prompts are whole from the start."""

    curriculum: tuple[tuple[float, int], ...] = ()


class CorrectionSettings(Settings):
    """A weight for tokens that the engine drew otherwise than the trainer computes; see ``docs/method.md``."""

    kind: Literal["token_tis", "sequence_tis", "token_mis", "sequence_mis", "geometric", "k3", "icepop"]
    high: float = Field(2.0, gt=0)
    low: float = Field(0.0, ge=0)

    @model_validator(mode="after")
    def _bounds_fit(self) -> Self:
        if not self.low < self.high:
            raise ValueError(f"low must lie below high, got {self.low} and {self.high}")
        if self.low and self.kind in ("token_tis", "sequence_tis", "k3"):
            raise ValueError(f"{self.kind} has no lower bound: leave low out")
        return self


class RolloutStage(Settings):
    """A stage that runs the policy: how many batches of which size."""

    steps: int = Field(13, ge=0)
    tasks: int = Field(14, ge=1)
    """Groups a step."""
    group: int = Field(4, ge=1)
    """Rollouts a group."""


class PolicyStage(RolloutStage):
    """Updates of the policy on its own rollouts: what the algorithms share."""

    lr: float = Field(1e-4, gt=0)
    optimiser: Literal["adamw", "muon"] = "adamw"
    betas: tuple[float, float] = (0.9, 0.95)
    warmup: int = Field(2, ge=0)
    weight_decay: float = Field(0.0, ge=0)
    max_grad_norm: float = Field(1.0, gt=0)
    epochs: int = Field(2, ge=1)
    """Updates on each batch."""
    objective: Literal["ppo", "gspo", "cispo"] = "ppo"
    clip_low: float = Field(0.2, ge=0, lt=1)
    clip_high: float = Field(0.2, ge=0)
    dual_clip: float | None = Field(None, gt=1)
    """c of the dual clip, for tokens with a negative advantage; ``None`` leaves it out."""
    tis_cap: float | None = Field(2.0, gt=0)
    correction: CorrectionSettings | None = None
    """Another correction, in the place of ``tis_cap``: ``grpo.correction.kind=icepop grpo.correction.low=0.5``."""
    kl_coeff: float | None = Field(None, gt=0)
    """Penalty on the distance to the policy that the stage began with; ``None`` leaves it out, and its forward."""
    kl_estimator: Literal["k1", "k2", "k3", "k3_unbiased"] = "k3"
    entropy_coeff: float | None = Field(None, gt=0)
    """Bonus on the entropy; ``None`` leaves it out."""
    negative_weight: float = Field(1.0, ge=0, le=1)
    """Factor on advantages below 0; 1 is the papers'."""
    node_weight: Literal["once", "leaf_fraction", "per_leaf", "sqrt"] = "once"
    normalisation: Literal["rollout_mean", "token_mean", "prompt_mean", "constant"] = "rollout_mean"
    constant: float | None = Field(None, gt=0)
    validate_every: int = Field(7, ge=1)
    """Steps between two looks at the validation split, by which the checkpoint is chosen."""

    @model_validator(mode="after")
    def _options_go_together(self) -> Self:
        if (self.normalisation == "constant") != (self.constant is not None):
            raise ValueError("constant=NUMBER goes with normalisation=constant, and with it alone")
        if self.dual_clip is not None and self.objective != "ppo":
            raise ValueError(f"dual_clip goes with objective=ppo, not with {self.objective}")
        return self


class GRPOStage(PolicyStage):
    """Tree GRPO (arXiv:2608.16798, Eq 6 and 7) with token-level truncated importance sampling (Eq 10)."""

    group: int = Field(4, ge=2)
    """Rollouts a group."""
    scale: Literal["std", "none"] = "std"
    baseline: Literal["mean", "leave_one_out"] = "mean"
    zero_variance: Literal["zero", "filter"] = "zero"
    """Groups whose rewards are all equal: ``zero`` counts them in the denominators, ``filter`` does not (DAPO)."""


class FromScratchGRPOStage(GRPOStage):
    """As above, for a policy made from scratch: what is taken from a wrong answer goes to nonsense as easily as to a
    better answer, so wrong answers push less."""

    negative_weight: float = Field(0.3, ge=0, le=1)


class CriticSettings(Settings):
    """The critic: a value head, and the trunk under it."""

    shared: bool = False
    """``true``: the head sits on the policy's own trunk, which runs once for both. ``false``: on a copy of it."""
    detach: bool = False
    """Whether values send no gradient into the trunk."""
    lr: float = Field(1e-3, gt=0)
    """Of the critic's own parameters; a shared trunk moves with the policy's."""
    optimiser: Literal["adamw", "muon"] = "muon"
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = Field(0.0, ge=0)
    max_grad_norm: float = Field(1.0, gt=0)
    coeff: float = Field(1.0, gt=0)
    """Factor on the critic's loss beside the policy's: what a shared trunk hears of it."""
    clip_value: float | None = Field(None, gt=0)
    """Values that move further than this on one batch are not pushed on; ``None``: plain squared error."""
    more_epochs: int = Field(2, ge=0)
    """Updates of the critic alone on each batch, after those of both."""


class ValueStage(RolloutStage):
    """The critic's pretraining: rollouts of the policy that imitation made, which does not move."""

    steps: int = Field(2, ge=0)
    epochs: int = Field(12, ge=1)
    """Updates of the critic on each batch, towards Monte-Carlo returns."""


class PPOStage(PolicyStage):
    """Tree PPO (arXiv:2608.16798, Eq 8) with tree GAE; γ = λ = 1 is the paper's."""

    gamma: float = Field(1.0, ge=0, le=1)
    lmbda: float = Field(1.0, ge=0, le=1)
    """λ of the policy's advantage."""
    lmbda_critic: float | None = Field(1.0, ge=0, le=1)
    """λ of the critic's targets; ``None``: the policy's."""
    alpha: float | None = Field(None, gt=0)
    """λ = 1 − 1/(α l) by the length l of the trajectories, in the place of ``lmbda`` (VAPO)."""
    branch_backup: Literal["leaf_mean", "child_uniform"] = "leaf_mean"
    branch_advantage: Literal["mean", "split"] = "mean"
    """A token that branches judge differently: their mean, or A⁺ and A⁻, which is exact under the clip."""
    average_gae: bool = True
    """Whitens the advantages of a batch, each unique token once."""
    negative_weight: float = Field(0.3, ge=0, le=1)
    """As in the quickstart: 1 is the paper's, below 1 is for a policy made from scratch."""


class AnyDemosStage(DemosStage):
    """As ``DemosStage``, or none."""

    rollouts: int = Field(350, ge=0)
    """0 leaves the stage out, for a policy that can act already."""


class EvalStage(Settings):
    """How the policy is measured."""

    test: int = Field(84, ge=0)
    """Held-out tasks at temperature 1, before and after."""
    greedy: int = Field(42, ge=0)
    """Held-out tasks at temperature 0, beside it."""
    validation: int = Field(28, ge=0)


class MixEvalStage(EvalStage):
    """As above; ``test`` and ``greedy`` are tasks under each harness, ``validation`` is over those trained under."""

    test: int = Field(42, ge=0)
    greedy: int = Field(0, ge=0)


class CurriculumSettings(Settings):
    """How the weights of harnesses change while a run goes on; see ``docs/mix.md``."""

    kind: Literal["off", "variance"] = "off"
    """``variance``: towards harnesses whose groups differ more in reward."""
    window: int = Field(4, ge=1)
    """Steps looked back at."""
    floor: float = Field(0.25, gt=0, le=1)
    """Least factor on a weight."""


class HarnessUse(Settings):
    """One harness of a mix."""

    program: str | None = None
    """Which harness the label stands for; ``None``: the one of that name."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Its settings."""
    weight: float = Field(1.0, gt=0)
    """Share of the rollouts, beside the others' weights."""


class FilterSettings(Settings):
    """Which calls of a rollout train; see ``docs/method.md``. Side calls never do."""

    dead_leaves: bool = True
    """Of each agent's each segment only the leaf with the longest continuation trains."""
    max_leaves: int | None = Field(None, ge=1)
    """A rollout that would train more leaves than this trains none."""
    subagent_credit: Literal["exclude", "broadcast", "split"] = "exclude"
    compaction_credit: Literal["exclude", "broadcast", "split"] = "exclude"
