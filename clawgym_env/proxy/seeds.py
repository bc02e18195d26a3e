"""Seeds of a rollout's calls: by prompt and repetition, whatever the order of arrival.

Invariant: a call's seed depends on the rollout's seed, on all of its prompt, and on how often that prompt came before.
Reading a prompt costs what is new in it, as the state of the history that it extends is kept.
"""

from __future__ import annotations

from collections import Counter
from hashlib import blake2b

from clawgym_env.types import TokenArray


class CallSeeds:
    """See the module's invariant.

    Args:
        seed: The rollout's.
    """

    def __init__(self, seed: int) -> None:
        self._start = blake2b(digest_size=8, key=(seed % (1 << 64)).to_bytes(8, "little"))
        self._read: dict[int, tuple[blake2b, int]] = {}
        self._repeats: Counter[bytes] = Counter()

    def next(self, prompt: TokenArray, parent: int | None) -> int:
        """The seed of the next call with a prompt.

        Args:
            prompt: [P] int64, beginning with the parent's prompt and response.
            parent: A call that was committed.
        """
        key = self._after(prompt, parent).digest()
        self._repeats[key] += 1
        return (int.from_bytes(key, "little") + self._repeats[key]) % (1 << 63)

    def commit(self, call_id: int, prompt: TokenArray, response: TokenArray, parent: int | None) -> None:
        """Remembers what a call's successors begin with."""
        state = self._after(prompt, parent)
        state.update(response.tobytes())
        self._read[call_id] = state, len(prompt) + len(response)

    def _after(self, prompt: TokenArray, parent: int | None) -> blake2b:
        known = None if parent is None else self._read.get(parent)
        state, length = (self._start, 0) if known is None else known
        state = state.copy()
        state.update(prompt[length:].tobytes())
        return state
