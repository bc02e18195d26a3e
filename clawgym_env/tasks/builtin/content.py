"""Seeded file contents: tables, logs, configurations, prose and opaque files.

Invariant: contents depend on nothing but the arguments and the stream, and are small (5 to 15 lines).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from clawgym_env.tasks.builtin import words

Row = dict[str, str]
#: A log entry: time, level, service, message.
Entry = tuple[str, str, str, str]
T = TypeVar("T")

_OPAQUE_HEADS = {"png": b"\x89PNG\r\n\x1a\n", "jpg": b"\xff\xd8\xff\xe0\x00\x10JFIF\x00"}


def until(accept: Callable[[T], bool], make: Callable[[], T]) -> T:
    """The first made thing that is accepted: contents in which the right and the plausible wrong answer differ."""
    for _ in range(1000):
        made = make()
        if accept(made):
            return made
    raise AssertionError("no acceptable content in 1000 draws; the family's content is too narrow")


def number(rng: random.Random, column: str) -> str:
    """A positive cell value in the manner of a column; small enough for awk's six digits when summed."""
    if column in ("price", "cost"):
        return f"{rng.randint(200, 9900) / 100:.2f}"
    if column in ("tax", "weight"):
        return f"{rng.randint(11, 399) / 10:.1f}"
    return str(rng.randint(2, 98))


def date(rng: random.Random) -> str:
    """A day of 2024 as ISO text."""
    return f"2024-{rng.randint(1, 12):02d}-{rng.randint(1, 28):02d}"


def rows(rng: random.Random, n: int, choices: Mapping[str, Sequence[str]]) -> list[Row]:
    """``n`` records with an id, a date, the given text columns and every numeric column."""
    out = []
    for index in range(n):
        row = {"id": str(101 + index), "date": date(rng)}
        row |= {name: rng.choice(values) for name, values in choices.items()}
        row |= {column: number(rng, column) for column in words.COLUMNS}
        out.append(row)
    return out


def table(records: Sequence[Row], columns: Sequence[str]) -> bytes:
    """Records as CSV with a header line."""
    lines = [",".join(columns), *(",".join(row[column] for column in columns) for row in records)]
    return ("\n".join(lines) + "\n").encode()


def plain_table(rng: random.Random) -> tuple[list[Row], bytes]:
    """A level-1 table: id, date, then the numeric columns in their fixed places."""
    records = rows(rng, rng.randint(6, 14), {})
    return records, table(records, ["id", "date", *words.COLUMNS])


def prose(rng: random.Random, n: int) -> list[str]:
    """``n`` lines of filler prose."""
    return [" ".join(rng.choice(words.FILLER) for _ in range(rng.randint(5, 10))) + "." for _ in range(n)]


def log_lines(rng: random.Random, n: int, services: Sequence[str] = ()) -> list[Entry]:
    """``n`` entries in order of time."""
    second = rng.randint(0, 3600)
    out = []
    for _ in range(n):
        second += rng.randint(1, 900)
        clock = f"2024-05-{3 + second // 86400:02d} {second // 3600 % 24:02d}:{second // 60 % 60:02d}:{second % 60:02d}"
        service = rng.choice(services) if services else ""
        out.append((clock, rng.choice(words.LOG_LEVELS), service, rng.choice(words.LOG_MESSAGES)))
    return out


def joined(lines: Sequence[str]) -> bytes:
    """Lines as a UTF-8 file."""
    return ("\n".join(lines) + "\n").encode()


def opaque(rng: random.Random, extension: str) -> bytes:
    """Content in the manner of an extension; no two draws are the same in practice."""
    if extension in _OPAQUE_HEADS:
        return _OPAQUE_HEADS[extension] + rng.randbytes(24)
    stamp = rng.getrandbits(32)
    if extension == "json":
        return f'{{"id": {stamp}, "name": "{rng.choice(words.STEMS)}"}}\n'.encode()
    if extension == "csv":
        return table(rows(rng, 5, {}), ["id", "date", "price"])
    if extension == "py":
        return f"VALUE = {stamp}\n\nprint(VALUE)\n".encode()
    return joined([f"entry {stamp}", *prose(rng, 4)])


def stems(rng: random.Random, n: int) -> list[str]:
    """``n`` different file stems."""
    return rng.sample(words.STEMS, n)
