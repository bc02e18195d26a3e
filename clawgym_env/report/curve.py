"""The learning curve as an SVG picture, drawn by matplotlib without a display and without its global state.

Invariant: the same rows give the same bytes. Points are drawn as measured; nothing is smoothed.
"""

from __future__ import annotations

import io
import math
from typing import Any

from clawgym_env.report.summary import RunSummary

_REWARD, _PASS, _VALIDATION, _HELD_OUT, _CRITIC = "#7a8b99", "#1f6feb", "#b35900", "#1a7f37", "#8250df"
_STYLE: Any = {"svg.hashsalt": "clawgym", "svg.fonttype": "path", "font.size": 9.0}


def draw_curve(summary: RunSummary) -> bytes | None:
    """The picture; ``None`` where nothing was trained.

    Raises:
        ImportError: matplotlib is not installed.
    """
    panels = [draw for draw, rows in ((_draw_sft, summary.sft), (_draw_steps, summary.steps)) if rows]
    if not panels:
        return None
    import matplotlib
    from matplotlib.figure import Figure

    out = io.BytesIO()
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(4.6 * len(panels) if len(panels) > 1 else 6.4, 3.4), layout="constrained")
        for draw, axes in zip(panels, figure.subplots(1, len(panels), squeeze=False)[0], strict=True):
            draw(axes, summary)
            axes.grid(alpha=0.25)
            axes.spines[["top", "right"]].set_visible(False)
        figure.savefig(out, format="svg", metadata={"Date": None})
    return out.getvalue()


def _draw_sft(axes: Any, summary: RunSummary) -> None:
    axes.plot(*_points(summary.sft, "loss"), color=_PASS, marker=".")
    axes.set(title="supervised fine-tuning", xlabel="step", ylabel="loss (nats a token)")
    axes.set_ylim(bottom=0)


def _draw_steps(axes: Any, summary: RunSummary) -> None:
    rows = summary.steps
    axes.plot(*_points(rows, "reward"), color=_REWARD, marker=".", label="reward (training tasks)")
    axes.plot(*_points(rows, "pass_at_1"), color=_PASS, marker=".", label="Pass@1 (training tasks)")
    axes.plot(*_points(rows, "validation"), color=_VALIDATION, marker="D", ls="--", label="Pass@1 (validation)")
    if summary.explained_variance is not None:
        axes.plot(*_points(rows, "explained_variance"), color=_CRITIC, marker=".", label="explained variance (critic)")
    place = {"before": 0.0, "after": rows[-1]["step"] + 1.0}
    aside = 0.015 * place["after"]  # so that the intervals of two modes do not cover each other
    for k, (mode, marker) in enumerate(zip(summary.modes, "os", strict=False)):
        found = [m for m in summary.measurements if m.mode == mode and m.when in place and m.overall.scored]
        if found:
            rates = [m.overall for m in found]
            spread = [[r.rate - r.low for r in rates], [r.high - r.rate for r in rates]]
            face = "white" if marker == "s" else _HELD_OUT
            axes.errorbar(
                [place[m.when] + k * aside for m in found], [r.rate for r in rates], yerr=spread, fmt=marker,
                color=_HELD_OUT, mfc=face, capsize=3, label=f"Pass@1 (held out, {mode})",
            )  # fmt: skip
    axes.set(title=summary.algorithm, xlabel="step", ylim=(-0.02, 1.02))
    axes.legend(fontsize=7, framealpha=0.6)


def _points(rows: Any, key: str) -> tuple[list[int], list[float]]:
    """Steps and values where there is one."""
    found = [(row["step"], float(row[key])) for row in rows if row.get(key) is not None]
    found = [(step, value) for step, value in found if math.isfinite(value)]
    return [step for step, _ in found], [value for _, value in found]
