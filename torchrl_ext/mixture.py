"""Which harness each rollout of a batch runs under.

Invariant: the choice follows from shares and a random generator alone, so that a batch is the same whether or not the
run was interrupted; over a batch the counts never differ from the shares by a whole instance.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

Grouping = Literal["task_harness", "task"]


@dataclass(frozen=True, slots=True)
class Curriculum:
    """Weighs harnesses by how much their groups have told lately.

    A group in which all rollouts got the same reward teaches nothing; a harness whose groups differ much is where the
    policy learns. The factor on a harness's weight is ``floor + (1 - floor) v / max v``, with v the mean variance of
    reward within its groups over the last ``window`` steps that it was in; one that was in none has the full factor.

    Attributes:
        window: Steps looked back at.
        floor: Least factor, in (0, 1]; 1 leaves the weights as they are.
    """

    window: int = 4
    floor: float = 0.25

    def factors(self, labels: Sequence[str], history: Sequence[Mapping[str, float]]) -> dict[str, float]:
        """Label -> factor on its weight.

        Args:
            history: A step each, oldest first: label -> mean variance of reward within its groups.
        """
        recent = {label: [step[label] for step in history if label in step][-self.window :] for label in labels}
        mean = {label: sum(seen) / len(seen) for label, seen in recent.items() if seen}
        most = max(mean.values(), default=0.0)
        if most <= 0.0:
            return dict.fromkeys(labels, 1.0)
        return {label: self.floor + (1 - self.floor) * mean.get(label, most) / most for label in labels}


@dataclass(frozen=True, slots=True)
class Mixture:
    """The harnesses of a run.

    Attributes:
        weights: Label of each harness that the policy is trained under -> weight > 0.
        held_out: Labels that it is only measured under -> weight among demonstrations.
        grouping: ``task_harness``: a group is a task under one harness. ``task``: a task under all of them.
        curriculum: ``None`` leaves the weights as they are.
    """

    weights: Mapping[str, float]
    held_out: Mapping[str, float]
    grouping: Grouping = "task_harness"
    curriculum: Curriculum | None = None

    @property
    def labels(self) -> list[str]:
        """All harnesses, those trained under first."""
        return [*self.weights, *self.held_out]

    def shares(self, history: Sequence[Mapping[str, float]] = ()) -> dict[str, float]:
        """Label -> weight after the curriculum, of those trained under."""
        if self.curriculum is None:
            return dict(self.weights)
        factors = self.curriculum.factors(list(self.weights), history)
        return {label: weight * factors[label] for label, weight in self.weights.items()}

    def group(self, task_id: str, label: str) -> str:
        """Name of the group that a rollout belongs to."""
        return f"{task_id}@{label}" if self.grouping == "task_harness" else task_id

    def assign(self, tasks: int, size: int, shares: Mapping[str, float], rng: random.Random) -> list[list[str]]:
        """Labels of a batch: for each task the harness of each of the ``size`` rollouts of its group."""
        if self.grouping == "task_harness":
            return [[label] * size for label in allot(tasks, shares, rng)]
        return [allot(size, shares, rng) for _ in range(tasks)]


def allot(n: int, shares: Mapping[str, float], rng: random.Random) -> list[str]:
    """``n`` labels in random order, each label's count its share of n rounded up or down (systematic sampling).

    Args:
        shares: Label -> weight > 0; only their ratios matter.
    """
    total, at = sum(shares.values()), rng.random()
    out: list[str] = []
    reached = 0.0
    for label, share in shares.items():
        reached += n * share / total
        while len(out) < n and at < reached:
            out.append(label)
            at += 1.0
    out += [label] * (n - len(out))  # rounding may keep the sum of the shares below n
    rng.shuffle(out)
    return out
