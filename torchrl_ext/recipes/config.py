"""Typed settings of the recipes; every key can be set on the command line as ``key=value`` or ``stage.key=value``.

A value is text, ``none``, or JSON such as ``[0.9, 0.95]``; a list of names may be written ``pi,codex``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from types import UnionType
from typing import Annotated, Any, Literal, Self, TypeVar, Union, get_args, get_origin

from pydantic import BaseModel, BeforeValidator, Field, StringConstraints, ValidationError, model_validator

from clawgym_env.errors import ConfigError
from clawgym_env.overrides import parse_overrides
from clawgym_env.world import Program, limits_of
from torchrl_ext.mixture import Curriculum, Mixture
from torchrl_ext.recipes.stages import (
    AnyDemosStage,
    CriticSettings,
    CurriculumSettings,
    DemosStage,
    EvalStage,
    FilterSettings,
    FromScratchGRPOStage,
    GRPOStage,
    HarnessUse,
    MixDemosStage,
    MixEvalStage,
    MixSFTStage,
    PPOStage,
    Settings,
    SFTStage,
    ValueStage,
    WholePromptSFTStage,
)

C = TypeVar("C", bound=BaseModel)


class RunSettings(Settings, ABC):
    """What every recipe shares."""

    seed: int = Field(0, ge=0)
    suite: str = "builtin"
    level: int = Field(1, ge=1, le=3)
    sandbox: str = "bubblewrap"
    concurrency: int = Field(4, ge=1)
    """Rollouts in flight."""
    threads: int = Field(2, ge=1)
    """CPU threads of the trainer; the engine takes one while rollouts run."""
    temperature: float = Field(1.0, gt=0)
    max_tokens: int = Field(96, ge=1)
    """Longest answer of one call."""
    max_calls: int = Field(4, ge=1)
    max_context: int = Field(4096, ge=16)
    timeout_s: float = Field(60.0, gt=0)
    model: str | None = None
    """Run folder or Hugging Face folder to start from; ``None`` makes a small policy from scratch."""
    filters: FilterSettings = FilterSettings()
    limits: dict[str, Any] = Field(default_factory=dict)
    """Bounds of each sandbox: ``limits.memory_mb=4096 limits.cpu_s=none``."""

    @model_validator(mode="after")
    def _limits_exist(self) -> Self:
        limits_of(self.limits, self.timeout_s)
        return self

    @property
    @abstractmethod
    def programs(self) -> Mapping[str, Program]:
        """Label -> harness, of all that the run uses."""

    @property
    @abstractmethod
    def mixture(self) -> Mixture:
        """Which of them the policy is trained under, and how much."""


class OneHarnessSettings(RunSettings):
    """A run under one harness."""

    harness: str = "pi"
    harness_options: dict[str, Any] = Field(default_factory=dict)
    """Settings of the harness: ``harness_options.wire=gemini``."""

    @property
    def programs(self) -> Mapping[str, Program]:
        """The one harness."""
        return {self.harness: Program(self.harness, self.harness_options)}

    @property
    def mixture(self) -> Mixture:
        """All of it."""
        return Mixture({self.harness: 1.0}, {})


class QuickstartConfig(OneHarnessSettings):
    """Demonstrate, imitate, then improve: from nothing to a policy that solves held-out tasks."""

    demos: DemosStage = DemosStage()
    sft: SFTStage = SFTStage()
    grpo: FromScratchGRPOStage = FromScratchGRPOStage()
    eval: EvalStage = EvalStage()


class SFTConfig(OneHarnessSettings):
    """Fine-tune on rollouts that a run captured: distillation, or rejection sampling with ``sft.min_score``."""

    rollouts: str = Field(min_length=1)
    """Run folder whose rollouts are learnt from."""
    sft: WholePromptSFTStage = WholePromptSFTStage()
    eval: EvalStage = EvalStage()


class GRPOConfig(OneHarnessSettings):
    """Improve an existing policy with tree GRPO."""

    grpo: GRPOStage = GRPOStage()
    eval: EvalStage = EvalStage()


class PPOConfig(OneHarnessSettings):
    """The quickstart with a critic: demonstrate, imitate, fit the critic, then improve with tree PPO.

    ``model=RUN demos.rollouts=0 sft.steps=0`` improves a policy that there is.
    """

    demos: AnyDemosStage = AnyDemosStage()
    sft: SFTStage = SFTStage()
    critic: CriticSettings = CriticSettings()
    value: ValueStage = ValueStage()
    ppo: PPOStage = PPOStage()
    eval: EvalStage = EvalStage()

    @model_validator(mode="after")
    def _imitation_has_an_example(self) -> Self:
        if self.demos.rollouts == 0 and self.sft.steps > 0:
            raise ValueError("demos.rollouts=0 leaves nothing to imitate: set sft.steps=0 as well")
        return self


def _names(value: Any) -> Any:
    """``pi,codex`` -> ``("pi", "codex")``; ``none`` is an empty list."""
    if value is None:
        return ()
    return tuple(value.split(",")) if isinstance(value, str) else value


Labels = Annotated[tuple[Annotated[str, StringConstraints(pattern=r"^[\w-]+$")], ...], BeforeValidator(_names)]


class MixConfig(RunSettings):
    """One policy under several harnesses at once: demonstrate, imitate, improve, and measure under others as well."""

    harnesses: Labels = ("pi", "claude-code", "codex", "mini-swe-agent")
    """Those that the policy is trained under."""
    held_out: Labels = ("openclaw",)
    """Those that it is measured under, and that reinforcement learning never sees."""
    per_harness: dict[str, HarnessUse] = Field(default_factory=dict)
    """Options and weights: ``per_harness.pi.options.wire=gemini per_harness.codex.weight=2``."""
    grouping: Literal["task_harness", "task"] = "task_harness"
    """What shares a baseline: the rollouts of a task under one harness, or those under all of them."""
    curriculum: CurriculumSettings = CurriculumSettings()
    max_context: int = Field(8192, ge=16)
    demos: MixDemosStage = MixDemosStage()
    sft: MixSFTStage = MixSFTStage()
    grpo: FromScratchGRPOStage = FromScratchGRPOStage()
    eval: MixEvalStage = MixEvalStage()

    @model_validator(mode="after")
    def _labels_fit(self) -> MixConfig:
        labels = (*self.harnesses, *self.held_out)
        if not self.harnesses:
            raise ValueError("harnesses must name at least one: harnesses=pi,codex")
        twice = sorted({label for label in labels if labels.count(label) > 1})
        if twice:
            raise ValueError(f"{', '.join(twice)} is named twice in harnesses and held_out")
        unused = sorted(set(self.per_harness) - set(labels))
        if unused:
            raise ValueError(f"per_harness names {', '.join(unused)}; harnesses and held_out name {', '.join(labels)}")
        if self.curriculum.kind == "variance" and self.grouping == "task":
            raise ValueError("curriculum.kind=variance compares groups of one harness: it needs grouping=task_harness")
        return self

    @property
    def programs(self) -> Mapping[str, Program]:
        """Those trained under, then those held out."""
        uses = {label: self._use(label) for label in (*self.harnesses, *self.held_out)}
        return {label: Program(use.program or label, use.options) for label, use in uses.items()}

    @property
    def mixture(self) -> Mixture:
        """Weights, grouping and curriculum."""
        weights, held_out = (
            {label: self._use(label).weight for label in labels} for labels in (self.harnesses, self.held_out)
        )
        c = self.curriculum
        curriculum = Curriculum(c.window, c.floor) if c.kind == "variance" else None
        return Mixture(weights, held_out, self.grouping, curriculum)

    def _use(self, label: str) -> HarnessUse:
        return self.per_harness.get(label, HarnessUse())


Recipe = QuickstartConfig | SFTConfig | GRPOConfig | PPOConfig | MixConfig
RECIPES: dict[str, type[Recipe]] = {
    "quickstart": QuickstartConfig,
    "sft": SFTConfig,
    "grpo": GRPOConfig,
    "ppo": PPOConfig,
    "mix": MixConfig,
}

#: What the bare key ``steps`` means: the steps of a recipe's main stage.
STEPS = {
    "quickstart": "grpo.steps", "sft": "sft.steps", "grpo": "grpo.steps", "ppo": "ppo.steps", "mix": "grpo.steps",
}  # fmt: skip


def build(recipe: str, overrides: Sequence[str]) -> Recipe:
    """The settings of a recipe with ``key=value`` overrides; ``steps=N`` is short for the main stage's steps.

    Raises:
        ConfigError: an unknown recipe or key, or a value that does not fit; the message says which and what would.
    """
    if recipe not in RECIPES:
        raise ConfigError(f"unknown recipe {recipe!r}; there are: {', '.join(RECIPES)}")
    whole = [f"{STEPS[recipe]}{item[5:]}" if item.startswith("steps=") else item for item in overrides]
    return validate(RECIPES[recipe], parse_overrides(whole))


def stored(config: Mapping[str, Any], where: object) -> Recipe:
    """The settings that a run was started with.

    Raises:
        ConfigError: it was not made by a recipe of this version.
    """
    data = dict(config)
    recipe = str(data.pop("recipe", ""))
    if recipe not in RECIPES:
        raise ConfigError(f"{where} was not made by a recipe of this version: recipe {recipe!r}")
    return validate(RECIPES[recipe], data)


def validate(kind: type[C], data: dict[str, Any]) -> C:
    """Checks settings.

    Raises:
        ConfigError: naming each key at fault.
    """
    try:
        return kind.model_validate(data)
    except ValidationError as error:
        faults = [f"{'.'.join(map(str, e['loc']))}: {_say(kind, e)}".removeprefix(": ") for e in error.errors()]
        raise ConfigError("bad settings: " + "; ".join(faults)) from None


def _say(kind: type[BaseModel], error: Any) -> str:
    if error["type"] != "extra_forbidden":
        return str(error["msg"]).removeprefix("Value error, ")
    at: Any = kind
    for name in error["loc"][:-1]:
        at = at.model_fields[name].annotation if hasattr(at, "model_fields") else get_args(at)[1]
        if get_origin(at) in (Union, UnionType):  # an optional group of settings
            at = get_args(at)[0]
    return f"unknown key; there are: {', '.join(at.model_fields)}"
