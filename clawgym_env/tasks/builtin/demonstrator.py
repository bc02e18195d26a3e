"""A demonstrator that is imperfect on purpose, so that learning from rewards has something to find.

Invariant: what it does follows from the task's id, the seed and the skill alone. It always copies the task's words
correctly: a wrong demonstration is wrong in structure (a family's typical slip) or in conduct (it answers with the
command in words and acts on nothing, the same habit in every family). A policy that imitates it thus learns where words
go, and how often it acts is left to be improved.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Literal

from clawgym_env.errors import ConfigError
from clawgym_env.tasks.base import Task
from clawgym_env.tasks.builtin.family import digest
from clawgym_env.tasks.builtin.suite import instance_of

#: Last words of a demonstration that acted.
DONE = "Done."
#: Share of talk among the demonstrations that fail.
TALK = 2 / 3


@dataclass(frozen=True, slots=True)
class Demonstration:
    """What a demonstrator does with one task.

    Attributes:
        tool_commands: Shell commands, one tool call each; empty when it only talks.
        final_text: Its last message.
        kind: ``right`` solves the task; ``mistake`` and ``talk`` do not.
    """

    tool_commands: tuple[str, ...]
    final_text: str
    kind: Literal["right", "mistake", "talk"]


def demonstrate(task: Task, seed: int, skill: float = 0.4) -> Demonstration:
    """Demonstrates a task of the builtin suite.

    Args:
        task: A task of `BuiltinSuite`.
        seed: Which of the demonstrations of this task.
        skill: Probability in [0, 1] of a right one; two thirds of the rest are talk, one third is one of the family's
            two mistakes.

    Raises:
        ConfigError: ``skill`` is no probability.
        TaskError: the task is of another suite.
    """
    if not 0.0 <= skill <= 1.0:
        raise ConfigError(f"skill is a probability in [0, 1], not {skill!r}")
    instance = instance_of(task.id)
    rng = random.Random(digest("demonstration", task.id, str(seed)))
    draw, talks, mistake = rng.random(), rng.random() < TALK, rng.choice(instance.mistakes)
    if draw < skill:
        return Demonstration(instance.oracle, DONE, "right")
    if talks:
        return Demonstration((), "Run: " + " && ".join(instance.oracle), "talk")
    return Demonstration(mistake, DONE, "mistake")
