"""A few rollouts, to be read: the same task before and after.

Invariant: examples are the *first* tasks of each kind of outcome, in the order in which the tasks were drawn; none is
chosen for its looks. Long texts are cut, and say so.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from clawgym_env.store import StoredRollout

#: Longest text of one message that is shown, in characters.
MAX_TEXT = 3000


@dataclass(frozen=True, slots=True)
class Turn:
    """One message; ``tool_calls`` are (name, arguments as JSON text); ``kind`` is what the call was for."""

    role: str
    text: str
    reasoning: str
    tool_calls: Sequence[tuple[str, str]]
    kind: str


@dataclass(frozen=True, slots=True)
class Shown:
    """One rollout of an example; ``score`` is ``None`` where it was not scored."""

    label: str
    rollout_id: str
    status: str
    score: float | None
    passed: bool
    detail: str
    turns: Sequence[Turn]


@dataclass(frozen=True, slots=True)
class Example:
    """One task and what was made of it."""

    task_id: str
    family: str
    outcome: str
    instruction: str
    rollouts: Sequence[Shown]


def pick_examples(batches: Mapping[str, Sequence[StoredRollout]]) -> list[Example]:
    """The first task of each outcome that all batches share.

    Args:
        batches: Label (such as ``before``) -> rollouts, one a task where tasks are compared.
    """
    by_task = {label: _first_of_task(rollouts) for label, rollouts in batches.items()}
    if not by_task:
        return []
    first, *rest = by_task.values()
    outcomes: dict[str, Example] = {}
    for task_id in first:
        if not all(task_id in other for other in rest):
            continue
        rollouts = {label: found[task_id] for label, found in by_task.items()}
        example = _example(rollouts)
        outcomes.setdefault(example.outcome, example)
    return list(outcomes.values())


def _first_of_task(rollouts: Sequence[StoredRollout]) -> dict[str, StoredRollout]:
    found: dict[str, StoredRollout] = {}
    for rollout in rollouts:
        found.setdefault(rollout.task_id, rollout)
    return found


def _example(rollouts: Mapping[str, StoredRollout]) -> Example:
    shown = [_show(label, rollout) for label, rollout in rollouts.items()]
    one = next(iter(rollouts.values()))
    outcome = ", ".join(f"{s.label}: {'solved' if s.passed else 'not solved'}" for s in shown)
    return Example(one.task_id, one.family, outcome, _instruction(one), shown)


def _show(label: str, rollout: StoredRollout) -> Shown:
    reward = rollout.reward
    turns = [_turn(m, call.get("kind", "main")) for call in rollout.calls for m in (*call["messages"], call["reply"])]
    return Shown(
        label,
        rollout.id,
        str(rollout.status),
        reward.score if reward is not None else None,
        reward is not None and reward.passed,
        rollout.detail,
        turns,
    )


def _instruction(rollout: StoredRollout) -> str:
    """The last thing a user says in the first request: every harness puts the task there."""
    asked = rollout.calls[0]["messages"] if rollout.calls else []
    return next((_cut(str(m["content"])) for m in reversed(asked) if m["role"] == "user"), "")


def _turn(message: Mapping[str, Any], kind: str) -> Turn:
    calls = [call["function"] for call in message.get("tool_calls", ())]
    return Turn(
        str(message["role"]),
        _cut(str(message["content"])),
        _cut(str(message.get("reasoning_content") or "")),
        [(str(call["name"]), _cut(str(call["arguments"]))) for call in calls],
        kind,
    )


def _cut(text: str) -> str:
    left = len(text) - MAX_TEXT
    return text if left <= 0 else f"{text[:MAX_TEXT]}\n[{left} more characters]"
