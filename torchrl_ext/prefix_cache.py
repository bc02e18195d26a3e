"""Which tokens have their keys and values stored, and where a new prompt starts from.

Each request runs in a *slot*. A slot that ended keeps its tokens for later prompts. A prompt that shares a long prefix
with some slot *refers* to that prefix instead of copying it: its first ``cut`` tokens are read from ``base``, so
hundreds of rollouts hold one copy of a system prompt, and a decode step reads it once for all of them.

Invariant: a base has no base itself; what lies below the largest ``cut`` that refers to a slot does not change.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from clawgym_env.types import TokenArray

MIN_SHARED = 32
"""Shorter common prefixes are copied: a reference costs one more kernel call a step."""
MAX_RECUT = 128
"""An existing cut this much below the common prefix is used again, so that more rows share one kernel call."""


@dataclass(slots=True, eq=False)
class Slot:
    """Storage of one sequence.

    Attributes:
        index: Row of the storage.
        tokens: [max_context] int64; the first ``known`` are the sequence.
        known: Tokens of the prompt plus sampled ones.
        length: Tokens whose keys and values are stored (the first ``cut`` in ``base``).
        base: Slot that holds the first ``cut`` tokens, or ``None``.
        cut: 0 without a base.
        dependents: Slots that have this one as base.
        busy: Whether a request runs in it.
        last_used: Clock of its last release.
    """

    index: int
    tokens: TokenArray
    known: int = 0
    length: int = 0
    base: Slot | None = None
    cut: int = 0
    dependents: set[Slot] = field(default_factory=set)
    busy: bool = False
    last_used: int = 0

    def pinned(self) -> int:
        """Tokens that must not change."""
        return max((d.cut for d in self.dependents), default=0)


@dataclass(frozen=True, slots=True, eq=False)
class Placement:
    """Where a prompt runs.

    Attributes:
        cached: Prompt tokens that need no computation.
        copy: (source slot, start, stop): stored tokens to copy into the slot first, or ``None``.
    """

    slot: Slot
    cached: int
    copy: tuple[Slot, int, int] | None


class PrefixCache:
    """Slots of one weight version; not thread-safe, the engine's worker owns it."""

    def __init__(self, max_slots: int, max_context: int):
        self.slots = [Slot(i, np.zeros(max_context, dtype=np.int64)) for i in range(max_slots)]
        self._clock = 0

    def acquire(self, prompt: TokenArray) -> Placement | None:
        """Finds a slot for a prompt.

        Returns:
            ``None`` when the prompt has to wait: no slot is free, or one in its prefill will soon hold much more of it.
        """
        source, shared = self._longest_prefix(prompt)
        if self._soon_longer(prompt, shared):
            return None
        if source is not None and not source.busy and shared == source.length:
            return self._occupy(source, prompt, shared, None)
        slot = self._free_slot(source, shared)
        if slot is None:
            return None
        if slot is source:
            return self._occupy(slot, prompt, shared, None)
        self._detach(slot)
        if source is None:
            return self._occupy(slot, prompt, 0, None)
        slot.base, slot.cut = self._base(source, shared)
        if slot.base is not None:
            slot.base.dependents.add(slot)
        copy = (source, slot.cut, shared) if slot.cut < shared else None
        return self._occupy(slot, prompt, shared, copy)

    def release(self, slot: Slot) -> None:
        """Ends a slot's request; what it stored stays for later prompts."""
        self._clock += 1
        slot.busy, slot.last_used, slot.known = False, self._clock, slot.length

    def clear(self) -> None:
        """Forgets everything: the weights changed."""
        for slot in self.slots:
            slot.base, slot.cut, slot.length, slot.known = None, 0, 0, 0
            slot.dependents.clear()

    def _longest_prefix(self, prompt: TokenArray) -> tuple[Slot | None, int]:
        """The slot that stores most of the prompt, the last token excepted (its logits are needed)."""
        best: Slot | None = None
        best_key = (0, False, False)
        for slot in self.slots:
            shared = common_prefix(prompt[:-1], slot.tokens[: slot.length])
            # among equals: one that can simply go on, then one that can serve as base
            key = (shared, not slot.busy and shared == slot.length, slot.base is None)
            if shared and key > best_key:
                best, best_key = slot, key
        return best, best_key[0]

    def _soon_longer(self, prompt: TokenArray, shared: int) -> bool:
        for slot in self.slots:
            if slot.busy and slot.length < slot.known:
                coming = common_prefix(prompt[:-1], slot.tokens[: slot.known])
                if coming > shared + MIN_SHARED:
                    return True
        return False

    def _free_slot(self, source: Slot | None, shared: int) -> Slot | None:
        free = [s for s in self.slots if not s.busy and not s.dependents and s is not source]
        if free:
            return min(free, key=lambda s: (s.length > 0, s.last_used, s.index))
        if source is not None and not source.busy and source.pinned() <= shared:
            return source
        return None

    @staticmethod
    def _base(source: Slot, shared: int) -> tuple[Slot | None, int]:
        if source.base is not None:
            return source.base, min(source.cut, shared)
        if shared < MIN_SHARED:
            return None, 0
        near = [d.cut for d in source.dependents if shared - MAX_RECUT <= d.cut <= shared]
        return source, max(near, default=shared)

    @staticmethod
    def _detach(slot: Slot) -> None:
        if slot.base is not None:
            slot.base.dependents.discard(slot)
        slot.base, slot.cut = None, 0

    def _occupy(self, slot: Slot, prompt: TokenArray, shared: int, copy: tuple[Slot, int, int] | None) -> Placement:
        if slot.cut > shared:
            slot.cut = shared
        slot.tokens[: len(prompt)] = prompt
        slot.known, slot.length, slot.busy = len(prompt), shared, True
        return Placement(slot, shared, copy)


def common_prefix(a: TokenArray, b: TokenArray) -> int:
    """Length of the longest common prefix."""
    n = min(len(a), len(b))
    differs = np.flatnonzero(a[:n] != b[:n])
    return int(differs[0]) if len(differs) else n
