"""What a run says of each of its harnesses.

Invariant: figures of a harness are those of its own rollouts; a harness that is held out is measured and never trained.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from clawgym_env.evaluation import PassRate, by_harness, wilson
from clawgym_env.store import StoredRollout
from clawgym_env.tree.ledger import Ledger, total


@dataclass(frozen=True, slots=True)
class Trained:
    """A harness over the steps of reinforcement learning.

    Attributes:
        reward: Mean over its scored rollouts in the first half of the steps that it was in, and in the second.
        kept: Captured tokens that no reason has dropped.
        gap: Mean over the steps of the mean log-prob gap, and the largest of all; ``None`` without an update.
        seconds: Mean wall time of a rollout.
    """

    steps: int
    rollouts: int
    reward: tuple[float | None, float | None]
    calls: float
    captured: int
    kept: int
    dropped: Mapping[str, int]
    unscored: Mapping[str, int]
    gap: tuple[float, float] | None
    seconds: float


@dataclass(frozen=True, slots=True)
class HarnessFigures:
    """One harness.

    Attributes:
        measured: (when, mode) -> Pass@1 on held-out tasks.
        trained: ``None`` where it was not trained under.
    """

    label: str
    held_out: bool
    measured: Mapping[tuple[str, str], PassRate]
    trained: Trained | None


def held_out_of(config: Mapping[str, Any]) -> set[str]:
    """Labels that a run only measures under."""
    return set(config.get("held_out") or ())


def figures_by_harness(
    config: Mapping[str, Any],
    evaluations: Mapping[tuple[str, str], Sequence[StoredRollout]],
    steps: Sequence[Mapping[str, Any]],
) -> list[HarnessFigures]:
    """Every harness of a run in the order in which they appear, those held out last."""
    measured: dict[str, dict[tuple[str, str], PassRate]] = {}
    for key, rollouts in evaluations.items():
        for label, own in by_harness(rollouts).items():
            scored = [r.reward.passed for r in own if r.reward is not None]
            measured.setdefault(label, {})[key] = wilson(sum(scored), len(scored))
    rows: dict[str, list[Mapping[str, Any]]] = {}
    for row in steps:
        for label, own_row in row.get("by_harness", {}).items():
            rows.setdefault(label, []).append(own_row)
    held_out = held_out_of(config)
    labels = sorted(dict.fromkeys([*measured, *rows]), key=lambda label: label in held_out)
    return [
        HarnessFigures(
            label, label in held_out, measured.get(label, {}), _trained(rows[label]) if label in rows else None
        )
        for label in labels
    ]


def _trained(rows: Sequence[Mapping[str, Any]]) -> Trained:
    ledger = total([Ledger.from_dict(dict(row)) for row in rows])
    rollouts = sum(row["rollouts"] for row in rows)
    unscored: Counter[str] = Counter()
    for row in rows:
        unscored.update(row["unscored"])
    gaps = [(row["log_prob_gap_mean"], row["log_prob_gap_max"]) for row in rows if "log_prob_gap_mean" in row]
    half = (len(rows) + 1) // 2
    return Trained(
        steps=len(rows),
        rollouts=rollouts,
        reward=(_reward(rows[:half]), _reward(rows[half:])),
        calls=sum(row["calls"] * row["rollouts"] for row in rows) / rollouts,
        captured=ledger.captured,
        kept=ledger.trained,
        dropped=dict(ledger.dropped.most_common()),
        unscored=dict(unscored),
        gap=(sum(mean for mean, _ in gaps) / len(gaps), max(most for _, most in gaps)) if gaps else None,
        seconds=sum(sum(row["seconds"].values()) * row["rollouts"] for row in rows) / rollouts,
    )


def _reward(rows: Sequence[Mapping[str, Any]]) -> float | None:
    told = [(row["reward"], row["rollouts"] - sum(row["unscored"].values())) for row in rows]
    scored = sum(n for reward, n in told if reward is not None)
    return sum(reward * n for reward, n in told if reward is not None) / scored if scored else None
