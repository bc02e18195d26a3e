"""A task small enough to learn in a test: two words can be written, one of them is right.

The harness is the scripted agent in a process sandbox: a real program, real HTTP, real files.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from clawgym_env.engines.scripted import ScriptedEngine
from clawgym_env.errors import TaskError
from clawgym_env.harnesses import get_harness
from clawgym_env.rendering import ChatRenderer
from clawgym_env.rendering.tokenizer import SHIPPED_TOKENIZER
from clawgym_env.sandboxes import get_backend
from clawgym_env.store import RunFolder
from clawgym_env.tasks.base import FreshSandbox, Snapshot, Split, Task
from clawgym_env.types import Reward, Status, ToolCall
from clawgym_env.world import World
from torchrl_ext.models import PolicyConfig, create_policy
from torchrl_ext.progress import RunProgress
from torchrl_ext.recipes.config import RunSettings, SFTStage
from torchrl_ext.trainer import fine_tune
from torchrl_ext.workbench import Workbench

WORDS = ("sales", "orders")
IMITATE = SFTStage(steps=60, batch=24, lr=1e-2, warmup=5, curriculum=(), save_every=30)


async def _verify(snapshot: Snapshot, fresh: FreshSandbox) -> Reward:
    passed = snapshot.get("answer.txt") == WORDS[0].encode()
    return Reward(float(passed), passed)


class BanditSuite:
    """One task with no hint which word is right."""

    name = "bandit"
    families: Sequence[str] = ("word",)

    def sample(self, split: Split, n: int, *, seed: int, families: Sequence[str] | None = None) -> list[Task]:
        return [self.get(f"bandit/{k}") for k in range(n)]

    def get(self, task_id: str) -> Task:
        if not task_id.startswith("bandit/"):
            raise TaskError(f"no task {task_id!r}")
        return Task(task_id, self.name, "word", "Write a word to answer.txt.", {}, _verify)


def imitate(path: Path) -> Workbench:
    """A run that was taken through capture and fine-tuning: its policy writes either word."""
    bench = workbench(path)
    _capture(bench, 24)
    fine_tune(bench, IMITATE, bench.folder, "demos")
    return bench


def workbench(path: Path) -> Workbench:
    settings = RunSettings(harness="scripted", sandbox="process", concurrency=4, max_tokens=48, max_calls=3)
    renderer = ChatRenderer.from_folder()
    shape = PolicyConfig(renderer.vocab_size, width=96, layers=2, heads=2, kv_heads=1, head_dim=48, ff_width=192)
    torch.set_num_threads(1)
    return Workbench(
        RunFolder(path),
        settings,
        create_policy(shape),
        SHIPPED_TOKENIZER,
        renderer,
        World(get_harness("scripted"), BanditSuite(), get_backend("process")),
        RunProgress(),
    )


def _capture(bench: Workbench, n: int) -> None:
    encode = bench.renderer.encode_reply
    specs = bench.specs(bench.world.suite.sample("train", n, seed=0), "demos")
    answers = {
        spec.id: [encode("", ToolCall("write_file", {"path": "answer.txt", "content": WORDS[k % 2]})), encode("Done.")]
        for k, spec in enumerate(specs)
    }
    engine = ScriptedEngine(lambda request, turn: answers[request.rollout_id][turn])
    with bench.collector(engine, lambda k: specs, 1) as collector:
        batch = next(iter(collector))
    assert batch is not None and batch.shape[0] == n
    assert [r.status for r in collector.rollouts] == [Status.COMPLETED] * n
    assert sum(r.reward.passed for r in collector.rollouts if r.reward) == n // 2
    bench.folder.write_rollouts("demos-0000", collector.rollouts)
