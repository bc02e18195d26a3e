"""Draws the learning curves of several quickstart runs into one picture and prints their table.

python benchmarks/quickstart_curve.py runs/s0 runs/s1 runs/s2 --out docs/quickstart.svg
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from clawgym_env.store import RunFolder


def figures_of(folder: RunFolder) -> dict[str, Any]:
    """Held-out results, training curve and seconds of one run."""
    rows = folder.metrics()
    evals = {r["when"]: r for r in rows if r["stage"] == "eval"}
    steps = [r for r in rows if r["stage"] == "grpo"]
    return {
        "seed": folder.config["seed"],
        "before": evals["before"],
        "after": evals["after"],
        "steps": [r["step"] for r in steps],
        "pass": [100 * r["pass_at_1"] for r in steps],
        "validation": [(r["step"], 100 * r["validation"]) for r in steps if r.get("validation") is not None],
        "seconds": rows[-1]["elapsed_s"],
    }


def table(runs: list[dict[str, Any]]) -> str:
    """The results as Markdown."""
    lines = [
        "| seed | before: T=1 / greedy | after: T=1 / greedy | gain at T=1 | wall time |",
        "|---|---|---|---|---|",
    ]
    for run in runs:
        shown = [
            f"{100 * run[w]['sampled']['pass_at_1']:.1f}% / {100 * run[w]['greedy']['pass_at_1']:.1f}%"
            for w in ("before", "after")
        ]
        gain = 100 * (run["after"]["sampled"]["pass_at_1"] - run["before"]["sampled"]["pass_at_1"])
        minutes, seconds = divmod(round(run["seconds"]), 60)
        lines.append(
            f"| {run['seed']} | {shown[0]} | {shown[1]} | +{gain:.1f} points | {minutes} min {seconds:02d} s |"
        )
    return "\n".join(lines)


def draw(runs: list[dict[str, Any]], out: Path) -> None:
    """Pass@1 on training tasks by step, with the held-out values before and after."""
    figure = Figure(figsize=(7.2, 3.6), layout="constrained")
    axes = figure.subplots()
    for k, run in enumerate(runs):
        colour = f"C{k}"
        axes.plot(run["steps"], run["pass"], color=colour, alpha=0.45, lw=1.2)
        last = run["steps"][-1]
        held_out = [100 * run[w]["sampled"]["pass_at_1"] for w in ("before", "after")]
        low = [100 * run[w]["sampled"]["low"] for w in ("before", "after")]
        high = [100 * run[w]["sampled"]["high"] for w in ("before", "after")]
        spread = [
            [v - a for v, a in zip(held_out, low, strict=True)],
            [b - v for v, b in zip(held_out, high, strict=True)],
        ]
        at = [-0.2 + 0.15 * k, last + 1 + 0.15 * k]
        axes.errorbar(at, held_out, spread, color=colour, fmt="o", ms=5, capsize=3, label=f"seed {run['seed']}")
        axes.plot(at, held_out, color=colour, ls=":", lw=1)
    axes.set_xlabel("GRPO step (56 rollouts of pi each)")
    axes.set_ylabel("Pass@1 at T=1, %")
    axes.set_ylim(0, 100)
    axes.grid(alpha=0.25)
    axes.legend(title="points: held-out tasks, 95% interval\nlines: training tasks", fontsize=8, title_fontsize=8)
    figure.savefig(out, metadata={"Date": None})


def main() -> None:
    """Reads the runs, prints the table, draws the picture."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", nargs="+", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    runs = [figures_of(RunFolder.existing(path)) for path in arguments.runs]
    print(table(runs))
    draw(runs, arguments.out)


if __name__ == "__main__":
    main()
