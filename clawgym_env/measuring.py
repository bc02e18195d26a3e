"""Runs an evaluation: tasks of a split under each of some harnesses, one policy."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from clawgym_env.engines.base import Engine
from clawgym_env.engines.upstream import UpstreamEngine
from clawgym_env.errors import ConfigError
from clawgym_env.overrides import parse_overrides
from clawgym_env.pool import RolloutPool, open_runner
from clawgym_env.rendering import ChatRenderer
from clawgym_env.rollout import Rollout, RolloutSettings, RolloutSpec
from clawgym_env.sandboxes.base import Limits
from clawgym_env.store import RunFolder
from clawgym_env.tasks.base import Split
from clawgym_env.types import Budget, Sampling
from clawgym_env.world import Program, open_mixed_world


@dataclass(frozen=True, slots=True)
class Plan:
    """What is measured, on what, with which limits.

    Attributes:
        harnesses: Label -> harness; the same tasks run under each.
        n: Tasks.
        repeats: Rollouts of each task under each harness.
    """

    harnesses: Mapping[str, Program]
    suite: str
    level: int
    split: Split
    n: int
    seed: int
    temperature: float
    max_tokens: int
    max_calls: int
    timeout_s: float
    sandbox: str
    concurrency: int
    repeats: int = 1
    limits: Limits = field(default_factory=Limits)

    @property
    def rollouts(self) -> int:
        """How many there will be."""
        return self.n * self.repeats * len(self.harnesses)


def programs_of(labels: Sequence[str], options: Sequence[str]) -> dict[str, Program]:
    """Harnesses with their settings.

    Args:
        options: ``key=value``; of one harness of several, ``label.key=value``.

    Raises:
        ConfigError: a harness that is named twice, or an option of one that is not named.
    """
    if len(set(labels)) < len(labels):
        raise ConfigError(f"a harness is named twice: {', '.join(labels)}")
    given = parse_overrides(options)
    if len(labels) == 1:
        given = {labels[0]: given}
    for label, found in given.items():
        if label not in labels or not isinstance(found, dict):
            raise ConfigError(f"option {label!r}: write HARNESS.KEY=VALUE, for one of {', '.join(labels)}")
    return {label: Program(label, given.get(label, {})) for label in labels}


def open_endpoint(url: str, model: str, api_key: str | None) -> tuple[Engine, ChatRenderer]:
    """An OpenAI-compatible endpoint as the policy."""
    renderer = ChatRenderer.from_folder()
    return UpstreamEngine(url, model=model, renderer=renderer, api_key=api_key), renderer


async def run(plan: Plan, engine: Engine, renderer: ChatRenderer, *, on_done: Callable[[int], None]) -> list[Rollout]:
    """All rollouts of a plan, harness by harness; the engine is closed at the end.

    A rollout's sampling seed follows from its task and its number alone, whatever else is measured.

    Args:
        on_done: Called with the number of rollouts that have ended.
    """
    world = open_mixed_world(plan.harnesses, plan.suite, level=plan.level, sandbox=plan.sandbox)
    tasks = world.suite.sample(plan.split, plan.n, seed=plan.seed)
    specs = [
        RolloutSpec(
            f"eval-{label}-{k:04d}-{r}", task, harness, f"{task.id}@{label}", (plan.seed << 20) + k + (r << 40), label
        )
        for label, harness in world.harnesses.items()
        for k, task in enumerate(tasks)
        for r in range(plan.repeats)
    ]
    settings = RolloutSettings(
        sampling=Sampling(temperature=plan.temperature, max_tokens=plan.max_tokens),
        budget=Budget(max_calls=plan.max_calls, max_tokens=plan.max_calls * plan.max_tokens),
        timeout_s=plan.timeout_s,
        limits=plan.limits,
    )
    done: dict[str, Rollout] = {}
    try:
        async with open_runner(engine, renderer, world.backend, settings) as runner:
            async for rollout in RolloutPool(runner, concurrency=plan.concurrency).as_completed(specs):
                done[rollout.id] = rollout
                on_done(len(done))
    finally:
        await engine.aclose()
    return [done[spec.id] for spec in specs]


def store(path: Path, plan: Plan, rollouts: list[Rollout]) -> None:
    """Writes the rollouts as a run folder.

    Raises:
        ConfigError: the folder holds a run already.
    """
    if (path / "config.json").exists():
        raise ConfigError(f"{path} holds a run already: name another --out")
    folder = RunFolder(path)
    folder.write_rollouts("eval", rollouts)
    folder.write_config({"recipe": "eval", **asdict(plan)})
