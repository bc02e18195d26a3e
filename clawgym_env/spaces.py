"""Gymnasium spaces of a model boundary: ragged token ids and any text."""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium import spaces

from clawgym_env.types import TokenArray


class TokenSequence(spaces.Sequence):
    """[T] int64 token ids, ``min_length <= T <= max_length``, each in ``[0, vocab_size)``."""

    def __init__(self, vocab_size: int, max_length: int, min_length: int = 0, seed: int | None = None) -> None:
        self.vocab_size, self.min_length, self.max_length = int(vocab_size), int(min_length), int(max_length)
        super().__init__(spaces.Discrete(vocab_size), seed=seed, stack=True)

    def sample(self, mask: Any = None, probability: Any = None) -> TokenArray:
        """Random ids of a random, mostly short length.

        Raises:
            ValueError: a mask or probability was given; a ragged space takes none.
        """
        _refuse(mask, probability)
        low = max(1, self.min_length)
        length = min(max(low, int(self.np_random.geometric(0.05))), self.max_length)
        return self.np_random.integers(0, self.vocab_size, size=length, dtype=np.int64)

    def contains(self, x: Any) -> bool:
        """Whether ``x`` is a 1-D integer array (or list) within the bounds."""
        try:
            ids = np.asarray(x)
        except ValueError:
            return False
        if ids.ndim != 1 or not self.min_length <= ids.size <= self.max_length:
            return False
        return ids.size == 0 or (
            bool(np.issubdtype(ids.dtype, np.integer)) and int(ids.min()) >= 0 and int(ids.max()) < self.vocab_size
        )

    def __eq__(self, other: object) -> bool:
        """Equal bounds."""
        return (
            isinstance(other, TokenSequence)
            and (self.vocab_size, self.min_length, self.max_length)
            == (other.vocab_size, other.min_length, other.max_length)
        )  # fmt: skip

    def __repr__(self) -> str:
        return f"TokenSequence({self.vocab_size}, max_length={self.max_length}, min_length={self.min_length})"


class UnicodeText(spaces.Text):
    """Any string of at most ``max_length`` characters; the stock ``Text`` admits only a listed character set."""

    def __init__(self, max_length: int, seed: int | None = None) -> None:
        super().__init__(max_length, min_length=0, charset="abcdefghijklmnopqrstuvwxyz", seed=seed)

    def sample(self, mask: Any = None, probability: Any = None) -> str:
        """Random letters, a short text even where a long one fits.

        Raises:
            ValueError: a mask or probability was given.
        """
        _refuse(mask, probability)
        length = min(int(self.np_random.geometric(0.05)), self.max_length)
        return "".join(self.np_random.choice(self.character_list, size=length))

    def contains(self, x: Any) -> bool:
        """Whether ``x`` is a string within the bound."""
        return isinstance(x, str) and len(x) <= self.max_length

    def __repr__(self) -> str:
        return f"UnicodeText({self.max_length})"


def _refuse(mask: Any, probability: Any) -> None:
    if mask is not None or probability is not None:
        raise ValueError("this space cannot be sampled with a mask or probability")
