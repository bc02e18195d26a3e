"""Where prompts are placed: references, copies, continuation, eviction, waiting."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from clawgym_env.types import TokenArray
from torchrl_ext.prefix_cache import MIN_SHARED, Placement, PrefixCache, common_prefix

SYSTEM = np.arange(100, 200)


def prompt(*tail: int) -> TokenArray:
    return np.concatenate([SYSTEM, np.array(tail, dtype=np.int64)])


def run(cache: PrefixCache, tokens: TokenArray) -> Placement:
    """Acquires and computes the whole prompt."""
    placement = cache.acquire(tokens)
    assert placement is not None
    placement.slot.length = placement.slot.known
    return placement


def test_common_prefix() -> None:
    assert common_prefix(np.array([1, 2, 3]), np.array([1, 2, 4, 5])) == 2
    assert common_prefix(np.array([1, 2]), np.array([1, 2, 4])) == 2
    assert common_prefix(np.array([], dtype=np.int64), np.array([1])) == 0


def test_a_second_prompt_refers_to_the_first_ones_prefix() -> None:
    cache = PrefixCache(4, 300)
    a, b = run(cache, prompt(1, 2, 3)), run(cache, prompt(4, 5))
    assert (a.cached, b.cached) == (0, 100)
    assert b.slot.base is a.slot and b.slot.cut == 100 and b.copy is None


def test_the_last_prompt_token_is_always_computed() -> None:
    cache = PrefixCache(4, 300)
    run(cache, prompt(1, 2))
    assert run(cache, prompt(1, 2)).cached == 101


def test_a_finished_sequence_is_continued_in_place() -> None:
    cache = PrefixCache(4, 300)
    a = run(cache, prompt(1, 2))
    cache.release(a.slot)
    b = run(cache, prompt(1, 2, 3, 4))
    assert b.slot is a.slot and b.cached == 102 and b.copy is None


def test_a_reference_to_a_dependent_goes_to_its_base_and_copies_the_rest() -> None:
    cache = PrefixCache(4, 300)
    a = run(cache, prompt(1))
    b = run(cache, prompt(2, 3, 4, 5))
    c = run(cache, prompt(2, 3, 9))
    assert c.slot.base is a.slot and c.slot.cut == 100
    assert c.copy == (b.slot, 100, 102) and c.cached == 102


def test_a_nearby_cut_is_used_again() -> None:
    cache = PrefixCache(4, 300)
    a = run(cache, prompt(1, 2, 3, 4))
    run(cache, prompt(9))
    c = run(cache, prompt(1, 2, 8))
    assert c.slot.cut == 100 and c.copy == (a.slot, 100, 102)


def test_short_prefixes_are_copied() -> None:
    cache = PrefixCache(4, 300)
    a = run(cache, np.arange(50))
    b = run(cache, np.array([0, 1, 2, 99, 98]))
    assert b.slot.base is None and b.copy == (a.slot, 0, 3)


def test_a_prompt_waits_for_a_prefix_that_is_being_computed() -> None:
    cache = PrefixCache(4, 300)
    a = cache.acquire(prompt(1))
    assert a is not None
    assert cache.acquire(prompt(2)) is None
    assert cache.acquire(np.arange(5)) is not None  # nothing to share: no reason to wait
    a.slot.length = 100 - MIN_SHARED
    late = cache.acquire(prompt(2))
    assert late is not None and late.cached == 100 - MIN_SHARED


def test_the_least_recently_used_goes_first_and_bases_stay() -> None:
    cache = PrefixCache(3, 300)
    a, b, c = run(cache, prompt(1)), run(cache, prompt(2)), run(cache, np.arange(60))
    for placement in (a, c, b):
        cache.release(placement.slot)
    d = run(cache, np.arange(500, 560))
    assert d.slot is c.slot  # a is older, but b refers to it
    e = run(cache, np.arange(700, 760))
    assert e.slot is b.slot and not a.slot.dependents


def test_all_busy_means_wait() -> None:
    cache = PrefixCache(1, 300)
    a = run(cache, prompt(1))
    assert cache.acquire(np.arange(9)) is None
    cache.release(a.slot)
    again = run(cache, prompt(2))
    assert again.slot is a.slot and again.cached == 100 and again.copy is None


def test_clear_forgets_everything() -> None:
    cache = PrefixCache(2, 300)
    for placement in (run(cache, prompt(1)), run(cache, prompt(2))):
        cache.release(placement.slot)
    cache.clear()
    assert run(cache, prompt(1)).cached == 0


class Store:
    """A stand-in for the key-value storage: what token each cell was computed from."""

    def __init__(self, slots: int, context: int):
        self.cells = np.full((slots, context), -1)

    def place(self, p: Placement) -> None:
        if p.copy is not None:
            source, start, stop = p.copy
            assert source.cut <= start, "copies come from what the source has itself"
            self.cells[p.slot.index, start:stop] = self.cells[source.index, start:stop]

    def compute(self, p: Placement, count: int) -> None:
        s = p.slot
        self.cells[s.index, s.length : s.length + count] = s.tokens[s.length : s.length + count]
        s.length += count

    def check(self, cache: PrefixCache) -> None:
        for s in cache.slots:
            seen = self.cells[s.index, : s.length].copy()
            if s.base is not None:
                assert s.base.base is None and s in s.base.dependents and s.cut <= s.base.length
                seen[: s.cut] = self.cells[s.base.index, : s.cut]
            np.testing.assert_array_equal(seen, s.tokens[: s.length])


@settings(max_examples=150, deadline=None)
@given(data=st.data(), slots=st.integers(1, 5))
def test_every_slot_always_holds_its_own_tokens(data: st.DataObject, slots: int) -> None:
    cache, store, running = PrefixCache(slots, 400), Store(slots, 400), []
    waits = 0
    for _ in range(data.draw(st.integers(1, 30))):
        action = data.draw(st.sampled_from(["start", "start", "compute", "end"]))
        if action == "start":
            cut = data.draw(st.integers(1, 100))
            tail = data.draw(st.lists(st.integers(0, 1), min_size=1, max_size=60))
            tokens = np.concatenate([SYSTEM[:cut], tail])
            placement = cache.acquire(tokens)
            if placement is None:
                assert running, "with nothing running every prompt finds a place"
                waits += 1
            else:
                assert placement.cached < len(tokens)
                store.place(placement)
                running.append(placement)
        elif running:
            placement = data.draw(st.sampled_from(running))
            if action == "compute":
                left = placement.slot.known - placement.slot.length
                store.compute(placement, data.draw(st.integers(0, left)))
            else:
                cache.release(placement.slot)
                running.remove(placement)
        store.check(cache)
