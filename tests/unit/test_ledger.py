"""The token account: what is captured is trained or dropped with a reason."""

from __future__ import annotations

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from clawgym_env.tree.ledger import Ledger, total


def test_dropped_tokens_no_longer_train() -> None:
    ledger = Ledger(captured=10, aborted=3)
    ledger.drop("dead leaf", 4)
    ledger.drop("dead leaf", 1)
    ledger.drop("sub-agent", 2)
    assert ledger.trained == 3
    assert ledger.as_dict() == {
        "captured": 10, "trained": 3, "aborted": 3, "dropped": {"dead leaf": 5, "sub-agent": 2}, "notes": {},
    }  # fmt: skip


@pytest.mark.parametrize("tokens", [-1, 6])
def test_more_than_is_left_cannot_be_dropped(tokens: int) -> None:
    ledger = Ledger(captured=9)
    ledger.drop("a", 4)
    with pytest.raises(ValueError, match=r"5 of 9 are left"):
        ledger.drop("b", tokens)
    assert ledger.trained == 5 and "b" not in ledger.dropped


def test_dropping_nothing_leaves_no_reason_behind() -> None:
    ledger = Ledger()
    ledger.drop("rollout cancelled", 0)
    assert ledger.as_dict()["dropped"] == {}


LEDGERS = st.builds(
    lambda drops, left, aborted, notes: _ledger(drops, left, aborted, notes),
    st.dictionaries(st.text(), st.integers(1, 50), max_size=3),
    st.integers(0, 50),
    st.integers(0, 50),
    st.lists(st.sampled_from("xyz"), max_size=4),
)


def _ledger(drops: dict[str, int], left: int, aborted: int, notes: list[str]) -> Ledger:
    ledger = Ledger(captured=left + sum(drops.values()), aborted=aborted)
    for reason, tokens in drops.items():
        ledger.drop(reason, tokens)
    for note in notes:
        ledger.note(note)
    return ledger


@given(LEDGERS)
def test_a_ledger_survives_json(ledger: Ledger) -> None:
    assert Ledger.from_dict(orjson.loads(orjson.dumps(ledger.as_dict()))) == ledger


@given(st.lists(LEDGERS, max_size=4))
def test_the_total_balances_and_leaves_its_parts_alone(ledgers: list[Ledger]) -> None:
    before = [ledger.as_dict() for ledger in ledgers]
    out = total(ledgers)
    assert out.captured == out.trained + sum(out.dropped.values())
    assert out.trained == sum(ledger.trained for ledger in ledgers)
    assert out.aborted == sum(ledger.aborted for ledger in ledgers)
    assert out.notes.total() == sum(ledger.notes.total() for ledger in ledgers)
    assert [ledger.as_dict() for ledger in ledgers] == before
