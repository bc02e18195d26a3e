"""Demonstrations: an imperfect demonstrator's answers, served through harnesses and captured as any policy's.

Invariant: what is demonstrated depends on the task alone; how it is said is the harness's (``HarnessInfo.shell``).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from clawgym_env.engines.base import EngineRequest
from clawgym_env.engines.scripted import ScriptedEngine
from clawgym_env.errors import ConfigError
from clawgym_env.evaluation import by_harness
from clawgym_env.harnesses.base import Harness, Shell
from clawgym_env.rendering import ChatRenderer
from clawgym_env.rollout import Rollout, RolloutSpec
from clawgym_env.tasks.base import Task
from clawgym_env.tasks.builtin.demonstrator import demonstrate
from clawgym_env.types import Message, TokenArray
from torchrl_ext.metrics import rollout_metrics
from torchrl_ext.mixture import allot
from torchrl_ext.recipes.stages import DemosStage, MixDemosStage
from torchrl_ext.workbench import Workbench, derive_seed


def capture_demonstrations(bench: Workbench, stage: DemosStage) -> None:
    """Runs the demonstrator through the harnesses; batches already stored are not run again.

    Raises:
        ConfigError: a harness has no tool that runs commands, or none of the name that it says.
    """
    specs = _plan(bench, stage)
    chunks = [specs[i : i + stage.batch] for i in range(0, len(specs), stage.batch)]
    done = set(bench.folder.batches())
    missing = [k for k in range(len(chunks)) if f"demos-{k:04d}" not in done]
    if not missing:
        return
    shells = {spec.id: shell_of(spec.harness) for spec in specs}
    seed = derive_seed(bench.settings.seed, "demonstrator")
    answers = {spec.id: demonstration(spec.task, shells[spec.id], seed, stage.skill) for spec in specs}
    engine = ScriptedEngine(Demonstrator(bench.renderer, shells, answers), max_context=bench.settings.max_context)
    with bench.collector(engine, lambda k: chunks[missing[k]], len(missing)) as collector:
        bench.progress.begin("demonstrations", sum(len(chunks[k]) for k in missing))
        for k, _ in zip(missing, collector, strict=True):
            _check_tools(collector.rollouts, shells)
            bench.folder.write_rollouts(f"demos-{k:04d}", collector.rollouts)
            bench.log("demos", {"step": k, **rollout_metrics(collector.rollouts)})
    stored = [r for k in range(len(chunks)) for r in bench.folder.rollouts(f"demos-{k:04d}")]
    for label, own in by_harness(stored).items():
        right = sum(r.reward.passed for r in own if r.reward is not None)
        bench.progress.line(f"demonstrations: {len(own)} rollouts captured under {label}, {right} right")


def _plan(bench: Workbench, stage: DemosStage) -> list[RolloutSpec]:
    tasks, mixture = bench.tasks("train", stage.rollouts, "demos"), bench.settings.mixture
    shares = dict(mixture.weights)
    if isinstance(stage, MixDemosStage) and stage.held_out:
        shares |= mixture.held_out
    labels = allot(len(tasks), shares, bench.random("harnesses", "demos"))
    return bench.specs(tasks, "demos", under=[[label] for label in labels])


def shell_of(harness: Harness) -> Shell:
    """How a harness is worked through.

    Raises:
        ConfigError: it has no tool that runs commands.
    """
    shell = harness.info.shell
    if shell is None:
        name = harness.info.name
        raise ConfigError(f"harness {name!r} has no tool that runs commands: tasks cannot be demonstrated under it")
    return shell


def demonstration(task: Task, shell: Shell, seed: int, skill: float) -> list[Message]:
    """What a demonstrator says in turn."""
    shown = demonstrate(task, seed, skill)
    calls = [Message("assistant", tool_calls=(shell.call(command),)) for command in shown.tool_commands]
    return [*calls, shell.last(shown.final_text)]


class Demonstrator:
    """The script of demonstrations: each answer in turn, the last one for ever.

    A request that offers no tool (a title, a summary) gets words and counts for no turn.

    Args:
        answers: Rollout -> what is said in it.
    """

    def __init__(
        self, renderer: ChatRenderer, shells: Mapping[str, Shell], answers: Mapping[str, Sequence[Message]]
    ) -> None:
        self._renderer, self._shells, self._answers = renderer, shells, answers
        self._turns: Counter[str] = Counter()

    def __call__(self, request: EngineRequest, turn: int) -> TokenArray:
        rollout = request.rollout_id
        if self._shells[rollout].tool not in {tool.name for tool in request.chat.tools}:
            return self._renderer.encode_reply("Done.")
        answers = self._answers[rollout]
        said = answers[min(self._turns[rollout], len(answers) - 1)]
        self._turns[rollout] += 1
        return self._renderer.encode_reply(said.content, *said.tool_calls)


def _check_tools(rollouts: Sequence[Rollout], shells: Mapping[str, Shell]) -> None:
    """Refuses a harness that never offered the tool that it is said to have."""
    for label, own in by_harness(rollouts).items():
        offered = {tool for rollout in own for record in rollout.records for tool in record.tools}
        wanted = shells[own[0].id].tool
        if offered and wanted not in offered:
            there_are = ", ".join(sorted(offered))
            raise ConfigError(f"harness {label!r} offers {there_are}, and no {wanted!r} as its HarnessInfo.shell says")
