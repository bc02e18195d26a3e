"""Held-out Pass@1 of the policy in the making."""

from __future__ import annotations

import time

from clawgym_env.evaluation import Evaluation, evaluate
from clawgym_env.types import Sampling
from torchrl_ext.recipes.config import EvalStage
from torchrl_ext.workbench import Workbench


def measure(bench: Workbench, stage: EvalStage, when: str) -> None:
    """Held-out Pass@1, at temperature 1 and greedy, once a run and ``when``."""
    done = any(r["stage"] == "eval" and r["when"] == when for r in bench.folder.metrics())
    if done or max(stage.test, stage.greedy) == 0:
        return
    tasks = bench.tasks("test", max(stage.test, stage.greedy), "test")
    began = time.monotonic()
    results: dict[str, Evaluation] = {}
    with bench.engine() as engine, bench.collector(engine) as collector:
        for mode, temperature, n in (("sampled", 1.0, stage.test), ("greedy", 0.0, stage.greedy)):
            if n == 0:
                continue
            bench.progress.begin(f"held-out tasks {when}, {mode}", n)
            sampling = Sampling(temperature=temperature, max_tokens=bench.settings.max_tokens)
            rollouts = collector.run(bench.specs(tasks[:n], f"eval-{when}-{mode}"), sampling)
            bench.folder.write_rollouts(f"eval-{when}-{mode}", rollouts)
            results[mode] = evaluate(rollouts)
    row = {"when": when, "seconds": time.monotonic() - began, **{m: e.as_dict() for m, e in results.items()}}
    bench.log("eval", row)
    said = "; ".join(f"{mode} {e.overall}" for mode, e in results.items())
    bench.progress.line(f"[bold]held-out Pass@1 {when}: {said}[/bold]")
