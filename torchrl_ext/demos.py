"""Demonstrations: an imperfect demonstrator's answers, served through the harness and captured as any policy's."""

from __future__ import annotations

from clawgym_env.engines.scripted import ScriptedEngine
from clawgym_env.rollout import RolloutSpec
from clawgym_env.tasks.builtin.demonstrator import demonstrate
from clawgym_env.types import TokenArray, ToolCall
from torchrl_ext.recipes.config import DemosStage
from torchrl_ext.workbench import Workbench, derive_seed, rollout_metrics


def capture_demonstrations(bench: Workbench, stage: DemosStage) -> None:
    """Runs the imperfect demonstrator through the harness; batches already stored are not run again."""
    tasks = bench.tasks("train", stage.rollouts, "demos")
    specs = bench.specs(tasks, "demos")
    replies = {spec.id: _demonstration(bench, spec, stage.skill) for spec in specs}
    engine = ScriptedEngine(lambda request, turn: replies[request.rollout_id][turn])
    chunks = [specs[i : i + stage.batch] for i in range(0, len(specs), stage.batch)]
    done = set(bench.folder.batches())
    missing = [k for k in range(len(chunks)) if f"demos-{k:04d}" not in done]
    if not missing:
        return
    with bench.collector(engine, lambda k: chunks[missing[k]], len(missing)) as collector:
        bench.progress.begin("demonstrations", sum(len(chunks[k]) for k in missing))
        for k, _ in zip(missing, collector, strict=True):
            bench.folder.write_rollouts(f"demos-{k:04d}", collector.rollouts)
            bench.log("demos", {"step": k, **rollout_metrics(collector.rollouts)})
    stored = [r for k in range(len(chunks)) for r in bench.folder.rollouts(f"demos-{k:04d}")]
    right = sum(r.reward.passed for r in stored if r.reward is not None)
    harness = bench.settings.harness
    bench.progress.line(f"demonstrations: {len(stored)} rollouts captured under {harness}, {right} right")


def _demonstration(bench: Workbench, spec: RolloutSpec, skill: float) -> list[TokenArray]:
    shown = demonstrate(spec.task, derive_seed(bench.settings.seed, "demonstrator"), skill)
    encode = bench.renderer.encode_reply
    calls = [encode("", ToolCall("bash", {"command": command})) for command in shown.tool_commands]
    return [*calls, encode(shown.final_text)]
