"""The collector as a TorchRL user meets it: real rollouts of a real policy, in stock buffers and under stock losses."""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path

import pytest
import torch
from torchrl.data import LazyStackStorage, ReplayBuffer, SamplerWithoutReplacement
from torchrl.objectives.llm import GRPOLoss, MCAdvantage

from clawgym_env.engines.scripted import ScriptedEngine
from clawgym_env.rollout import RolloutSpec
from clawgym_env.types import Status
from tests.bandit import imitate, workbench
from tests.stock import scorer
from torchrl_ext.collector import TreeCollector
from torchrl_ext.data import rows_of, to_training_batch
from torchrl_ext.estimators import TreeGroupAdvantage
from torchrl_ext.losses import TreeGRPOLoss
from torchrl_ext.workbench import Workbench

GROUP = 8


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Workbench:
    return imitate(tmp_path_factory.mktemp("imitated"))


def plan(bench: Workbench, batch: int) -> list[RolloutSpec]:
    return bench.specs(bench.world.suite.sample("train", 1, seed=0), f"batch{batch}", group=GROUP)


def test_yields_trees_whose_group_trains_our_loss(bench: Workbench) -> None:
    with bench.engine() as engine, bench.collector(engine, lambda k: plan(bench, k), 2) as collector:
        assert (collector.policy_version, engine.policy_version) == (0, 0)
        collector.increment_version()
        batches = list(collector)
        assert collector.state_dict() == OrderedDict(batch=2)
    assert [b.shape for b in batches if b is not None] == [(GROUP,), (GROUP,)]
    batch = TreeGroupAdvantage().inv(batches[0])
    assert {td["query"] for td in batch.unbind(0)} == {"bandit/0@scripted"}
    assert all(int(td["next", "policy_version"]) == 1 for td in batch.unbind(0))
    assert abs(sum(float(td["advantage"]) for td in batch.unbind(0))) < 1e-4
    out = TreeGRPOLoss(bench.model)(to_training_batch(batch))
    assert float(out.log_prob_gap_max) < 1e-4
    assert torch.isfinite(out.loss_objective)


def test_the_stock_inner_loop_runs_on_its_rows(bench: Workbench) -> None:
    """As TorchRL's GRPO scripts do it: the collector fills the buffer, the loop samples and steps."""
    buffer = ReplayBuffer(
        storage=LazyStackStorage(64),
        sampler=SamplerWithoutReplacement(),
        batch_size=8,
        transform=MCAdvantage(grpo_size=GROUP, prompt_key="query", trajectory_return="sum"),
    )
    with bench.engine() as engine:
        collector = TreeCollector(
            engine,
            bench.renderer,
            bench.world.backend,
            lambda k: plan(bench, k),
            total_batches=1,
            replay_buffer=buffer,
            postproc=rows_of,
        )
        assert list(collector) == [None]
        collector.shutdown()
    assert len(buffer) >= GROUP
    loss_module = GRPOLoss(scorer(bench.model), masking_strategy="sft", entropy_bonus=False)
    optimizer = torch.optim.SGD(bench.model.parameters(), lr=1e-3)
    for _ in range(2):
        loss = loss_module(buffer.sample())
        assert abs(float(loss.kl_approx)) < 1e-2, "rows hold the log-probs of the policy that sampled them"
        loss.loss_objective.backward()
        optimizer.step()
        optimizer.zero_grad()


def test_a_failed_rollout_is_never_a_zero(tmp_path: Path) -> None:
    def fails(request: object, turn: int) -> object:
        raise RuntimeError("no weights")

    bench = workbench(tmp_path)
    with bench.collector(ScriptedEngine(fails), lambda k: plan(bench, k)[:2], 1) as collector:  # type: ignore[arg-type]
        (batch,) = list(collector)
    assert batch is not None
    assert [r.status for r in collector.rollouts] == [Status.ENGINE_ERROR] * 2
    assert torch.isnan(torch.stack([td["next", "reward"] for td in batch.unbind(0)])).all()
    assert not any(bool(td["next", "scored"]) for td in batch.unbind(0))
    with pytest.raises(ValueError, match="nothing to make rows of"):
        rows_of(batch)


def test_only_the_embedded_engine_shares_weights(bench: Workbench) -> None:
    engine = ScriptedEngine(lambda request, turn: bench.renderer.encode_reply("x"))
    with bench.collector(engine) as collector, pytest.raises(TypeError, match="embedded"):
        collector.increment_version()
