"""Held-out Pass@1 of the policy in the making, under every harness of the run."""

from __future__ import annotations

import time
from typing import Any

from clawgym_env.evaluation import by_harness, evaluate
from clawgym_env.types import Sampling
from torchrl_ext.recipes.stages import EvalStage
from torchrl_ext.workbench import Workbench


def measure(bench: Workbench, stage: EvalStage, when: str) -> None:
    """Held-out Pass@1, at temperature 1 and greedy, once a run and ``when``; the same tasks under each harness.

    Harnesses that are held out have figures of their own and no part in the whole.
    """
    done = any(r["stage"] == "eval" and r["when"] == when for r in bench.folder.metrics())
    if done or max(stage.test, stage.greedy) == 0:
        return
    mixture, tasks = bench.settings.mixture, bench.tasks("test", max(stage.test, stage.greedy), "test")
    began = time.monotonic()
    row: dict[str, Any] = {"when": when}
    said = []
    with bench.engine() as engine, bench.collector(engine) as collector:
        for mode, temperature, n in (("sampled", 1.0, stage.test), ("greedy", 0.0, stage.greedy)):
            if n == 0:
                continue
            bench.progress.begin(f"held-out tasks {when}, {mode}", n * len(mixture.labels))
            sampling = Sampling(temperature=temperature, max_tokens=bench.settings.max_tokens)
            specs = bench.specs(tasks[:n], f"eval-{when}-{mode}", under=[mixture.labels] * n)
            rollouts = collector.run(specs, sampling)
            bench.folder.write_rollouts(f"eval-{when}-{mode}", rollouts)
            each = by_harness(rollouts)
            trained = evaluate([r for label in mixture.weights for r in each.get(label, ())])
            row[mode] = {**trained.as_dict(), "by_harness": {k: evaluate(own).as_dict() for k, own in each.items()}}
            said.append(f"{mode} {trained.overall}")
            if len(each) > 1:
                said += [f"{label} {evaluate(own).overall.rate:.0%}" for label, own in each.items()]
    bench.log("eval", {**row, "seconds": time.monotonic() - began})
    bench.progress.line(f"[bold]held-out Pass@1 {when}: {'; '.join(said)}[/bold]")
