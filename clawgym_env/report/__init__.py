"""What a run did, on one page: ``report.html``, and its learning curve as ``learning_curve.svg``.

Invariant: the page is one self-contained file (no script, no external asset), and everything that an agent, a model or
a task wrote is escaped.
"""

from __future__ import annotations

import base64
import math
from pathlib import Path
from typing import Any

import orjson
from jinja2 import Environment, FileSystemLoader, StrictUndefined

from clawgym_env import __version__
from clawgym_env.report.curve import draw_curve
from clawgym_env.report.summary import summarise
from clawgym_env.store import RunFolder, write_whole

__all__ = ["write_report"]

#: Shown for a figure that was not measured.
ABSENT = "–"


def write_report(folder: RunFolder) -> Path:
    """Writes ``report.html`` and, where something was trained and matplotlib is there, ``learning_curve.svg``.

    Works on whatever the folder holds: a finished run, one that was killed, an evaluation alone.

    Returns:
        The page.
    """
    summary = summarise(folder)
    picture, why_no_picture = None, ""
    try:
        picture = draw_curve(summary)
    except ImportError:
        why_no_picture = "The learning curve needs the extra 'train' (matplotlib): pip install 'clawgym[train]'"
    if picture is not None:
        write_whole(folder.path / "learning_curve.svg", picture)
    page = (
        _environment()
        .get_template("report.html.j2")
        .render(
            s=summary,
            picture=base64.b64encode(picture).decode() if picture is not None else None,
            why_no_picture=why_no_picture,
            config=orjson.dumps(dict(summary.config), option=orjson.OPT_INDENT_2).decode(),
            version=__version__,
        )
    )
    path = folder.path / "report.html"
    write_whole(path, page.encode("utf-8", "replace"))
    return path


def _environment() -> Environment:
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(percent=_percent, fixed=_fixed, small=_small, whole=_whole)
    return environment


def _percent(value: Any) -> str:
    return _written(value, lambda x: f"{100 * x:.1f}%")


def _fixed(value: Any, digits: int = 3) -> str:
    return _written(value, lambda x: f"{x:.{digits}f}")


def _small(value: Any) -> str:
    return _written(value, lambda x: f"{x:.1e}")


def _whole(value: Any) -> str:
    return _written(value, lambda x: f"{x:,.0f}")


def _written(value: Any, form: Any) -> str:
    """A number in a form; what is missing or NaN is shown as such."""
    if not isinstance(value, int | float) or not math.isfinite(value):
        return ABSENT
    return str(form(value))
