"""Runs an evaluation: tasks of a split, one rollout each, under one harness and one policy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from clawgym_env.engines.base import Engine
from clawgym_env.engines.upstream import UpstreamEngine
from clawgym_env.errors import ConfigError
from clawgym_env.pool import RolloutPool, open_runner
from clawgym_env.rendering import ChatRenderer
from clawgym_env.rollout import Rollout, RolloutSettings, RolloutSpec
from clawgym_env.store import RunFolder
from clawgym_env.tasks.base import Split
from clawgym_env.types import Budget, Sampling
from clawgym_env.world import open_world


@dataclass(frozen=True, slots=True)
class Plan:
    """What is measured, on what, with which limits."""

    harness: str
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


def open_endpoint(url: str, model: str, api_key: str | None) -> tuple[Engine, ChatRenderer]:
    """An OpenAI-compatible endpoint as the policy."""
    renderer = ChatRenderer.from_folder()
    return UpstreamEngine(url, model=model, renderer=renderer, api_key=api_key), renderer


async def run(plan: Plan, engine: Engine, renderer: ChatRenderer, *, on_done: Callable[[int], None]) -> list[Rollout]:
    """All rollouts of a plan; the engine is closed at the end.

    Args:
        on_done: Called with the number of rollouts that have ended.
    """
    world = open_world(plan.harness, plan.suite, level=plan.level, sandbox=plan.sandbox)
    tasks = world.suite.sample(plan.split, plan.n, seed=plan.seed)
    specs = [
        RolloutSpec(f"eval-{k:04d}", task, world.harness, f"{task.id}@{plan.harness}", seed=(plan.seed << 20) + k)
        for k, task in enumerate(tasks)
    ]
    settings = RolloutSettings(
        sampling=Sampling(temperature=plan.temperature, max_tokens=plan.max_tokens),
        budget=Budget(max_calls=plan.max_calls, max_tokens=plan.max_calls * plan.max_tokens),
        timeout_s=plan.timeout_s,
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
    folder.write_config({"recipe": "eval", **asdict(plan)})
    folder.write_rollouts("eval", rollouts)
