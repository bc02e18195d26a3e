"""Trains one policy under each harness alone and one under all of them, and measures every policy under every harness.

    python benchmarks/harness_matrix.py --out runs/matrix

All policies of a seed begin from one base policy, which imitates demonstrations under every harness, the held-out ones
included; reinforcement learning sees the harnesses of its row alone. Each cell is a run folder below ``--out``: what is
there is not run again, and a training that was stopped goes on from its last step. Demonstrations are captured once
and serve all seeds. Writes ``matrix.json``, ``matrix.md`` and ``matrix.svg``.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # read when torch is imported: harnesses want the cores

import matplotlib
import numpy as np
from matplotlib.figure import Figure

from clawgym_env import measuring
from clawgym_env.evaluation import bootstrap, evaluate, passes_by_task
from clawgym_env.store import RunFolder, write_whole
from clawgym_env.world import limits_of
from torchrl_ext.progress import RunProgress
from torchrl_ext.recipes import run as recipes
from torchrl_ext.recipes.config import MixConfig, build

BASE, MIX = "base", "mix"


@dataclass(frozen=True)
class Matrix:
    """What is trained and measured.

    Attributes:
        overrides: Settings of every training, as on the command line.
        tasks: Test tasks of a cell, the same in all of them.
        held_out_tasks: The first so many of them under harnesses that are held out.
    """

    harnesses: tuple[str, ...]
    held_out: tuple[str, ...]
    seeds: tuple[int, ...]
    tasks: int
    held_out_tasks: int
    overrides: tuple[str, ...]

    @property
    def tested(self) -> tuple[str, ...]:
        """Columns."""
        return (*self.harnesses, *self.held_out)

    @property
    def policies(self) -> tuple[str, ...]:
        """Rows."""
        return (BASE, *self.harnesses, MIX)

    def settings(self, policy: str, seed: int, base: Path) -> MixConfig:
        """How a policy is made."""
        own = ["eval.test=0", "eval.greedy=0", "eval.validation=0"]
        if policy == BASE:
            own += ["grpo.steps=0", f"held_out={','.join(self.held_out) or 'none'}"]
            trained, used = self.harnesses, self.tested
        else:
            own += [f"model={base}", "demos.rollouts=0", "sft.steps=0", "held_out=none"]
            trained = used = self.harnesses if policy == MIX else (policy,)
        named = {item.partition("=")[0] for item in own}
        given = [item for item in self.overrides if item.partition("=")[0] not in named and _concerns(item, used)]
        whole = [f"seed={seed}", f"harnesses={','.join(trained)}", *own, *given]
        settings = build("mix", whole)
        assert isinstance(settings, MixConfig)
        return settings

    def plan(self, label: str) -> measuring.Plan:
        """How a policy is measured under a harness."""
        s, n = self.settings(BASE, 0, Path()), self.held_out_tasks if label in self.held_out else self.tasks
        return measuring.Plan(
            {label: s.programs[label]}, s.suite, s.level, "test", n, 0, s.temperature, s.max_tokens,
            s.max_calls, s.timeout_s, s.sandbox, s.concurrency,
            limits=limits_of(s.limits, s.timeout_s),
        )  # fmt: skip


def _concerns(override: str, labels: Sequence[str]) -> bool:
    """Whether a setting is of these harnesses, or of none in particular."""
    key, _, rest = override.partition(".")
    return key != "per_harness" or rest.partition(".")[0] in labels


class Cells:
    """The folders of a matrix.

    Args:
        say: Told what is done.
    """

    def __init__(self, matrix: Matrix, out: Path, say: Callable[[str], None]) -> None:
        self.matrix, self.out, self.say = matrix, out, say

    def policy(self, policy: str, seed: int) -> Path:
        """A training's folder."""
        return self.out / f"train-{policy}-s{seed}"

    def evaluation(self, policy: str, label: str, seed: int) -> Path:
        """A measurement's folder."""
        return self.out / f"eval-{policy}-{label}-s{seed}"

    def make(self) -> None:
        """Runs what is missing."""
        for seed in self.matrix.seeds:
            for policy in self.matrix.policies:
                self._train(policy, seed)
                self._measure(policy, seed)

    def _train(self, policy: str, seed: int) -> None:
        path, base = self.policy(policy, seed), self.policy(BASE, seed)
        if (path / "policy" / "config.json").is_file():
            return
        began, progress = time.monotonic(), RunProgress()
        if (path / "config.json").is_file():
            recipes.resume(path, progress)
        else:
            if policy == BASE:
                self._share_demonstrations(path)
            recipes.train("mix", self.matrix.settings(policy, seed, base), path, progress)
        self._note(path.name, began)

    def _share_demonstrations(self, path: Path) -> None:
        """Those of the first seed; a batch that is stored is not run again."""
        source = self.policy(BASE, self.matrix.seeds[0])
        (path / "rollouts").mkdir(parents=True, exist_ok=True)
        if source != path:
            for file in (source / "rollouts").glob("demos-*"):
                shutil.copyfile(file, path / "rollouts" / file.name)

    def _measure(self, policy: str, seed: int) -> None:
        for label in self.matrix.tested:
            path = self.evaluation(policy, label, seed)
            if (path / "config.json").is_file():
                continue
            began, plan = time.monotonic(), self.matrix.plan(label)
            opened = recipes.open_model(str(self.policy(policy, seed)))
            rollouts = asyncio.run(measuring.run(plan, *opened, on_done=lambda done: None))
            measuring.store(path, plan, rollouts)
            self._note(f"{path.name}: {evaluate(rollouts).overall}", began)

    def _note(self, what: str, began: float) -> None:
        seconds = time.monotonic() - began
        self.say(f"{what} ({seconds:.0f} s)")
        with (self.out / "seconds.jsonl").open("a") as out:
            out.write(json.dumps({"cell": what.partition(":")[0], "seconds": round(seconds, 1)}) + "\n")


def summarise(cells: Cells) -> dict[str, Any]:
    """Every cell's figures, and what its policy gained over the base."""
    matrix = cells.matrix
    passes = {
        (policy, label): [_passes(cells.evaluation(policy, label, seed)) for seed in matrix.seeds]
        for policy in matrix.policies
        for label in matrix.tested
    }
    return {
        **asdict(matrix),
        "rows": {
            policy: {label: _cell(passes[policy, label], passes[BASE, label]) for label in matrix.tested}
            for policy in matrix.policies
        },
        "seconds": _seconds(cells.out / "seconds.jsonl"),
    }


def _passes(path: Path) -> dict[str, list[bool]]:
    return passes_by_task(list(RunFolder.existing(path).rollouts("eval")))


def _cell(seeds: Sequence[dict[str, list[bool]]], base: Sequence[dict[str, list[bool]]]) -> dict[str, Any]:
    """A cell over its seeds. All of them were tried on the same tasks, so that a task is drawn with all its seeds."""
    rates = [float(np.mean([p for outcomes in seed.values() for p in outcomes])) for seed in seeds if seed]
    low, high = bootstrap([[p for seed in seeds for p in seed.get(task, ())] for task in _tasks(seeds)])
    gain, gain_low, gain_high = _gain(seeds, base)
    return {
        "pass_at_1": statistics.fmean(rates) if rates else None,
        "low": low,
        "high": high,
        "seeds": rates,
        "sd": statistics.stdev(rates) if len(rates) > 1 else None,
        "scored": sum(len(outcomes) for seed in seeds for outcomes in seed.values()),
        "gain": gain,
        "gain_low": gain_low,
        "gain_high": gain_high,
    }


def _tasks(seeds: Sequence[dict[str, list[bool]]]) -> list[str]:
    return sorted({task for seed in seeds for task in seed})


def _gain(
    seeds: Sequence[dict[str, list[bool]]], base: Sequence[dict[str, list[bool]]], draws: int = 10_000
) -> tuple[float, float, float]:
    """Mean difference to the base over tasks that both were scored on, paired by task, with its bootstrap interval."""
    both = [task for task in _tasks(seeds) if task in _tasks(base)]
    if not both:
        return float("nan"), -1.0, 1.0
    mean = [np.array([np.mean([p for s in x for p in s.get(task, ())]) for task in both]) for x in (seeds, base)]
    difference = mean[0] - mean[1]
    drawn = np.random.default_rng(0).integers(len(both), size=(draws, len(both)))
    low, high = np.quantile(difference[drawn].mean(axis=1), (0.025, 0.975))
    return float(difference.mean()), float(low), float(high)


def _seconds(path: Path) -> dict[str, float]:
    """Seconds of each cell, all of its tries together."""
    out: dict[str, float] = {}
    for line in path.read_text().splitlines() if path.is_file() else ():
        row = json.loads(line)
        out[row["cell"]] = out.get(row["cell"], 0.0) + row["seconds"]
    return out


def table(summary: dict[str, Any]) -> str:
    """The matrix as Markdown, and how to read it."""
    held_out = set(summary["held_out"])
    heads = [f"{label} (held out)" if label in held_out else label for label in _columns(summary)]
    lines = ["| trained under | " + " | ".join(heads) + " |", "|---" * (len(heads) + 1) + "|"]
    for policy, row in summary["rows"].items():
        lines.append(f"| {policy} | " + " | ".join(_shown(row[label], policy) for label in _columns(summary)) + " |")
    tasks = f"{summary['tasks']} test tasks (held-out harnesses: {summary['held_out_tasks']})"
    legend = (
        f"Pass@1 in percent at temperature 1 on {tasks}, mean of {len(summary['seeds'])} seeds; [95% bootstrap over "
        "tasks, a task drawn with all its seeds]; ± standard deviation over seeds; Δ gain over the base policy in "
        "points [95% paired bootstrap over tasks]. The base policy has imitated demonstrations under every harness of "
        "the table, those held out included; reinforcement learning saw those of its row alone "
        f"({MIX}: {', '.join(summary['harnesses'])})."
    )
    return "\n".join([*lines, "", legend]) + "\n"


def _columns(summary: dict[str, Any]) -> list[str]:
    return [*summary["harnesses"], *summary["held_out"]]


def _shown(cell: dict[str, Any], policy: str) -> str:
    if cell["pass_at_1"] is None:
        return "-"
    spread = f" ± {100 * cell['sd']:.1f}" if cell["sd"] is not None else ""
    text = f"{100 * cell['pass_at_1']:.1f} [{100 * cell['low']:.0f}, {100 * cell['high']:.0f}]{spread}"
    if policy == BASE:
        return text
    return f"{text}, Δ {100 * cell['gain']:+.1f} [{100 * cell['gain_low']:+.0f}, {100 * cell['gain_high']:+.0f}]"


def draw(summary: dict[str, Any], out: Path) -> None:
    """Columns of the table side by side, a mark for each policy; the same figures give the same bytes."""
    columns, rows = _columns(summary), summary["rows"]
    figure = Figure(figsize=(1.6 + 1.5 * len(columns), 3.8), layout="constrained")
    axes = figure.subplots()
    for k, (policy, row) in enumerate(rows.items()):
        aside = 0.72 * ((k + 0.5) / len(rows) - 0.5)
        colour = {BASE: "#7a8b99", MIX: "#111111"}.get(policy, f"C{k}")
        shown = [(i, row[label]) for i, label in enumerate(columns) if row[label]["pass_at_1"] is not None]
        at = [i + aside for i, _ in shown]
        rate = [100 * cell["pass_at_1"] for _, cell in shown]
        spread = [[100 * abs(cell["pass_at_1"] - cell[end]) for _, cell in shown] for end in ("low", "high")]
        marker = {BASE: "x", MIX: "D"}.get(policy, "o")
        axes.errorbar(at, rate, spread, color=colour, fmt=marker, ms=5, capsize=2, label=policy)
        for place, (_, cell) in zip(at, shown, strict=True):
            axes.plot(
                [place] * len(cell["seeds"]), [100 * r for r in cell["seeds"]], ".", color=colour, ms=3, alpha=0.5
            )
    held_out = set(summary["held_out"])
    axes.set_xticks(range(len(columns)), [f"{c}\n(held out)" if c in held_out else c for c in columns])
    for i in range(1, len(columns)):
        axes.axvline(i - 0.5, color="#d1d9e0", lw=0.8)
    axes.set(ylabel="Pass@1 at T=1, %", xlabel="measured under", ylim=(0, 100), xlim=(-0.5, len(columns) - 0.5))
    axes.grid(alpha=0.25, axis="y")
    title = "trained under\n(bars: 95% over tasks,\ndots: seeds)"
    axes.legend(title=title, fontsize=8, title_fontsize=8, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    with matplotlib.rc_context({"svg.hashsalt": "clawgym"}):
        figure.savefig(out, metadata={"Date": None})


def arguments() -> argparse.Namespace:
    """What the command line says."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("overrides", nargs="*", help="settings of every training, as of clawgym train mix: key=value")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--harnesses", default="pi,claude-code,codex,mini-swe-agent")
    parser.add_argument("--held-out", default="openclaw", help="names, or none")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--tasks", type=int, default=28, help="test tasks of a cell")
    parser.add_argument("--held-out-tasks", type=int, default=14, help="the same under harnesses that are held out")
    return parser.parse_args()


#: Settings of the trainings, unless the command line says otherwise: 15 trainings and their measurements in two hours.
DEFAULTS = ("grpo.steps=8", "grpo.tasks=10", "grpo.group=4", "per_harness.openclaw.weight=0.5")


def _overrides(given: Sequence[str], tested: Sequence[str]) -> Iterator[str]:
    named = {item.partition("=")[0] for item in given}
    yield from (item for item in DEFAULTS if item.partition("=")[0] not in named and _concerns(item, tested))
    yield from given


def main() -> None:
    """Makes what is missing, then writes the results."""
    options = arguments()
    harnesses = tuple(options.harnesses.split(","))
    held_out = () if options.held_out == "none" else tuple(options.held_out.split(","))
    overrides = tuple(_overrides(options.overrides, (*harnesses, *held_out)))
    matrix = Matrix(harnesses, held_out, tuple(options.seeds), options.tasks, options.held_out_tasks, overrides)
    options.out.mkdir(parents=True, exist_ok=True)
    plan, wanted = options.out / "plan.json", json.loads(json.dumps(asdict(matrix)))
    if plan.is_file() and json.loads(plan.read_text()) | {"seeds": 0} != wanted | {"seeds": 0}:
        raise SystemExit(f"{options.out} holds a matrix with other settings ({plan}): name another --out")
    write_whole(plan, json.dumps(wanted, indent=1).encode())
    cells = Cells(matrix, options.out, lambda text: print(text, flush=True))
    cells.make()
    summary = summarise(cells)
    write_whole(options.out / "matrix.json", json.dumps(summary, indent=1).encode())
    write_whole(options.out / "matrix.md", table(summary).encode())
    draw(summary, options.out / "matrix.svg")
    print(table(summary))


if __name__ == "__main__":
    main()
