"""Reading a request with a memory of earlier ones gives what reading it alone gives."""

from __future__ import annotations

from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from clawgym_env.wire import anthropic_messages, gemini, openai_chat, openai_responses
from clawgym_env.wire.base import Memo, Wire

WORDS = st.sampled_from(["a", "b", "c"])


def body(wire: Wire, texts: list[str]) -> bytes:
    """A conversation of user turns, in a wire's form."""
    turns: list[Any] = [{"role": "user", "content": t} for t in texts]
    if wire is gemini:
        return orjson.dumps({"contents": [{"role": "user", "parts": [{"text": t}]} for t in texts]})
    if wire is openai_responses:
        return orjson.dumps({"model": "m", "input": turns})
    return orjson.dumps({"model": "m", "max_tokens": 9, "messages": turns})


@pytest.mark.parametrize("wire", [openai_chat, openai_responses, anthropic_messages, gemini], ids=lambda w: w.__name__)
@given(requests=st.lists(st.lists(WORDS, min_size=1, max_size=5), min_size=1, max_size=8))
def test_any_sequence_of_requests_is_read_as_each_alone(wire: Wire, requests: list[list[str]]) -> None:
    memo = Memo()
    params = {"model": "m", "method": "generateContent"}
    for texts in requests:
        sent = body(wire, texts)
        assert wire.parse_request(sent, params, memo) == wire.parse_request(sent, params)


def test_only_what_is_new_is_read() -> None:
    read: list[tuple[str, int]] = []

    def note(item: str, position: int) -> str:
        read.append((item, position))
        return item.upper()

    memo = Memo()
    assert memo.read(["s", "a"], note) == ["S", "A"]
    assert memo.read(["s", "a", "b"], note) == ["S", "A", "B"]
    assert memo.read(["t", "x"], note) == ["T", "X"], "a sub-agent's"
    assert memo.read(["s", "a", "b", "c"], note) == ["S", "A", "B", "C"]
    assert memo.read(["t", "x", "y"], note) == ["T", "X", "Y"]
    assert memo.read(["s", "z"], note) == ["S", "Z"], "rewritten"
    assert read == [("s", 0), ("a", 1), ("b", 2), ("t", 0), ("x", 1), ("c", 3), ("y", 2), ("z", 1)]


def test_what_cannot_be_read_is_not_remembered() -> None:
    memo = Memo()
    memo.read(["a"], lambda item, _: item)
    with pytest.raises(ZeroDivisionError):
        memo.read(["a", "b"], lambda item, _: 1 / 0)
    assert memo.read(["a", "b"], lambda item, position: (item, position))[-1] == ("b", 1)
