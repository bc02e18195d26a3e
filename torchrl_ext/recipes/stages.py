"""Typed settings of the stages that recipes are made of."""

from __future__ import annotations

from typing import Any, Literal

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


class GRPOStage(Settings):
    """Tree GRPO (arXiv:2608.16798, Eq 6 and 7) with token-level truncated importance sampling (Eq 10)."""

    steps: int = Field(13, ge=0)
    tasks: int = Field(14, ge=1)
    """Groups a step."""
    group: int = Field(4, ge=2)
    """Rollouts a group."""
    lr: float = Field(1e-4, gt=0)
    optimiser: Literal["adamw", "muon"] = "adamw"
    betas: tuple[float, float] = (0.9, 0.95)
    warmup: int = Field(2, ge=0)
    weight_decay: float = Field(0.0, ge=0)
    max_grad_norm: float = Field(1.0, gt=0)
    epochs: int = Field(2, ge=1)
    """Updates on each batch."""
    clip_low: float = Field(0.2, ge=0, lt=1)
    clip_high: float = Field(0.2, ge=0)
    tis_cap: float | None = Field(2.0, gt=0)
    scale: Literal["std", "none"] = "std"
    baseline: Literal["mean", "leave_one_out"] = "mean"
    negative_weight: float = Field(1.0, ge=0, le=1)
    """Factor on advantages below 0; 1 is the paper's."""
    node_weight: Literal["once", "leaf_fraction", "per_leaf", "sqrt"] = "once"
    normalisation: Literal["rollout_mean", "token_mean", "constant"] = "rollout_mean"
    constant: float | None = Field(None, gt=0)
    validate_every: int = Field(7, ge=1)
    """Steps between two looks at the validation split, by which the checkpoint is chosen."""

    @model_validator(mode="after")
    def _constant_goes_with_its_normalisation(self) -> GRPOStage:
        if (self.normalisation == "constant") != (self.constant is not None):
            raise ValueError("constant=NUMBER goes with normalisation=constant, and with it alone")
        return self


class FromScratchGRPOStage(GRPOStage):
    """As above, for a policy made from scratch: what is taken from a wrong answer goes to nonsense as easily as to a
    better answer, so wrong answers push less."""

    negative_weight: float = Field(0.3, ge=0, le=1)


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
