"""The suite of generated tasks, which needs no download, no network and no fixture.

Invariant: a task is a function of its id. The index of an id names a slot combination of the split and a variant; the
id seeds all else, so `get` makes the identical task on any machine, and a combination is in one split only.

Ids look like ``builtin/<family>/<level>/<split>/<index, five digits>``.
"""

from __future__ import annotations

import functools
import random
import re
from collections.abc import Iterator, Sequence
from typing import cast

from clawgym_env.errors import TaskError
from clawgym_env.tasks.base import Split, Task
from clawgym_env.tasks.builtin import aggregate, config, count, folder, logs, rename, script
from clawgym_env.tasks.builtin.family import SPLIT_SHARES, Family, Instance, Slots, digest, split_of

FAMILIES: dict[str, Family] = {
    module.FAMILY.name: module.FAMILY for module in (aggregate, rename, logs, config, script, folder, count)
}

#: Number of ids of one (family, level, split).
IDS = 100_000

_ID = re.compile(r"builtin/([a-z]+)/([1-9])/([a-z]+)/([0-9]{5})")


@functools.cache
def combinations(family: str, level: int, split: Split) -> tuple[Slots, ...]:
    """Slot combinations of a split, in the order that ids count them."""
    space = FAMILIES[family].levels[level - 1].combinations()
    return tuple(slots for slots in space if split_of(family, level, slots) == split)


def parse_id(task_id: str) -> tuple[str, int, Split, int]:
    """Family, level, split and index of an id.

    Raises:
        TaskError: the id names no task of this suite.
    """
    match = _ID.fullmatch(task_id)
    family = FAMILIES.get(match[1]) if match else None
    if match is None or family is None or int(match[2]) > len(family.levels) or match[3] not in SPLIT_SHARES:
        raise TaskError(
            f"no task {task_id!r}: ids look like builtin/<family>/<level>/<split>/<five digits>, for example "
            f"builtin/csv/1/train/00017, with families {', '.join(FAMILIES)}, levels 1 to 3 and splits "
            f"{', '.join(SPLIT_SHARES)}"
        )
    return match[1], int(match[2]), cast(Split, match[3]), int(match[4])


def slots_of(task_id: str) -> Slots:
    """Slot combination of an id."""
    family, level, split, index = parse_id(task_id)
    pool = combinations(family, level, split)
    return pool[index % len(pool)]


def instance_of(task_id: str) -> Instance:
    """The generated instance behind an id, with what `Task` does not show: the family's structural mistakes."""
    family, level, _, _ = parse_id(task_id)
    return FAMILIES[family].levels[level - 1].build(slots_of(task_id), random.Random(digest(task_id)))


def make_task(task_id: str) -> Task:
    """The task of an id.

    Raises:
        TaskError: the id names no task of this suite.
    """
    family, level, split, _ = parse_id(task_id)
    instance = instance_of(task_id)
    return Task(
        id=task_id,
        suite="builtin",
        family=family,
        instruction=instance.instruction,
        files=instance.files,
        verify=instance.verify,
        oracle=instance.oracle,
        metadata={"level": level, "split": split, "slots": dict(slots_of(task_id))},
    )


def _ids(family: str, level: int, split: Split, seed: int) -> Iterator[str]:
    """Different ids of one family and split: every slot combination once a round, in a seeded order and variant."""
    size = len(combinations(family, level, split))
    rng = random.Random(digest("ids", family, str(level), split, str(seed)))
    order = rng.sample(range(size), size)
    variants = [(IDS - 1 - place) // size + 1 for place in range(size)]
    first = [rng.randrange(count) for count in variants]
    for turn in range(min(variants)):
        for place in order:
            variant = (first[place] + turn) % variants[place]
            yield f"builtin/{family}/{level}/{split}/{place + size * variant:05d}"


class BuiltinSuite:
    """Generated shell tasks of one difficulty.

    Args:
        level: 1 (one short command), 2 (several conditions or steps) or 3 (several files and steps).

    Raises:
        TaskError: there is no such level.
    """

    def __init__(self, level: int = 1):
        if level not in (1, 2, 3):
            raise TaskError(f"the builtin suite has levels 1, 2 and 3, not {level!r}")
        self.level = level

    @property
    def name(self) -> str:
        """``builtin``."""
        return "builtin"

    @property
    def families(self) -> Sequence[str]:
        """Names of all families."""
        return tuple(FAMILIES)

    def sample(self, split: Split, n: int, *, seed: int, families: Sequence[str] | None = None) -> list[Task]:
        """``n`` different tasks of a split, the same for the same seed, families in balance.

        A smaller ``n`` gives a prefix of a larger one. A slot combination comes back only after all others of its
        family and split have come.

        Raises:
            TaskError: unknown split or family, or more tasks than there are ids.
        """
        chosen = tuple(dict.fromkeys(self.families if families is None else families))
        known = split in SPLIT_SHARES and set(chosen) <= set(FAMILIES)
        if not known or not chosen or not 0 <= n <= IDS // 2 * len(chosen):
            raise TaskError(
                f"cannot sample {n} tasks of split {split!r} from families {chosen}: splits are "
                f"{', '.join(SPLIT_SHARES)}; families are {', '.join(FAMILIES)}; n is at most {IDS // 2} a family"
            )
        rng = random.Random(digest("order", split, str(self.level), str(seed)))
        order: list[str] = []
        while len(order) < n:
            order += rng.sample(chosen, len(chosen))
        streams = {name: _ids(name, self.level, split, seed) for name in chosen}
        return [make_task(next(streams[name])) for name in order[:n]]

    def get(self, task_id: str) -> Task:
        """The task of that id, of any level.

        Raises:
            TaskError: there is no such task; the message says what ids look like.
        """
        return make_task(task_id)
