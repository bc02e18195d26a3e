"""Figures as a Markdown table."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any


def table(rows: Mapping[str, Any], cells: Callable[[Any], Mapping[str, Any]]) -> str:
    """One line a row; a missing figure is a dash."""
    values = {name: cells(row) for name, row in rows.items()}
    heads = list(dict.fromkeys(head for row in values.values() for head in row))
    lines = ["| | " + " | ".join(heads) + " |", "|---" * (len(heads) + 1) + "|"]
    for name, row in values.items():
        lines.append(f"| {name} | " + " | ".join(_cell(row.get(head)) for head in heads) + " |")
    return "\n".join(lines)


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, int | str):
        return f"{value:,}" if isinstance(value, int) else value
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
