"""Spaces: what they sample they contain, and what is out of bounds they do not."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from gymnasium import spaces
from hypothesis import given
from hypothesis import strategies as st

from clawgym_env.spaces import TokenSequence, UnicodeText

TOKENS = TokenSequence(100, 8, min_length=1)


@given(st.integers(1, 50), st.integers(0, 5), st.integers(0, 40), st.integers(0, 2**31))
def test_samples_are_contained(vocab: int, low: int, more: int, seed: int) -> None:
    space = TokenSequence(vocab, low + more, min_length=low, seed=seed)
    for _ in range(5):
        ids = space.sample()
        assert ids.dtype == np.int64 and ids.ndim == 1
        assert space.contains(ids)


@pytest.mark.parametrize("inside", [[0], [99], [1] * 8, (3, 4), np.array([1], np.uint8), np.array([99], np.int32)])
def test_ids_within_the_bounds(inside: Any) -> None:
    assert inside in TOKENS


@pytest.mark.parametrize(
    "outside",
    [[], [100], [-1], [1] * 9, [[1]], [1.0], ["1"], [True], "ab", None, 5, [[1], [1, 2]], [2**70], np.array([np.nan])],
)
def test_what_is_no_answer(outside: Any) -> None:
    assert outside not in TOKENS


def test_an_empty_sequence_where_it_is_allowed() -> None:
    space = TokenSequence(100, 8)
    assert np.zeros(0, np.int64) in space and [] in space


def test_seeds_repeat_and_equal_bounds_are_equal() -> None:
    a, b = TokenSequence(100, 50, seed=7), TokenSequence(100, 50, seed=7)
    assert [a.sample().tolist() for _ in range(5)] == [b.sample().tolist() for _ in range(5)]
    assert a == b
    assert a != TokenSequence(100, 51) and a != TokenSequence(101, 50) and a != TokenSequence(100, 50, 1)
    assert a != spaces.Sequence(spaces.Discrete(100), stack=True)
    assert repr(a) == "TokenSequence(100, max_length=50, min_length=0)"


def test_samples_survive_json() -> None:
    samples = [TOKENS.sample() for _ in range(3)]
    back = TOKENS.from_jsonable(TOKENS.to_jsonable(samples))
    assert [s.tolist() for s in samples] == [np.asarray(b).tolist() for b in back]


@given(st.text(max_size=20))
def test_any_text_is_text(text: str) -> None:
    assert (text in UnicodeText(10)) == (len(text) <= 10)


def test_a_huge_text_space_samples_a_short_text() -> None:
    """The stock ``Text`` would draw a length up to the bound: gigabytes for an observation of messages."""
    space = UnicodeText(1 << 30, seed=0)
    samples = [space.sample() for _ in range(50)]
    assert all(s in space for s in samples) and max(map(len, samples)) < 1000
    assert len(set(samples)) > 10
    assert space.contains("ż\U0001f600") and not space.contains(b"bytes")
    assert repr(space) == f"UnicodeText({1 << 30})"


@pytest.mark.parametrize("space", [TOKENS, UnicodeText(10)], ids=repr)
def test_masks_are_refused_not_ignored(space: spaces.Space[Any]) -> None:
    with pytest.raises(ValueError, match="mask"):
        space.sample(mask=np.ones(100, np.int8))
    with pytest.raises(ValueError, match="mask"):
        space.sample(probability=np.ones(100) / 100)
