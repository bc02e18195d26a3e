"""The whole path on a bandit: capture, fine-tune, reinforce, and go on after a kill."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
import torch

from clawgym_env.store import RunFolder
from tests.bandit import IMITATE, imitate, workbench
from torchrl_ext.recipes.stages import CriticSettings, EvalStage, GRPOStage, PPOStage, ValueStage
from torchrl_ext.trainer import fine_tune, pretrain_critic, reinforce
from torchrl_ext.updates import CriticLearner, GRPOUpdate, PPOUpdate, ValueUpdate
from torchrl_ext.workbench import Workbench


@pytest.fixture(scope="module")
def imitated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run folder whose policy writes either word."""
    path = tmp_path_factory.mktemp("imitated")
    imitate(path)
    return path


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
            reinforce(bench, GRPOUpdate(bench.model, stage), EvalStage(validation=0))
    else:
        reinforce(bench, GRPOUpdate(bench.model, stage), EvalStage(validation=0))
    return [row for row in bench.folder.metrics() if row["stage"] == "grpo"]


def _copy(source: Path, target: Path) -> Path:
    return Path(shutil.copytree(source, target))


def test_learns_and_resumes_to_the_same_result(imitated: Path, tmp_path: Path) -> None:
    whole = _reinforce(_copy(imitated, tmp_path / "whole"), 6, 6)
    assert [row["step"] for row in whole] == [1, 2, 3, 4, 5, 6]
    assert 0.2 < whole[0]["reward"] < 0.8, "imitation leaves both words likely"
    assert max(row["reward"] for row in whole[2:]) > whole[0]["reward"] + 0.3, "the rewarded word takes over"
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


def _with_critic(path: Path, *, kill_at: str = "") -> tuple[Workbench, PPOUpdate]:
    """The critic's pretraining and tree PPO, or as much of them as comes before a kill."""
    bench = workbench(path)
    fine_tune(bench, IMITATE, bench.folder, "demos")  # done: the policy is where the last save left it
    stage = PPOStage(steps=4, tasks=1, group=16, lr=5e-4, warmup=1, validate_every=100, negative_weight=1.0)
    learner = CriticLearner(bench.model, CriticSettings(optimiser="muon", lr=3e-3), stage)
    update = PPOUpdate(bench.model, stage, learner)

    class Stop(Exception):
        """The kill."""

    def line(text: str) -> None:
        if kill_at and text.startswith(kill_at):
            raise Stop

    bench.progress.line = line  # type: ignore[method-assign]
    try:
        pretrain_critic(bench, ValueUpdate(ValueStage(steps=2, tasks=1, group=16, epochs=24), learner))
        reinforce(bench, update, EvalStage(validation=0))
    except Stop:
        assert kill_at
    return bench, update


def test_ppo_learns_with_its_critic_and_resumes_to_the_same_weights(imitated: Path, tmp_path: Path) -> None:
    bench, update = _with_critic(_copy(imitated, tmp_path / "whole"))
    rows = [row for row in bench.folder.metrics() if row["stage"] in ("value", "ppo")]
    assert [(row["stage"], row["step"]) for row in rows] == [
        ("value", 1), ("value", 2), ("ppo", 1), ("ppo", 2), ("ppo", 3), ("ppo", 4),
    ]  # fmt: skip
    critic, whole = rows[:2], rows[2:]
    assert critic[0]["value_mean"] == 0.0 and critic[1]["loss_critic"] < critic[0]["loss_critic"]
    assert critic[1]["reward"] < 0.8 and max(row["reward"] for row in whole[1:]) > whole[0]["reward"] + 0.2
    assert all(row["trained_rollouts"] == row["rollouts"] for row in rows), "every rollout teaches the critic"
    assert whole[0]["explained_variance"] > 0.1, "the critic tells the words apart on rollouts that it has not seen"
    assert all(row["log_prob_gap_max"] < 1e-4 for row in whole), "trainer and engine agree"

    broken = _copy(imitated, tmp_path / "broken")
    _with_critic(broken, kill_at="critic step 1/")
    _with_critic(broken, kill_at="step 2/")
    again, resumed = _with_critic(broken)
    told = [row for row in again.folder.metrics() if row["stage"] in ("value", "ppo")]
    assert [(row["stage"], row["step"], row["reward"]) for row in told] == [
        (row["stage"], row["step"], row["reward"]) for row in rows
    ]
    for one, other in ((bench.model, again.model), (update.learner.critic, resumed.learner.critic)):
        for name, value in one.state_dict().items():
            torch.testing.assert_close(other.state_dict()[name], value, rtol=1e-3, atol=5e-5, msg=name)


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
