"""One policy under two harnesses at once, on a bandit: learnt in both, measured in a third, the same after a kill."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from clawgym_env.evaluation import by_harness
from clawgym_env.report.summary import summarise
from tests.bandit import MIXED, imitate, workbench
from torchrl_ext.measure import measure
from torchrl_ext.recipes.config import MixConfig
from torchrl_ext.recipes.stages import CurriculumSettings, EvalStage, GRPOStage
from torchrl_ext.trainer import reinforce
from torchrl_ext.updates import GRPOUpdate

STAGE = GRPOStage(steps=4, tasks=4, group=8, lr=5e-4, warmup=1, validate_every=100)
NONE = EvalStage(validation=0)
CURRICULUM = CurriculumSettings(kind="variance", window=2, floor=0.5)


@pytest.fixture(scope="module")
def imitated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run folder whose policy writes either word under each harness."""
    path = tmp_path_factory.mktemp("imitated")
    imitate(path, MixConfig(**MIXED))
    return path


def test_learns_under_both_at_once_and_never_sees_the_third(imitated: Path, tmp_path: Path) -> None:
    settings = MixConfig(**MIXED, curriculum=CURRICULUM)
    path = Path(shutil.copytree(imitated, tmp_path / "whole"))
    bench = workbench(path, settings)
    bench.folder.write_config({"recipe": "mix", **settings.model_dump(mode="json")})
    reinforce(bench, GRPOUpdate(bench.model, STAGE), NONE)
    rows = [row for row in bench.folder.metrics() if row["stage"] == "grpo"]
    for row in rows:
        each = row["by_harness"]
        assert set(each) == {"scripted", "shell"} and row["unscored"] == {}
        assert sum(own["rollouts"] for own in each.values()) == row["rollouts"] == 32
        assert sum(own["trained"] for own in each.values()) == row["trained"]
        assert all(own.get("log_prob_gap_max", 0.0) < 1e-4 for own in each.values()), "trainer and engine agree"
    for label in ("scripted", "shell"):
        own = [row["by_harness"][label]["reward"] for row in rows]
        assert own[0] < 0.8 and max(own[1:]) > own[0] + 0.2, (label, own)

    measure(bench, EvalStage(test=6, greedy=0), "after")
    (said,) = [row for row in bench.folder.metrics() if row["stage"] == "eval"]
    each = said["sampled"]["by_harness"]
    assert {label: own["scored"] for label, own in each.items()} == {"scripted": 6, "shell": 6, "twin": 6}
    assert said["sampled"]["scored"] == 12, "what is held out has no part in the whole"
    stored = by_harness(list(bench.folder.rollouts("eval-after-sampled")))
    assert [r.task_id for r in stored["twin"]] == [r.task_id for r in stored["shell"]]
    shown = {h.label: (h.held_out, h.trained is not None) for h in summarise(bench.folder).harnesses}
    assert shown == {"scripted": (False, True), "shell": (False, True), "twin": (True, False)}

    broken = Path(shutil.copytree(imitated, tmp_path / "broken"))
    first = workbench(broken, settings)

    class Stop(Exception):
        """The kill."""

    def line(text: str) -> None:
        if text.startswith("step 2/"):
            raise Stop

    first.progress.line = line  # type: ignore[method-assign]
    with pytest.raises(Stop):
        reinforce(first, GRPOUpdate(first.model, STAGE), NONE)
    again = workbench(broken, settings)
    reinforce(again, GRPOUpdate(again.model, STAGE), NONE)
    resumed = [row for row in again.folder.metrics() if row["stage"] == "grpo"]
    assert [row["reward"] for row in resumed] == [row["reward"] for row in rows]
    for name in ("grpo-0002", "grpo-0003"):
        groups = [[r.group for r in folder.rollouts(name)] for folder in (bench.folder, again.folder)]
        assert groups[0] == groups[1], "the curriculum chose the same"


def test_groups_across_harnesses_share_a_baseline(imitated: Path, tmp_path: Path) -> None:
    bench = workbench(Path(shutil.copytree(imitated, tmp_path / "across")), MixConfig(**MIXED, grouping="task"))
    reinforce(bench, GRPOUpdate(bench.model, GRPOStage(steps=1, tasks=2, group=4, validate_every=9)), NONE)
    rollouts = list(bench.folder.rollouts("grpo-0000"))
    assert {r.group for r in rollouts} == {"bandit/0", "bandit/1"}
    for task in ("bandit/0", "bandit/1"):
        labels = [r.harness for r in rollouts if r.group == task]
        assert sorted(labels) == ["scripted", "scripted", "shell", "shell"]
