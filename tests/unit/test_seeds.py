"""Seeds of calls: by all of the prompt, in whatever steps it was read, and by repetition."""

from __future__ import annotations

from hashlib import blake2b

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from clawgym_env.proxy.seeds import CallSeeds

IDS = st.lists(st.integers(0, 9), min_size=1, max_size=4)


def whole(seed: int, prompt: np.ndarray, times: int) -> int:
    """What a seed is, from the prompt read at once."""
    key = blake2b(prompt.tobytes(), digest_size=8, key=seed.to_bytes(8, "little")).digest()
    return (int.from_bytes(key, "little") + times) % (1 << 63)


@given(st.integers(0, 2**64 - 1), st.lists(st.tuples(IDS, IDS), min_size=1, max_size=6))
def test_a_growing_history_is_read_in_steps_as_at_once(seed: int, turns: list[tuple[list[int], list[int]]]) -> None:
    seeds, history = CallSeeds(seed), np.empty(0, np.int64)
    for call, (new, said) in enumerate(turns):
        prompt = np.concatenate([history, np.array(new, np.int64)])
        parent = call - 1 if call else None
        assert seeds.next(prompt, parent) == whole(seed, prompt, 1)
        assert seeds.next(prompt, parent) == whole(seed, prompt, 2)
        assert seeds.next(prompt, None) == whole(seed, prompt, 3), "rendered from scratch, the same prompt"
        response = np.array(said, np.int64)
        seeds.commit(call, prompt, response, parent)
        history = np.concatenate([prompt, response])


def test_seeds_differ_by_rollout_prompt_and_repetition() -> None:
    one, other = CallSeeds(1), CallSeeds(2)
    a, b = np.array([1, 2], np.int64), np.array([1, 3], np.int64)
    found = {one.next(a, None), one.next(a, None), one.next(b, None), other.next(a, None), other.next(b, None)}
    assert len(found) == 5 and all(0 <= seed < 2**63 for seed in found)
    assert CallSeeds(-1).next(a, None) == CallSeeds(2**64 - 1).next(a, None), "seeds are taken modulo 2^64"
