"""The whole path on a task small enough for a test: capture, fine-tune, reinforce, and go on after a kill.

The harness is the scripted agent in a process sandbox: a real program, real HTTP, real files. The task is a bandit: two
words can be written, one of them is right.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from clawgym_env.engines.scripted import ScriptedEngine
from clawgym_env.errors import TaskError
from clawgym_env.harnesses import get_harness
from clawgym_env.rendering import ChatRenderer
from clawgym_env.rendering_tokenizer import SHIPPED_TOKENIZER
from clawgym_env.sandboxes import get_backend
from clawgym_env.store import RunFolder
from clawgym_env.tasks.base import FreshSandbox, Snapshot, Split, Task
from clawgym_env.types import Reward, Status, ToolCall
from clawgym_env.world import World
from torchrl_ext.models import PolicyConfig, create_policy
from torchrl_ext.progress import RunProgress
from torchrl_ext.recipes.config import EvalStage, GRPOStage, RunSettings, SFTStage
from torchrl_ext.trainer import fine_tune, reinforce
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


@pytest.fixture(scope="module")
def imitated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run folder that was taken through capture and fine-tuning."""
    path = tmp_path_factory.mktemp("imitated")
    bench = workbench(path)
    _capture(bench, 24)
    fine_tune(bench, IMITATE, bench.folder, "demos")
    return path


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


def _reinforce(path: Path, steps: int, until: int) -> list[Mapping[str, float]]:
    """Trains to ``steps``; a run that is to stop ``until`` a step is interrupted right after that step's save."""
    bench = workbench(path)
    stage = GRPOStage(steps=steps, tasks=1, group=16, lr=5e-4, warmup=1, validate_every=100)
    if until < steps:
        stop = bench.progress

        class Stop(Exception):
            """The kill."""

        def line(text: str) -> None:
            if text.startswith(f"step {until}/"):
                raise Stop

        stop.line = line  # type: ignore[method-assign]
        with pytest.raises(Stop):
            reinforce(bench, stage, EvalStage(validation=0))
    else:
        reinforce(bench, stage, EvalStage(validation=0))
    return [row for row in bench.folder.metrics() if row["stage"] == "grpo"]


def _copy(source: Path, target: Path) -> Path:
    return Path(shutil.copytree(source, target))


def test_learns_and_resumes_to_the_same_result(imitated: Path, tmp_path: Path) -> None:
    whole = _reinforce(_copy(imitated, tmp_path / "whole"), 6, 6)
    assert [row["step"] for row in whole] == [1, 2, 3, 4, 5, 6]
    assert 0.2 < whole[0]["reward"] < 0.8, "imitation leaves both words likely"
    assert whole[-1]["reward"] > 0.9, "the rewarded word takes over"
    for row in whole:
        assert row["unscored"] == {}
        assert row["captured"] == row["trained"] + sum(row["dropped"].values())
        assert row.get("log_prob_gap_max", 0.0) < 1e-4, "trainer and engine agree"

    broken = _copy(imitated, tmp_path / "broken")
    _reinforce(broken, 6, 3)
    resumed = _reinforce(broken, 6, 6)
    assert [row["step"] for row in resumed] == [1, 2, 3, 4, 5, 6]
    for a, b in zip(whole, resumed, strict=True):
        assert a["reward"] == b["reward"]
        if "loss" in a:
            assert np.isclose(a["loss"], b["loss"], rtol=1e-3, atol=1e-6)


def test_a_resumed_fine_tuning_is_the_same(imitated: Path, tmp_path: Path) -> None:
    state = torch.load(imitated / "checkpoints" / "state.pt", weights_only=True)
    path = tmp_path / "again"
    bench = workbench(path)
    source = RunFolder(imitated)
    stage = IMITATE

    class Stop(Exception):
        """The kill."""

    def line(text: str) -> None:
        if text.startswith("fine-tuning 30/"):
            raise Stop

    bench.progress.line = line  # type: ignore[method-assign]
    with pytest.raises(Stop):
        fine_tune(bench, stage, source, "demos")
    again = workbench(path)
    fine_tune(again, stage, source, "demos")
    for name, value in again.model.state_dict().items():
        torch.testing.assert_close(value, state["model"][name], rtol=1e-4, atol=1e-5)
