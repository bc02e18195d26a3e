"""What the stages of a run share: the run's folder, policy and world, its seeds, and its saves.

Invariant: tasks, harnesses, batches and sampling seeds follow from (seed, stage, step) alone (under a curriculum, from
the metrics of the steps before as well), so that a stage that was killed goes on from its last save to the same result,
to within rounding.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Any, Protocol, cast

import torch
from transformers import PreTrainedModel

from clawgym_env.engines.base import Engine
from clawgym_env.rendering import ChatRenderer
from clawgym_env.rollout import RolloutSettings, RolloutSpec
from clawgym_env.store import RunFolder
from clawgym_env.tasks.base import Split, Task
from clawgym_env.tree.filters import Filters
from clawgym_env.types import Budget, Sampling
from clawgym_env.world import World, limits_of
from torchrl_ext.collector import TreeCollector
from torchrl_ext.engine import TorchEngine
from torchrl_ext.models import load_policy, save_policy
from torchrl_ext.progress import RunProgress
from torchrl_ext.recipes.config import RunSettings

#: Stages that save, in the order in which a run goes through them.
STAGES = ("sft", "value", "grpo", "ppo")
DONE = 1 << 62


@dataclass(slots=True)
class Workbench:
    """What the stages of a run share.

    Attributes:
        model: The policy; engine and trainer hold the same parameters.
        tokenizer_dir: Folder whose tokenizer files go with the saved policy.
    """

    folder: RunFolder
    settings: RunSettings
    model: PreTrainedModel
    tokenizer_dir: Path
    renderer: ChatRenderer
    world: World
    progress: RunProgress
    started: float = field(default_factory=time.monotonic)

    @contextmanager
    def collector(
        self, engine: Engine, plan: Callable[[int], Sequence[RolloutSpec]] = lambda k: [], batches: int = 0
    ) -> Iterator[TreeCollector]:
        """A collector of this run, shut down on exit, whose rollouts advance the progress bar."""
        s = self.settings
        rollout = RolloutSettings(
            sampling=Sampling(temperature=s.temperature, max_tokens=s.max_tokens),
            budget=Budget(max_calls=s.max_calls),
            timeout_s=s.timeout_s,
            limits=limits_of(s.limits, s.timeout_s),
            filters=Filters(**s.filters.model_dump()),
        )
        collector = TreeCollector(
            engine,
            self.renderer,
            self.world.backend,
            plan,
            settings=rollout,
            total_batches=batches,
            concurrency=s.concurrency,
            on_rollout=lambda rollout, left: self.progress.advance(),
        )
        try:
            yield collector
        finally:
            collector.shutdown()
            self.progress.end()

    @contextmanager
    def engine(self) -> Iterator[TorchEngine]:
        """The embedded engine on this run's parameters, closed on exit."""
        engine = TorchEngine(self.model, max_context=self.settings.max_context)
        try:
            yield engine
        finally:
            asyncio.run(engine.aclose())

    def specs(
        self, tasks: Sequence[Task], name: str, *, group: int = 1, under: Sequence[Sequence[str]] | None = None
    ) -> list[RolloutSpec]:
        """Rollouts of tasks, ids and seeds by name and place.

        Args:
            group: Rollouts of each task.
            under: For each task, the harness of each of its rollouts, in place of ``group``; by default all run under
                the first harness.
        """
        mixture = self.settings.mixture
        under = under if under is not None else [mixture.labels[:1] * group] * len(tasks)
        return [
            RolloutSpec(
                id=f"{name}-{t:03d}-{k}",
                task=task,
                harness=self.world.harnesses[label],
                group=mixture.group(task.id, label),
                seed=derive_seed(self.settings.seed, name, t, k),
                label=label,
            )
            for t, (task, labels) in enumerate(zip(tasks, under, strict=True))
            for k, label in enumerate(labels)
        ]

    def random(self, *key: object) -> random.Random:
        """A generator of the run's seed and a key."""
        return random.Random(derive_seed(self.settings.seed, *key))

    def tasks(self, split: Split, n: int, *key: object) -> list[Task]:
        """Tasks drawn by the run's seed and a key."""
        return self.world.suite.sample(split, n, seed=derive_seed(self.settings.seed, split, *key) % (1 << 31))

    def log(self, stage: str, row: dict[str, Any]) -> None:
        """One line of ``metrics.jsonl``."""
        self.folder.append_metrics({"stage": stage, "elapsed_s": round(time.monotonic() - self.started, 2), **row})


def derive_seed(seed: int, *key: object) -> int:
    """A 63-bit seed from the run's seed and a key."""
    data = "/".join(map(str, (seed, *key))).encode()
    return int.from_bytes(blake2b(data, digest_size=8).digest(), "little") >> 1


class Stateful(Protocol):
    """A module or an optimiser."""

    def state_dict(self) -> Any:
        """Everything to go on from."""

    def load_state_dict(self, state: Any) -> Any:
        """Puts it back."""


def save_state(bench: Workbench, stage: str, step: int, parts: Mapping[str, Stateful]) -> None:
    """Writes the policy and what the stage has beside it, in the place of the save before."""
    folder = bench.folder.path / "checkpoints"
    folder.mkdir(exist_ok=True)
    state = {
        "stage": stage,
        "step": step,
        "model": bench.model.state_dict(),
        "elapsed_s": time.monotonic() - bench.started,
        **{name: part.state_dict() for name, part in parts.items()},
    }
    beside = folder / ".state.pt"
    torch.save(state, beside)
    beside.replace(folder / "state.pt")


def restore_state(bench: Workbench, stage: str, parts: Mapping[str, Stateful]) -> int:
    """Puts the policy, and the parts of a stage that had begun, where the last save left them.

    Returns:
        Steps of ``stage`` that are done; ``DONE`` where a later stage has begun.
    """
    path = bench.folder.path / "checkpoints" / "state.pt"
    if not path.is_file():
        return 0
    state = torch.load(path, weights_only=True)
    bench.model.load_state_dict(state["model"])
    if state["stage"] != stage:
        return DONE if STAGES.index(state["stage"]) > STAGES.index(stage) else 0
    for name, part in parts.items():
        part.load_state_dict(state[name])
    kept = [r for r in bench.folder.metrics() if r["stage"] != stage or r["step"] <= state["step"]]
    bench.folder.keep_metrics(kept)
    return int(state["step"])


def reference_policy(bench: Workbench) -> PreTrainedModel:
    """The policy as it is now, frozen and kept with the run; of a run that is gone on with, as it was then."""
    folder = bench.folder.path / "checkpoints" / "reference"
    if not (folder / "config.json").is_file():
        beside = folder.with_name(".reference")
        save_policy(bench.model, bench.tokenizer_dir, beside)
        beside.replace(folder)
    return cast(PreTrainedModel, load_policy(folder).eval().requires_grad_(False))
