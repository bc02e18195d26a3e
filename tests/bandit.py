"""A task small enough to learn in a test: two words can be written, one of them is right.

The harnesses are the scripted agent, and a third party's with a shell (``MIXED``), in process sandboxes: real programs,
real HTTP, real files.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from clawgym_env.engines.scripted import ScriptedEngine
from clawgym_env.errors import TaskError
from clawgym_env.harnesses import Harness, get_harness
from clawgym_env.rendering import ChatRenderer
from clawgym_env.rendering.tokenizer import SHIPPED_TOKENIZER
from clawgym_env.sandboxes import get_backend
from clawgym_env.store import RunFolder
from clawgym_env.tasks.base import FreshSandbox, Snapshot, Split, Task
from clawgym_env.types import Reward, Status, ToolCall
from clawgym_env.world import World
from torchrl_ext.models import PolicyConfig, create_policy
from torchrl_ext.progress import RunProgress
from torchrl_ext.recipes.config import OneHarnessSettings, RunSettings
from torchrl_ext.recipes.stages import SFTStage
from torchrl_ext.trainer import fine_tune
from torchrl_ext.workbench import Workbench

WORDS = ("sales", "orders")
SMALL: dict[str, Any] = {"sandbox": "process", "concurrency": 4, "max_tokens": 48, "max_calls": 3, "max_context": 4096}
AGENT = Path(__file__).parent / "agents" / "shell_agent.py"
_GIVEN = ("{openai_base_url}", "{api_key}", "{model}", "{max_tokens}")
_SHELL = {
    "program": "command",
    "options": {"argv": (sys.executable, "-I", "-S", "{agent}", *_GIVEN), "mounts": {"agent": str(AGENT)}},
}
#: Trained under the scripted agent and under one with a shell; a second of the latter is held out.
MIXED: dict[str, Any] = {
    **SMALL,
    "harnesses": ("scripted", "shell"),
    "held_out": ("twin",),
    "per_harness": {"shell": _SHELL, "twin": _SHELL},
}
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


def imitate(path: Path, settings: RunSettings | None = None) -> Workbench:
    """A run that was taken through capture and fine-tuning: its policy writes either word."""
    bench = workbench(path, settings)
    _capture(bench, 24 * len(bench.world.harnesses))
    fine_tune(bench, IMITATE, bench.folder, "demos")
    return bench


def workbench(path: Path, settings: RunSettings | None = None) -> Workbench:
    settings = settings or OneHarnessSettings(harness="scripted", **SMALL)
    renderer = ChatRenderer.from_folder()
    shape = PolicyConfig(renderer.vocab_size, width=96, layers=2, heads=2, kv_heads=1, head_dim=48, ff_width=192)
    torch.set_num_threads(1)
    harnesses = {label: get_harness(p.name, **p.options) for label, p in settings.programs.items()}
    world = World(harnesses, BanditSuite(), get_backend("process"))
    return Workbench(
        RunFolder(path), settings, create_policy(shape), SHIPPED_TOKENIZER, renderer, world, RunProgress()
    )  # fmt: skip


def _writes(harness: Harness, word: str) -> ToolCall:
    shell = harness.info.shell
    if shell is None:
        return ToolCall("write_file", {"path": "answer.txt", "content": word})
    return shell.call(f"printf {word} > answer.txt")


def _capture(bench: Workbench, n: int) -> None:
    encode, labels = bench.renderer.encode_reply, bench.settings.mixture.labels
    under = [[labels[k % len(labels)]] for k in range(n)]
    specs = bench.specs(bench.world.suite.sample("train", n, seed=0), "demos", under=under)
    answers = {
        spec.id: [encode("", _writes(spec.harness, WORDS[k // len(labels) % 2])), encode("Done.")]
        for k, spec in enumerate(specs)
    }
    engine = ScriptedEngine(lambda request, turn: answers[request.rollout_id][turn])
    with bench.collector(engine, lambda k: specs, 1) as collector:
        batch = next(iter(collector))
    assert batch is not None and batch.shape[0] == n
    assert [r.status for r in collector.rollouts] == [Status.COMPLETED] * n
    assert sum(r.reward.passed for r in collector.rollouts if r.reward) == n // 2
    bench.folder.write_rollouts("demos-0000", collector.rollouts)
