"""Outcome checks on a snapshot, shared by the verifiers of all families.

Invariant: a check is total. Whatever bytes the agent left, it returns a number and never raises, because a strange
workspace is the policy's doing and scores low; only a fault of the verifier itself is a `VerifierError`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

from clawgym_env.errors import SandboxError, VerifierError
from clawgym_env.sandboxes.base import ExecResult
from clawgym_env.tasks.base import FreshSandbox, Snapshot, Verifier
from clawgym_env.types import Reward

#: Judges a snapshot without running anything.
Judge: TypeAlias = Callable[[Snapshot], Reward]

#: Seconds that a script under test may run.
SCRIPT_TIMEOUT_S = 20.0
#: Longest answer, in bytes, that is parsed at all.
MAX_ANSWER_BYTES = 1 << 16

_NUMBER = re.compile(r"[+-]?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d*)?(?:[eE][+-]?\d{1,3})?", re.ASCII)


def verdict(goals: Mapping[str, float], kept: float) -> Reward:
    """Turns partial scores into a reward.

    score = kept · mean(goals): what had to stay multiplies what was achieved, so doing nothing scores 0.

    Args:
        goals: Named achievements, each in [0, 1].
        kept: Share in [0, 1] of what had to stay and did.

    Returns:
        The reward; passed only when every part is 1.
    """
    parts = {**goals, "kept": kept}
    short = [name for name, value in parts.items() if value < 1.0]
    score = kept * sum(goals.values()) / len(goals)
    note = "all parts hold" if not short else "not reached: " + ", ".join(short)
    return Reward(score=score, passed=not short, parts=parts, note=note)


def pure(judge: Judge) -> Verifier:
    """A verifier that only looks at the snapshot and runs nothing."""

    async def verify(snapshot: Snapshot, fresh: FreshSandbox) -> Reward:
        return judge(snapshot)

    return verify


def share(hits: Iterable[bool]) -> float:
    """Share of true values; 1 for none."""
    values = list(hits)
    return sum(values) / len(values) if values else 1.0


def kept_share(snapshot: Snapshot, files: Mapping[str, bytes], changed: Iterable[str] = ()) -> float:
    """Share of the starting files, other than the changed ones, that are there byte for byte."""
    free = set(changed)
    return share(snapshot.get(path) == data for path, data in files.items() if path not in free)


def text_of(snapshot: Snapshot, path: str) -> str | None:
    """A short UTF-8 file as text, or ``None``."""
    data = snapshot.get(path)
    if data is None or len(data) > MAX_ANSWER_BYTES:
        return None
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError:
        return None


def number_in(text: str | None) -> float | None:
    """The number that a text consists of, thousands separators and exponents understood; else ``None``."""
    stripped = (text or "").strip()
    if len(stripped) > 64 or not _NUMBER.fullmatch(stripped):
        return None
    return float(stripped.replace(",", ""))


def number_is(text: str | None, expected: float, *, tolerance: float = 0.006) -> bool:
    """Whether a text is the expected number; the tolerance lets two decimals pass for an exact value."""
    value = number_in(text)
    return value is not None and abs(value - expected) <= tolerance


def json_of(snapshot: Snapshot, path: str) -> Any:
    """A JSON file's value, or ``None``."""
    text = text_of(snapshot, path)
    try:
        return None if text is None else json.loads(text)
    except (ValueError, RecursionError):
        return None


def json_is(value: Any, expected: Any) -> bool:
    """Equality of JSON values: key order is free, 3 equals 3.0, a number never equals a boolean or a string."""
    if isinstance(expected, Mapping):
        return (
            isinstance(value, Mapping)
            and value.keys() == expected.keys()
            and all(json_is(value[key], expected[key]) for key in expected)
        )
    if isinstance(expected, int):
        return isinstance(value, int | float) and not isinstance(value, bool) and value == expected
    return type(value) is type(expected) and bool(value == expected)


def lines_of(text: str | None) -> list[str]:
    """The non-empty lines of a text, without outer blanks."""
    return [line.strip() for line in (text or "").splitlines() if line.strip()]


def cells_of(text: str | None) -> list[list[str]]:
    """The non-empty lines of a comma-separated text, cells without outer blanks."""
    return [[cell.strip() for cell in line.split(",")] for line in lines_of(text)]


def pairs_goals(found: Sequence[Sequence[str]], expected: Mapping[str, float]) -> dict[str, float]:
    """Partial scores of rows (name, number) that should be ``expected``, in its order.

    Returns:
        ``rows``: share of the expected rows that are there; ``exact``: 1 when there are no others and the order holds.
    """
    values = {row[0]: row[1] for row in found if len(row) == 2}
    rows = share(number_is(values.get(name), number) for name, number in expected.items())
    exact = rows == 1.0 and [row[0] for row in found] == list(expected)
    return {"rows": rows, "exact": float(exact)}


async def run_script(fresh: FreshSandbox, files: Snapshot, script: str, output: str = "") -> ExecResult:
    """Runs ``bash script`` in a fresh sandbox that holds ``files``.

    Args:
        fresh: Opens the sandbox.
        files: Its workspace.
        script: Path of the script.
        output: File that the script writes; empty when it prints.

    Returns:
        The run's result; with ``output``, its stdout is that file's content.

    Raises:
        VerifierError: the sandbox failed; what the script does is never an error.
    """
    try:
        async with fresh(files) as sandbox:
            result = await sandbox.exec(["bash", script], timeout_s=SCRIPT_TIMEOUT_S)
            if output and result.rc == 0 and not result.timed_out:
                return await sandbox.exec(["cat", output], timeout_s=SCRIPT_TIMEOUT_S)
            return result
    except SandboxError as error:
        raise VerifierError(f"the script {script} could not be run: {error}") from error
