"""Typed settings of the recipes; every key can be set on the command line as ``key=value`` or ``stage.key=value``.

A value is text, ``none``, or a JSON list such as ``[0.9, 0.95]``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, TypeVar

import orjson
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from clawgym_env.errors import ConfigError

C = TypeVar("C", bound=BaseModel)


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


class FilterSettings(Settings):
    """Which calls of a rollout train; see ``docs/method.md``. Side calls never do."""

    dead_leaves: bool = True
    """Of each agent's each segment only the leaf with the longest continuation trains."""
    max_leaves: int | None = Field(None, ge=1)
    """A rollout that would train more leaves than this trains none."""
    subagent_credit: Literal["exclude", "broadcast", "split"] = "exclude"
    compaction_credit: Literal["exclude", "broadcast", "split"] = "exclude"


class RunSettings(Settings):
    """What every recipe shares."""

    seed: int = Field(0, ge=0)
    harness: str = "pi"
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


class QuickstartConfig(RunSettings):
    """Demonstrate, imitate, then improve: from nothing to a policy that solves held-out tasks."""

    demos: DemosStage = DemosStage()
    sft: SFTStage = SFTStage()
    grpo: FromScratchGRPOStage = FromScratchGRPOStage()
    eval: EvalStage = EvalStage()


class SFTConfig(RunSettings):
    """Fine-tune on rollouts that a run captured: distillation, or rejection sampling with ``sft.min_score``."""

    rollouts: str = Field(min_length=1)
    """Run folder whose rollouts are learnt from."""
    sft: WholePromptSFTStage = WholePromptSFTStage()
    eval: EvalStage = EvalStage()


class GRPOConfig(RunSettings):
    """Improve an existing policy with tree GRPO."""

    grpo: GRPOStage = GRPOStage()
    eval: EvalStage = EvalStage()


RECIPES: dict[str, type[QuickstartConfig] | type[SFTConfig] | type[GRPOConfig]] = {
    "quickstart": QuickstartConfig,
    "sft": SFTConfig,
    "grpo": GRPOConfig,
}


#: What the bare key ``steps`` means: the steps of a recipe's main stage.
STEPS = {"quickstart": "grpo.steps", "sft": "sft.steps", "grpo": "grpo.steps"}


def build(recipe: str, overrides: Sequence[str]) -> QuickstartConfig | SFTConfig | GRPOConfig:
    """The settings of a recipe with ``key=value`` overrides; ``steps=N`` is short for the main stage's steps.

    Raises:
        ConfigError: an unknown recipe or key, or a value that does not fit; the message says which and what would.
    """
    if recipe not in RECIPES:
        raise ConfigError(f"unknown recipe {recipe!r}; there are: {', '.join(RECIPES)}")
    whole = [f"{STEPS[recipe]}{item[5:]}" if item.startswith("steps=") else item for item in overrides]
    return validate(RECIPES[recipe], parse_overrides(whole))


def validate(kind: type[C], data: dict[str, Any]) -> C:
    """Checks settings.

    Raises:
        ConfigError: naming each key at fault.
    """
    try:
        return kind.model_validate(data)
    except ValidationError as error:
        faults = [f"{'.'.join(map(str, e['loc']))}: {_say(kind, e)}" for e in error.errors()]
        raise ConfigError("bad settings: " + "; ".join(faults)) from None


def parse_overrides(overrides: Sequence[str]) -> dict[str, Any]:
    """``["seed=1", "grpo.lr=1e-4"]`` -> ``{"seed": "1", "grpo": {"lr": "1e-4"}}``; pydantic converts the text.

    Raises:
        ConfigError: an override without ``=``, one given twice, or a list that is no JSON.
    """
    out: dict[str, Any] = {}
    for item in overrides:
        key, sign, text = item.partition("=")
        if not sign or not key:
            raise ConfigError(f"{item!r} is no setting: write key=value, for example seed=1 or grpo.steps=20")
        *path, leaf = key.split(".")
        at = out
        for name in path:
            at = at.setdefault(name, {})
            if not isinstance(at, dict):
                raise ConfigError(f"{name!r} in {item!r} is set to a value already")
        if leaf in at:
            raise ConfigError(f"{key!r} is set twice")
        at[leaf] = _value(key, text)
    return out


def _value(key: str, text: str) -> Any:
    if text == "none":
        return None
    if not text.startswith("["):
        return text
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError:
        raise ConfigError(f"{key}={text} is no JSON list: write it as [1, 2]") from None


def _say(kind: type[BaseModel], error: Any) -> str:
    if error["type"] != "extra_forbidden":
        return str(error["msg"])
    fields: dict[str, Any] = dict(kind.model_fields)
    for name in error["loc"][:-1]:
        inner = fields[str(name)].annotation
        fields = dict(inner.model_fields)
    return f"unknown key; there are: {', '.join(fields)}"
