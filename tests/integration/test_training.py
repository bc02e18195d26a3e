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
from torchrl_ext.recipes.stages import EvalStage, GRPOStage
from torchrl_ext.trainer import fine_tune, reinforce


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
