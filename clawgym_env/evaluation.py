"""Pass@1 of a policy under a harness, or under each of several, with its uncertainty."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import numpy as np

from clawgym_env.rollout import Rollout
from clawgym_env.types import Reward


class Judged(Protocol):
    """A rollout, live or read back."""

    @property
    def harness(self) -> str: ...

    @property
    def task_id(self) -> str: ...

    @property
    def reward(self) -> Reward | None: ...


J = TypeVar("J", bound=Judged)


@dataclass(frozen=True, slots=True)
class PassRate:
    """Share of scored rollouts that passed.

    Attributes:
        low: Lower end of the 95% Wilson interval; ``high``, its upper end.
    """

    passed: int
    scored: int
    low: float
    high: float

    @property
    def rate(self) -> float:
        """Pass@1 in [0, 1]; NaN without a scored rollout."""
        return self.passed / self.scored if self.scored else math.nan

    def __str__(self) -> str:
        if not self.scored:
            return "no scored rollout"
        return f"{100 * self.rate:.1f}% [{100 * self.low:.1f}, {100 * self.high:.1f}] ({self.passed}/{self.scored})"


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Pass@1 over all tasks and by family, and what could not be scored.

    Attributes:
        unscored: Status -> rollouts that count neither way.
    """

    overall: PassRate
    by_family: dict[str, PassRate]
    unscored: dict[str, int]
    calls: float

    def as_dict(self) -> dict[str, Any]:
        """JSON-like form for metrics."""
        return {
            "pass_at_1": self.overall.rate,
            "low": self.overall.low,
            "high": self.overall.high,
            "passed": self.overall.passed,
            "scored": self.overall.scored,
            "by_family": {k: v.rate for k, v in self.by_family.items()},
            "unscored": self.unscored,
            "calls": self.calls,
        }


def wilson(passed: int, scored: int, z: float = 1.959964) -> PassRate:
    """Pass rate with the Wilson score interval (Wilson 1927), which behaves at 0% and 100%.

    (p + z²/2n ± z √(p(1-p)/n + z²/4n²)) / (1 + z²/n)
    """
    if scored == 0:
        return PassRate(0, 0, 0.0, 1.0)
    p, n = passed / scored, float(scored)
    centre = p + z * z / (2 * n)
    half = z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    scale = 1 + z * z / n
    low, high = (centre - half) / scale, (centre + half) / scale
    return PassRate(passed, scored, max(0.0, min(p, low)), min(1.0, max(p, high)))  # rounding may not exclude p itself


def by_harness(rollouts: Sequence[J]) -> dict[str, list[J]]:
    """Label of a harness -> its rollouts, in the order in which labels appear."""
    found: dict[str, list[J]] = {}
    for rollout in rollouts:
        found.setdefault(rollout.harness, []).append(rollout)
    return found


def passes_by_task(rollouts: Sequence[Judged]) -> dict[str, list[bool]]:
    """Task -> whether each of its scored rollouts passed; tasks without one are left out."""
    found: dict[str, list[bool]] = {}
    for rollout in rollouts:
        if rollout.reward is not None:
            found.setdefault(rollout.task_id, []).append(rollout.reward.passed)
    return found


def bootstrap(clusters: Sequence[Sequence[bool]], *, draws: int = 10_000, seed: int = 0) -> tuple[float, float]:
    """95% percentile interval of a pass rate, over clusters drawn with replacement (Efron 1979).

    Rollouts of one task are not independent, so whole tasks are drawn. Where all passed, or none did, the interval has
    no width; :func:`wilson` tells the uncertainty there.

    Args:
        clusters: For each task, its outcomes.

    Returns:
        Lower and upper end in [0, 1]; the whole of it without an outcome.
    """
    told = [outcomes for outcomes in clusters if outcomes]
    if not told:
        return 0.0, 1.0
    passed, count = (np.array([f(outcomes) for outcomes in told]) for f in (sum, len))
    size = len(told)
    drawn = np.random.default_rng(seed).multinomial(size, np.full(size, 1 / size), size=draws)
    low, high = np.quantile((drawn @ passed) / (drawn @ count), (0.025, 0.975))
    return float(low), float(high)


def evaluate(rollouts: Sequence[Rollout]) -> Evaluation:
    """Summarises rollouts; unscored ones take no part."""
    passed: dict[str, int] = defaultdict(int)
    scored: dict[str, int] = defaultdict(int)
    for rollout in rollouts:
        if rollout.reward is not None:
            scored[rollout.family] += 1
            passed[rollout.family] += rollout.reward.passed
    return Evaluation(
        overall=wilson(sum(passed.values()), sum(scored.values())),
        by_family={f: wilson(passed[f], scored[f]) for f in sorted(scored)},
        unscored=dict(Counter(str(r.status) for r in rollouts if r.reward is None)),
        calls=sum(len(r.records) for r in rollouts) / max(1, len(rollouts)),
    )
