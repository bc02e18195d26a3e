"""Harnesses of a batch: in proportion, in no fixed order, the same for the same seed."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchrl_ext.mixture import Curriculum, Mixture, allot

SHARES = st.dictionaries(st.sampled_from("abcdef"), st.floats(0.01, 100.0), min_size=1)


@given(st.integers(0, 200), SHARES, st.integers(0, 1000))
def test_counts_are_shares_rounded_up_or_down(n: int, shares: dict[str, float], seed: int) -> None:
    got = allot(n, shares, random.Random(seed))
    assert len(got) == n
    counts, total = Counter(got), sum(shares.values())
    for label, share in shares.items():
        assert abs(counts[label] - n * share / total) < 1 + 1e-6
    assert got == allot(n, shares, random.Random(seed))


def test_over_many_batches_the_shares_are_met() -> None:
    shares = {"a": 1.0, "b": 2.0, "c": 0.5}
    counts = Counter(label for seed in range(2000) for label in allot(2, shares, random.Random(seed)))
    for label, share in shares.items():
        assert counts[label] / 4000 == pytest.approx(share / 3.5, abs=0.02)


def test_places_are_shuffled() -> None:
    first = Counter(allot(4, {"a": 1.0, "b": 1.0}, random.Random(seed))[0] for seed in range(400))
    assert 150 < first["a"] < 250


def test_groups_are_of_one_harness_or_of_all() -> None:
    weights = {"a": 1.0, "b": 1.0}
    one, across = Mixture(weights, {}), Mixture(weights, {"c": 1.0}, "task")
    for labels in one.assign(6, 4, one.shares(), random.Random(0)):
        assert labels in (["a"] * 4, ["b"] * 4)
    assert Counter(x[0] for x in one.assign(6, 4, one.shares(), random.Random(0))) == {"a": 3, "b": 3}
    for labels in across.assign(6, 4, across.shares(), random.Random(0)):
        assert Counter(labels) == {"a": 2, "b": 2}
    assert (one.group("t", "a"), across.group("t", "a"), across.group("t", "b")) == ("t@a", "t", "t")
    assert across.labels == ["a", "b", "c"]


def test_curriculum_by_hand() -> None:
    curriculum = Curriculum(window=2, floor=0.2)
    history = [{"a": 9.0}, {"a": 0.1, "b": 0.2}, {"a": 0.3, "c": 0.0}]
    # a: (0.1 + 0.3) / 2 = 0.2; b: 0.2, the most; c: 0; d was in no step
    factors = curriculum.factors(["a", "b", "c", "d"], history)
    assert factors == pytest.approx({"a": 1.0, "b": 1.0, "c": 0.2, "d": 1.0})
    halves = curriculum.factors(["a", "b"], [{"a": 0.1, "b": 0.2}])
    assert halves == pytest.approx({"a": 0.2 + 0.8 * 0.5, "b": 1.0})


def test_curriculum_without_anything_to_tell_leaves_the_weights() -> None:
    mixture = Mixture({"a": 3.0, "b": 1.0}, {}, curriculum=Curriculum())
    assert mixture.shares() == mixture.shares([{"a": 0.0, "b": 0.0}]) == {"a": 3.0, "b": 1.0}
    told = mixture.shares([{"a": 0.0, "b": 0.25}])
    assert told == pytest.approx({"a": 0.75, "b": 1.0})
    assert Mixture({"a": 3.0, "b": 1.0}, {}).shares([{"a": 0.0, "b": 0.25}]) == {"a": 3.0, "b": 1.0}
