"""Every captured token is accounted for: trained, or dropped with a reason.

Invariant: once settled, ``captured == trained + sum(dropped)``. Aborted tokens were never captured (their call
committed nothing) and are counted beside.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class Ledger:
    """Token account of one rollout.

    Attributes:
        captured: Sampled tokens of committed calls.
        aborted: Sampled tokens of calls that were never committed.
        dropped: Reason -> sampled tokens that will not train.
        notes: What a person should know (tolerated differences, refused requests), with how often it happened.
    """

    captured: int = 0
    aborted: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    notes: Counter[str] = field(default_factory=Counter)

    @property
    def trained(self) -> int:
        """Captured tokens that no reason has dropped."""
        return self.captured - sum(self.dropped.values())

    def drop(self, reason: str, tokens: int) -> None:
        """Books tokens as not trained.

        Raises:
            ValueError: more tokens would be dropped than were captured.
        """
        if tokens < 0 or tokens > self.trained:
            raise ValueError(f"cannot drop {tokens} tokens ({reason}): {self.trained} of {self.captured} are left")
        if tokens:
            self.dropped[reason] += tokens

    def note(self, what: str) -> None:
        """Records something a person should know."""
        self.notes[what] += 1

    def as_dict(self) -> dict[str, Any]:
        """JSON-like form for the run folder."""
        return {
            "captured": self.captured,
            "trained": self.trained,
            "aborted": self.aborted,
            "dropped": dict(self.dropped),
            "notes": dict(self.notes),
        }

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Ledger:
        """Inverse of :meth:`as_dict`."""
        return cls(data["captured"], data["aborted"], Counter(data["dropped"]), Counter(data["notes"]))


def total(ledgers: list[Ledger]) -> Ledger:
    """The account of many rollouts."""
    out = Ledger()
    for ledger in ledgers:
        out.captured += ledger.captured
        out.aborted += ledger.aborted
        out.dropped += ledger.dropped
        out.notes += ledger.notes
    return out
