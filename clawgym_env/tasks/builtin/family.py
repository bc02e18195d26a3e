"""What a family of generated tasks is: slot spaces for three levels and a builder for each.

Invariant: everything about an instance follows from its slots and its random stream, so an id is enough to make the
same instance again anywhere. The split of an instance depends on its slots alone, so that no combination of slots is
ever in two splits.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from clawgym_env.tasks.base import Split, Verifier

#: One value for every slot of a level.
Slots: TypeAlias = Mapping[str, str]
#: Shell commands, in order.
Commands: TypeAlias = tuple[str, ...]

#: Percentage of a level's slot combinations that each split gets.
SPLIT_SHARES: Mapping[Split, int] = {"train": 60, "validation": 15, "test": 25}


@dataclass(frozen=True, slots=True, eq=False)
class Instance:
    """One generated problem, before it gets an id.

    Attributes:
        instruction: What the agent is told.
        files: Relative workspace path -> content at the start.
        oracle: Commands that solve it.
        mistakes: Two command sequences that are wrong in structure while their slots are right.
        verify: Judges the workspace afterwards.
    """

    instruction: str
    files: Mapping[str, bytes]
    oracle: Commands
    mistakes: tuple[Commands, Commands]
    verify: Verifier


def _any(slots: Slots) -> bool:
    return True


@dataclass(frozen=True, slots=True)
class Level:
    """One difficulty of a family.

    Attributes:
        space: Slot name -> the words it can take.
        build: Makes the instance of a slot combination; draws all else from the stream it is given.
        allowed: Says which combinations of the space make sense.
    """

    space: Mapping[str, Sequence[str]]
    build: Callable[[Slots, random.Random], Instance]
    allowed: Callable[[Slots], bool] = _any

    def combinations(self) -> list[Slots]:
        """Every allowed slot combination, in the order of the space."""
        rows = itertools.product(*self.space.values())
        return [slots for slots in (dict(zip(self.space, row, strict=True)) for row in rows) if self.allowed(slots)]


@dataclass(frozen=True, slots=True)
class Family:
    """A kind of task; ``levels[0]`` is level 1."""

    name: str
    levels: tuple[Level, ...]


def digest(*parts: str) -> int:
    """A 64-bit number from text, the same on every machine and in every process."""
    return int.from_bytes(hashlib.sha256("\x1f".join(parts).encode()).digest()[:8], "big")


def split_of(family: str, level: int, slots: Slots) -> Split:
    """The split that a slot combination belongs to."""
    point = digest(family, str(level), json.dumps(dict(slots), sort_keys=True)) % 100
    for split, share in SPLIT_SHARES.items():
        if point < share:
            return split
        point -= share
    raise AssertionError("split shares add up to 100")
