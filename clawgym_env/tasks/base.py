"""What a task is: an instruction, the files it starts from, and a verifier the agent cannot reach.

Invariant: a verifier judges a snapshot of the workspace taken after every process of the agent is dead. Where it has to
run something, it runs it in a fresh sandbox that holds only that snapshot and the verifier's own files.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, runtime_checkable

from clawgym_env.sandboxes.base import Sandbox
from clawgym_env.types import Reward

Split = Literal["train", "validation", "test"]

#: Relative path -> content of every regular file that was in the workspace.
Snapshot = Mapping[str, bytes]

#: Opens a fresh sandbox whose workspace holds the given files.
FreshSandbox = Callable[[Snapshot], AbstractAsyncContextManager[Sandbox]]

#: Judges a snapshot. Raises VerifierError when it cannot.
Verifier = Callable[[Snapshot, FreshSandbox], Awaitable[Reward]]


@dataclass(frozen=True, slots=True, eq=False)
class Task:
    """One problem instance.

    Attributes:
        id: Unique and stable: the suite can make the same task again from it.
        family: Kind of task, for grouped metrics.
        instruction: What the harness is told.
        files: Relative workspace path -> content, before the agent starts.
        verify: Judges the workspace afterwards.
        oracle: Shell commands that solve it; empty where no oracle is known.
        metadata: JSON-like facts for reports.
    """

    id: str
    suite: str
    family: str
    instruction: str
    files: Mapping[str, bytes]
    verify: Verifier
    oracle: Sequence[str] = ()
    metadata: Mapping[str, Any] = field(default_factory=dict)


@runtime_checkable
class Suite(Protocol):
    """A family of tasks with splits that never overlap."""

    @property
    def name(self) -> str: ...

    @property
    def families(self) -> Sequence[str]: ...

    def sample(self, split: Split, n: int, *, seed: int, families: Sequence[str] | None = None) -> list[Task]:
        """``n`` tasks of a split, the same for the same seed, families in balance."""
        ...

    def get(self, task_id: str) -> Task:
        """The task of that id.

        Raises:
            TaskError: there is no such task; the message says what ids look like.
        """
        ...
