"""Stop sequences: where the text that a harness asked for ends an answer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from clawgym_env.types import Generation, TokenArray


def cut_at_stop(
    generation: Generation, stop: Sequence[str], decode: Callable[[TokenArray], str]
) -> tuple[Generation, str | None]:
    """A generation up to and including the token that completes the first stop sequence in it.

    What was sampled before that token does not depend on what would have come after, so the log-probabilities stand.

    Returns:
        The generation, and the stop sequence that ended it, where one did.
    """
    text = decode(generation.token_ids) if stop else ""
    found = [(text.find(s) + len(s), -len(s), s) for s in stop if s in text]
    if not found:
        return generation, None
    _, _, first = min(found)
    low, high = 1, len(generation.token_ids)
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if first in decode(generation.token_ids[:middle]) else (middle + 1, high)
    kept = slice(0, low)
    cut = replace(
        generation,
        token_ids=generation.token_ids[kept],
        log_probs=generation.log_probs[kept],
        versions=generation.versions[kept],
        finish_reason="stop",
    )
    return cut, first
