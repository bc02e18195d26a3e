"""What a run folder says, gathered for people.

Invariant: nothing is estimated or filled in. Whatever is missing (a killed run, an evaluation alone) stays out; Pass@1
counts scored rollouts only, and rates and their counts come from the same stored rollouts.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from clawgym_env.evaluation import PassRate, wilson
from clawgym_env.report.examples import Example, pick_examples
from clawgym_env.report.harnesses import HarnessFigures, figures_by_harness, held_out_of
from clawgym_env.store import RunFolder, StoredRollout
from clawgym_env.tree.ledger import Ledger, total

#: Stages of ``metrics.jsonl`` in the order of a run, and what a person calls them.
STAGES: Mapping[str, str] = {
    "demos": "demonstrations",
    "sft": "supervised fine-tuning",
    "value": "critic pretraining",
    "grpo": "tree GRPO",
    "ppo": "tree PPO",
    "eval": "held-out evaluation",
}
#: Those that improve the policy; a run goes through one of them.
_IMPROVING = ("grpo", "ppo")
#: Those whose rollouts ``metrics.jsonl`` adds up.
_LOGGED = ("demos", "value", *_IMPROVING)
_EVAL_BATCH = re.compile(r"eval-(before|after)-(sampled|greedy)")
_MODES = {"sampled": "sampled, T = 1", "greedy": "greedy, T = 0"}


@dataclass(frozen=True, slots=True)
class Measurement:
    """Pass@1 of one evaluation.

    Attributes:
        when: ``before``, ``after`` or ``measured`` (an evaluation alone).
        mode: How answers were drawn.
    """

    when: str
    mode: str
    overall: PassRate
    by_family: Mapping[str, PassRate]


@dataclass(frozen=True, slots=True)
class Account:
    """Tokens of one stage's rollouts.

    Attributes:
        kept: Captured tokens that no reason has dropped; 0 for an evaluation, whose tokens never train.
        unique_tokens: Token-nodes of the prefix trees; ``total_tokens``, prompt and answer tokens over all calls.
    """

    stage: str
    rollouts: int
    calls: int
    captured: int
    kept: int
    dropped: Mapping[str, int]
    aborted: int
    notes: Mapping[str, int]
    unique_tokens: int
    total_tokens: int

    @property
    def unique_share(self) -> float | None:
        """unique/total; ``None`` without tokens."""
        return self.unique_tokens / self.total_tokens if self.total_tokens else None


@dataclass(frozen=True, slots=True)
class Unscored:
    """Rollouts of one stage that ended with one unscored status; ``detail`` is that of the first, where known."""

    stage: str
    status: str
    rollouts: int
    detail: str


@dataclass(frozen=True, slots=True)
class RunSummary:
    """Everything that the report shows.

    Attributes:
        measurements: Over the harnesses that the run trains under.
        finished: Whether the run came to its end.
        algorithm: What improved the policy: ``tree GRPO`` or ``tree PPO``.
        steps: Its rows of ``metrics.jsonl``, one a step; ``value`` likewise of the critic's pretraining, ``sft`` one a
            save.
        seconds: Part of the run -> wall seconds.
        rollout_seconds: Phase of a rollout -> mean wall seconds over the evaluations' rollouts.
        harnesses: Each harness by itself.
    """

    name: str
    recipe: str
    finished: bool
    config: Mapping[str, Any]
    measurements: Sequence[Measurement]
    sft: Sequence[Mapping[str, Any]]
    value: Sequence[Mapping[str, Any]]
    algorithm: str
    steps: Sequence[Mapping[str, Any]]
    accounts: Sequence[Account]
    unscored: Sequence[Unscored]
    seconds: Mapping[str, float]
    rollout_seconds: Mapping[str, float]
    examples: Sequence[Example]
    harnesses: Sequence[HarnessFigures]

    def measured(self, when: str, mode: str) -> Measurement | None:
        """That evaluation, where it was made."""
        return next((m for m in self.measurements if (m.when, m.mode) == (when, mode)), None)

    @property
    def harness_names(self) -> str:
        """The harnesses that the settings name."""
        named = self.config.get("harnesses") or [self.config.get("harness", "–")]
        return ", ".join(map(str, named))

    @property
    def log_prob_gap(self) -> tuple[float, float] | None:
        """Mean over the steps of the mean |log π_old − log μ|, and the largest of all; ``None`` without an update."""
        means = [row["log_prob_gap_mean"] for row in self.steps if row.get("log_prob_gap_mean") is not None]
        largest = [row["log_prob_gap_max"] for row in self.steps if row.get("log_prob_gap_max") is not None]
        return (sum(means) / len(means), max(largest)) if means and largest else None

    @property
    def explained_variance(self) -> tuple[float, float] | None:
        """Of the critic on rollouts that it has not seen, at the first and at the last step; ``None`` without one."""
        found = [row["explained_variance"] for row in self.steps if row.get("explained_variance") is not None]
        return (found[0], found[-1]) if found else None

    @property
    def modes(self) -> list[str]:
        """Ways of drawing answers that were measured, in order."""
        return list(dict.fromkeys(m.mode for m in self.measurements))

    @property
    def whens(self) -> list[str]:
        """Times of measurement, in order."""
        return list(dict.fromkeys(m.when for m in self.measurements))

    @property
    def families(self) -> list[str]:
        """Families that were measured."""
        return sorted({family for m in self.measurements for family in m.by_family})


def summarise(folder: RunFolder) -> RunSummary:
    """Reads a run folder."""
    config = folder.config
    recipe = str(config.get("recipe", "unknown"))
    rows = folder.metrics()
    by_stage = {stage: [row for row in rows if row.get("stage") == stage] for stage in STAGES}
    evaluations = _evaluations(folder, config)
    held_out = held_out_of(config)
    evaluated = [rollout for rollouts in evaluations.values() for rollout in rollouts]
    accounts = [_logged(STAGES[stage], by_stage[stage]) for stage in _LOGGED if by_stage[stage]]
    improving = next((stage for stage in _IMPROVING if by_stage[stage]), _IMPROVING[0])
    return RunSummary(
        name=folder.path.resolve().name,
        recipe=recipe,
        finished=recipe == "eval" or (folder.path / "policy" / "config.json").is_file(),
        config=config,
        measurements=[
            _measurement(when, mode, [r for r in rollouts if r.harness not in held_out])
            for (when, mode), rollouts in evaluations.items()
        ],
        sft=by_stage["sft"],
        value=by_stage["value"],
        algorithm=STAGES[improving],
        steps=by_stage[improving],
        accounts=[*accounts, *([_stored(evaluated)] if evaluated else [])],
        unscored=[*_unscored_rows(by_stage), *_unscored_rollouts(evaluated)],
        seconds=_seconds(rows),
        rollout_seconds=_rollout_seconds(evaluated),
        examples=pick_examples(_shown(folder, evaluations)),
        harnesses=figures_by_harness(config, evaluations, by_stage[improving]),
    )


def _evaluations(folder: RunFolder, config: Mapping[str, Any]) -> dict[tuple[str, str], list[StoredRollout]]:
    """(when, mode) -> rollouts, sampled first, before first."""
    found = {}
    batches = set(folder.batches())
    for mode, said in _MODES.items():
        for when in ("before", "after"):
            name = f"eval-{when}-{mode}"
            if name in batches:
                found[when, said] = list(folder.rollouts(name))
    if "eval" in batches:
        found["measured", f"T = {config.get('temperature', 1.0):g}"] = list(folder.rollouts("eval"))
    return found


def _measurement(when: str, mode: str, rollouts: Sequence[StoredRollout]) -> Measurement:
    families: dict[str, list[bool]] = defaultdict(list)
    for rollout in rollouts:
        if rollout.reward is not None:
            families[rollout.family].append(rollout.reward.passed)
    by_family = {name: wilson(sum(passed), len(passed)) for name, passed in families.items()}
    everything = [passed for group in families.values() for passed in group]
    return Measurement(when, mode, wilson(sum(everything), len(everything)), by_family)


def _logged(stage: str, rows: Sequence[Mapping[str, Any]]) -> Account:
    """The account of a stage whose rollouts ``metrics.jsonl`` has added up."""
    ledger = total([Ledger.from_dict(dict(row)) for row in rows])
    return Account(
        stage,
        rollouts=sum(row["rollouts"] for row in rows),
        calls=round(sum(row["calls"] * row["rollouts"] for row in rows)),
        captured=ledger.captured,
        kept=ledger.trained,
        dropped=dict(ledger.dropped.most_common()),
        aborted=ledger.aborted,
        notes=dict(ledger.notes.most_common()),
        unique_tokens=sum(row["unique_tokens"] for row in rows),
        total_tokens=sum(row["total_tokens"] for row in rows),
    )


def _stored(rollouts: Sequence[StoredRollout]) -> Account:
    """The account of the evaluations: all that was captured is held out."""
    ledger = total([rollout.ledger for rollout in rollouts])
    calls = [call for rollout in rollouts for call in rollout.calls]
    held_out = {"held out": ledger.captured} if ledger.captured else {}
    return Account(
        STAGES["eval"],
        rollouts=len(rollouts),
        calls=len(calls),
        captured=ledger.captured,
        kept=0,
        dropped=held_out,
        aborted=ledger.aborted,
        notes=dict(ledger.notes.most_common()),
        unique_tokens=sum(len(rollout.packed) for rollout in rollouts),
        total_tokens=sum(call["prompt_tokens"] + call["sampled_tokens"] for call in calls),
    )


def _unscored_rows(by_stage: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[Unscored]:
    out = []
    for stage in _LOGGED:
        count: Counter[str] = Counter()
        for row in by_stage[stage]:
            count.update(row["unscored"])
        out += [Unscored(STAGES[stage], status, n, "") for status, n in count.most_common()]
    return out


def _unscored_rollouts(rollouts: Sequence[StoredRollout]) -> list[Unscored]:
    details: dict[str, list[str]] = defaultdict(list)
    for rollout in rollouts:
        if rollout.reward is None:
            details[str(rollout.status)].append(rollout.detail)
    return [Unscored(STAGES["eval"], status, len(seen), seen[0]) for status, seen in details.items()]


def _seconds(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Wall seconds of each part, from the time between rows; a clock that jumps back is a resumed process."""
    spent: dict[str, float] = defaultdict(float)
    last = 0.0
    for row in rows:
        now = float(row["elapsed_s"])
        since = now - last if now >= last else now
        last = now
        stage = STAGES.get(row["stage"], str(row["stage"]))
        if row["stage"] in ("value", *_IMPROVING):
            for part, seconds in row["seconds"].items():
                spent[f"{stage}: {part}"] += seconds
                since -= seconds
            stage += ": saving" if row["stage"] == "value" else ": validation and saving"
        spent[stage] += max(0.0, since)
    return dict(spent)


def _rollout_seconds(rollouts: Sequence[StoredRollout]) -> dict[str, float]:
    phases: dict[str, list[float]] = defaultdict(list)
    for rollout in rollouts:
        for phase, seconds in rollout.seconds.items():
            phases[phase].append(seconds)
    return {phase: sum(seconds) / len(seconds) for phase, seconds in phases.items()}


def _shown(
    folder: RunFolder, evaluations: Mapping[tuple[str, str], Sequence[StoredRollout]]
) -> dict[str, Sequence[StoredRollout]]:
    """Label -> rollouts to take examples from: the sampled evaluations, else the newest batch of another kind."""
    sampled = {when: r for (when, mode), r in evaluations.items() if mode == _MODES["sampled"] or when == "measured"}
    if sampled:
        return dict(sampled)
    others = [name for name in folder.batches() if not _EVAL_BATCH.fullmatch(name)]
    newest = max(others, key=lambda name: (name.startswith(_IMPROVING), name), default=None)
    return {newest: list(folder.rollouts(newest))} if newest is not None else {}
