"""Settings are what the user wrote, or refused with the key at fault; nothing is ignored."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, ValidationError

from clawgym_env.errors import ConfigError
from clawgym_env.overrides import parse_overrides
from clawgym_env.sandboxes.base import Limits
from clawgym_env.tree.filters import Filters
from clawgym_env.world import Program, limits_of
from torchrl_ext.mixture import Curriculum, Mixture
from torchrl_ext.recipes.config import (
    RECIPES,
    GRPOConfig,
    MixConfig,
    PPOConfig,
    QuickstartConfig,
    SFTConfig,
    build,
    stored,
    validate,
)

SOURCE = "rollouts=runs/source"
NEEDED = {"quickstart": [], "grpo": [], "sft": [SOURCE], "ppo": [], "mix": []}


def test_overrides_reach_their_stage_with_their_type() -> None:
    settings = build("quickstart", ["seed=7", "grpo.lr=1e-5", "grpo.tis_cap=none", "demos.skill=0.25"])
    assert isinstance(settings, QuickstartConfig)
    assert (settings.seed, settings.grpo.lr, settings.grpo.tis_cap, settings.demos.skill) == (7, 1e-5, None, 0.25)
    assert settings.grpo.steps == QuickstartConfig().grpo.steps


def test_filters_are_those_of_the_rollouts() -> None:
    assert Filters(**build("grpo", []).filters.model_dump()) == Filters()
    chosen = ["filters.dead_leaves=false", "filters.max_leaves=8", "filters.subagent_credit=split"]
    assert Filters(**build("grpo", chosen).filters.model_dump()) == Filters(False, 8, "split", "exclude")


def test_limits_are_those_of_the_sandboxes() -> None:
    given = build("grpo", ["limits.memory_mb=2048", "limits.cpu_s=none", "timeout_s=30"])
    assert limits_of(given.limits, given.timeout_s) == Limits(memory_mb=2048, cpu_s=None, wall_s=150.0)


def test_one_harness_takes_its_options() -> None:
    grpo = build("grpo", ["harness=codex", "harness_options.profile=stock", 'harness_options.extra_args=["-v"]'])
    assert grpo.programs == {"codex": Program("codex", {"profile": "stock", "extra_args": ["-v"]})}
    assert grpo.mixture == Mixture({"codex": 1.0}, {})


def test_a_mix_is_named_in_a_list_and_described_harness_by_harness() -> None:
    given = ["harnesses=pi,gemini-pi", 'held_out=["codex"]', "per_harness.gemini-pi.program=pi"]
    mix = build("mix", [*given, "per_harness.gemini-pi.options.wire=gemini", "per_harness.pi.weight=3"])
    gemini = Program("pi", {"wire": "gemini"})
    assert mix.programs == {"pi": Program("pi"), "gemini-pi": gemini, "codex": Program("codex")}
    assert mix.mixture == Mixture({"pi": 3.0, "gemini-pi": 1.0}, {"codex": 1.0})
    assert build("mix", ["held_out=none"]).mixture.held_out == {}
    told = build("mix", ["curriculum.kind=variance", "curriculum.window=2", "curriculum.floor=0.5"]).mixture
    assert told.curriculum == Curriculum(2, 0.5) and build("mix", []).mixture.curriculum is None


def test_the_default_mix_holds_one_out() -> None:
    mix = build("mix", ["steps=3"])
    assert isinstance(mix, MixConfig) and mix.grpo.steps == 3
    assert list(mix.mixture.weights) == ["pi", "claude-code", "codex", "mini-swe-agent"]
    assert list(mix.mixture.held_out) == ["openclaw"]


def test_a_run_s_settings_come_back() -> None:
    mix = build("mix", ['per_harness.pi.options.tools=["bash"]', "grouping=task"])
    assert stored({"recipe": "mix", **json.loads(mix.model_dump_json())}, "runs/x") == mix
    with pytest.raises(ConfigError, match="runs/x was not made by a recipe of this version: recipe 'nope'"):
        stored({"recipe": "nope"}, "runs/x")


def test_bare_steps_are_those_of_the_main_stage() -> None:
    quickstart, grpo, sft = (build(r, [*NEEDED[r], "seed=1", "steps=20"]) for r in ("quickstart", "grpo", "sft"))
    assert isinstance(quickstart, QuickstartConfig) and quickstart.grpo.steps == 20
    assert quickstart.sft.steps == QuickstartConfig().sft.steps
    assert isinstance(grpo, GRPOConfig) and grpo.grpo.steps == 20
    assert isinstance(sft, SFTConfig) and sft.sft.steps == 20
    with pytest.raises(ConfigError, match=r"'grpo\.steps' is set twice"):
        build("quickstart", ["steps=1", "grpo.steps=2"])


def test_the_critic_and_its_stages_are_set_beside_the_policy() -> None:
    given = [
        "steps=9",
        "value.steps=1",
        "critic.shared=true",
        "critic.clip_value=0.2",
        "ppo.lmbda=0.9",
        "ppo.alpha=0.5",
    ]
    ppo = build("ppo", [*given, "ppo.lmbda_critic=none", "ppo.branch_advantage=split"])
    assert isinstance(ppo, PPOConfig)
    assert (ppo.ppo.steps, ppo.value.steps, ppo.critic.shared, ppo.critic.clip_value) == (9, 1, True, 0.2)
    assert (ppo.ppo.lmbda, ppo.ppo.alpha, ppo.ppo.lmbda_critic, ppo.ppo.branch_advantage) == (0.9, 0.5, None, "split")
    assert build("ppo", ["ppo.group=1", "demos.rollouts=0", "sft.steps=0"]).programs == {"pi": Program("pi")}


def test_a_correction_takes_the_place_of_the_cap() -> None:
    given = ["grpo.correction.kind=icepop", "grpo.correction.low=0.5", "grpo.correction.high=5"]
    grpo = build("grpo", [*given, "grpo.kl_coeff=1e-3", "grpo.kl_estimator=k2", "grpo.zero_variance=filter"])
    assert isinstance(grpo, GRPOConfig) and grpo.grpo.correction is not None
    assert (grpo.grpo.correction.kind, grpo.grpo.correction.low, grpo.grpo.correction.high) == ("icepop", 0.5, 5.0)
    assert (grpo.grpo.kl_coeff, grpo.grpo.kl_estimator, grpo.grpo.zero_variance) == (1e-3, "k2", "filter")
    assert build("grpo", ["grpo.correction=none"]) == build("grpo", [])


def test_the_quickstart_keeps_its_own_defaults_when_a_neighbour_is_set() -> None:
    quickstart, grpo = build("quickstart", ["grpo.lr=1e-5"]), build("grpo", ["grpo.lr=1e-5"])
    assert isinstance(quickstart, QuickstartConfig) and quickstart.grpo.negative_weight == 0.3
    assert isinstance(grpo, GRPOConfig) and grpo.grpo.negative_weight == 1.0, "the paper's"


def test_lists_are_json() -> None:
    settings = build("quickstart", ["grpo.betas=[0.8, 0.9]", "sft.curriculum=[]"])
    assert isinstance(settings, QuickstartConfig)
    assert settings.grpo.betas == (0.8, 0.9) and settings.sft.curriculum == ()
    curriculum = build("sft", [SOURCE, "sft.curriculum=[[0.5, 16], [0.75, 128]]"])
    assert isinstance(curriculum, SFTConfig) and curriculum.sft.curriculum == ((0.5, 16), (0.75, 128))


def test_a_value_may_hold_an_equals_sign() -> None:
    assert parse_overrides(["model=a=b"]) == {"model": "a=b"}


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_recipe_survives_its_config_file(recipe: str) -> None:
    settings = build(recipe, [*NEEDED[recipe], "seed=3"])
    assert validate(RECIPES[recipe], settings.model_dump(mode="json")) == settings


@pytest.mark.parametrize(
    ("recipe", "overrides", "message"),
    [
        ("nope", [], "unknown recipe 'nope'; there are: quickstart, sft, grpo, ppo, mix"),
        ("grpo", ["sede=1"], "sede: unknown key; there are: seed, suite, "),
        ("grpo", ["grpo.step=1"], "grpo.step: unknown key; there are: steps, tasks, group"),
        ("grpo", ["demos.skill=0.5"], "demos: unknown key; there are: "),
        ("grpo", ["seed=-1"], "seed: Input should be greater than or equal to 0"),
        ("grpo", ["seed=one"], "seed: Input should be a valid integer"),
        ("grpo", ["seed="], "seed: Input should be a valid integer"),
        ("grpo", ["seed=none"], "seed: Input should be a valid integer"),
        ("grpo", ["grpo=1"], "grpo: Input should be a valid dictionary"),
        ("grpo", ["grpo.steps.more=1"], "grpo.steps: Input should be a valid integer"),
        ("grpo", ["grpo.group=1"], "grpo.group: Input should be greater than or equal to 2"),
        ("grpo", ["grpo.node_weight=twice"], "grpo.node_weight: Input should be 'once'"),
        ("grpo", ["grpo.betas=[0.9]"], "grpo.betas.1: Field required"),
        ("grpo", ["grpo.betas=[0.9,"], "grpo.betas=[0.9, is no JSON list"),
        ("grpo", ["grpo.normalisation=constant"], "constant=NUMBER goes with normalisation=constant"),
        ("grpo", ["grpo.constant=100"], "constant=NUMBER goes with normalisation=constant"),
        ("grpo", ["grpo.dual_clip=3", "grpo.objective=cispo"], "dual_clip goes with objective=ppo, not with cispo"),
        ("grpo", ["grpo.dual_clip=1"], "grpo.dual_clip: Input should be greater than 1"),
        ("grpo", ["grpo.correction.kind=mis"], "grpo.correction.kind: Input should be 'token_tis', 'sequence_tis'"),
        ("grpo", ["grpo.correction.high=5"], "grpo.correction.kind: Field required"),
        ("grpo", ["grpo.correction.cap=5"], "grpo.correction.cap: unknown key; there are: kind, high, low"),
        ("grpo", ["grpo.correction.kind=icepop", "grpo.correction.low=3"], "low must lie below high, got 3.0 and 2.0"),
        ("ppo", ["ppo.correction.kind=k3", "ppo.correction.low=1"], "k3 has no lower bound: leave low out"),
        ("ppo", ["ppo.scale=none"], "ppo.scale: unknown key; there are: steps, tasks, group, lr"),
        ("ppo", ["ppo.gamma=1.1"], "ppo.gamma: Input should be less than or equal to 1"),
        ("ppo", ["critic.head=2"], "critic.head: unknown key; there are: shared, detach, lr"),
        ("ppo", ["demos.rollouts=0"], "demos.rollouts=0 leaves nothing to imitate: set sft.steps=0 as well"),
        ("grpo", ["filters.max_leaves=0"], "filters.max_leaves: Input should be greater than or equal to 1"),
        ("grpo", ["filters.subagent_credit=all"], "filters.subagent_credit: Input should be 'exclude', 'broadcast' or"),
        ("quickstart", ["filters.leaves=1"], "filters.leaves: unknown key; there are: dead_leaves, max_leaves, "),
        ("grpo", ["temperature=0"], "temperature: Input should be greater than 0"),
        ("quickstart", ["level=4"], "level: Input should be less than or equal to 3"),
        ("quickstart", ["demos.skill=1.5"], "demos.skill: Input should be less than or equal to 1"),
        ("grpo", ["limits.memory_mb=much"], "limit memory_mb: Input should be a valid integer"),
        ("grpo", ["limits.wall_s=9"], "unknown limit wall_s; there are: "),
        ("grpo", ['harness_options={"wire"'], 'harness_options={"wire" is no JSON object: write it as'),
        ("grpo", ["harness_options=gemini"], "harness_options: Input should be a valid dictionary"),
        ("mix", ["harness=pi"], "harness: unknown key; there are: seed, suite"),
        ("mix", ["harnesses=none"], "harnesses must name at least one: harnesses=pi,codex"),
        ("mix", ["harnesses=pi,pi"], "pi is named twice in harnesses and held_out"),
        ("mix", ["harnesses=pi,openclaw"], "openclaw is named twice in harnesses and held_out"),
        ("mix", ["harnesses=a/b"], "harnesses.0: String should match pattern"),
        ("mix", ["per_harness.qwen.weight=2"], "per_harness names qwen; harnesses and held_out name pi, claude-code"),
        ("mix", ["per_harness.pi.wieght=2"], "per_harness.pi.wieght: unknown key; there are: program, options, weight"),
        ("mix", ["per_harness.pi.weight=0"], "per_harness.pi.weight: Input should be greater than 0"),
        ("mix", ["curriculum.kind=variance", "grouping=task"], "it needs grouping=task_harness"),
        ("mix", ["curriculum.floor=0"], "curriculum.floor: Input should be greater than 0"),
        ("sft", [], "rollouts: Field required"),
        ("sft", ["rollouts="], "rollouts: String should have at least 1 character"),
    ],
)
def test_what_cannot_be_honoured_is_refused(recipe: str, overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        build(recipe, overrides)
    assert message in str(refused.value)


def test_every_fault_is_named() -> None:
    with pytest.raises(ConfigError, match=r"seed: .*; grpo\.lr: .*; nope: unknown key") as refused:
        build("grpo", ["seed=x", "grpo.lr=-1", "nope=1"])
    assert str(refused.value).startswith("bad settings: ")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["seed"], "'seed' is no setting: write key=value"),
        (["=1"], "'=1' is no setting"),
        (["seed=1", "seed=1"], "'seed' is set twice"),
        (["grpo.lr=1", "grpo.lr=2"], "'grpo.lr' is set twice"),
        (["grpo.lr=1", "grpo=2"], "'grpo' is set twice"),
        (["grpo=1", "grpo.lr=2"], "'grpo' in 'grpo.lr=2' is set to a value already"),
    ],
)
def test_overrides_that_contradict(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        parse_overrides(overrides)
    assert message in str(refused.value)


NAMES = st.text("abcxyz_", min_size=1, max_size=6)
TREES = st.recursive(
    st.text("0123456789.e-abc=", max_size=8).filter(lambda text: text != "none"),
    lambda inner: st.dictionaries(NAMES, inner, min_size=1, max_size=3),
    max_leaves=8,
).filter(lambda tree: isinstance(tree, dict))


def flat(tree: dict[str, Any], path: str = "") -> list[str]:
    """The overrides that spell a tree of settings."""
    out = []
    for name, value in tree.items():
        out += flat(value, f"{path}{name}.") if isinstance(value, dict) else [f"{path}{name}={value}"]
    return out


@given(tree=TREES, order=st.randoms(use_true_random=False))
def test_parsing_inverts_spelling_in_any_order(tree: dict[str, Any], order: Any) -> None:
    overrides = flat(tree)
    order.shuffle(overrides)
    assert parse_overrides(overrides) == tree


def test_settings_do_not_change_after_the_start() -> None:
    with pytest.raises(ValidationError):
        GRPOConfig().seed = 1  # type: ignore[misc]


def leaves(kind: type[BaseModel], path: str = "") -> list[str]:
    """Every key of a recipe, dotted."""
    out = []
    for name, field in kind.model_fields.items():
        inner = field.annotation
        nested = isinstance(inner, type) and issubclass(inner, BaseModel)
        out += leaves(inner, f"{path}{name}.") if nested else [path + name]  # type: ignore[arg-type]
    return out


def spelled(value: Any) -> str:
    """A value as the command line takes it."""
    if value is None:
        return "none"
    return json.dumps(value) if isinstance(value, tuple | dict) else str(value)


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_key_can_be_set_on_the_command_line(recipe: str) -> None:
    settings = build(recipe, NEEDED[recipe])
    for key in leaves(type(settings)):
        value: Any = settings
        for name in key.split("."):
            value = getattr(value, name)
        others = [item for item in NEEDED[recipe] if not item.startswith(f"{key}=")]
        assert build(recipe, [*others, f"{key}={spelled(value)}"]) == settings, key
