"""Pass@1 and its interval, against values from the literature and by hand."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clawgym_env.evaluation import bootstrap, by_harness, evaluate, passes_by_task, wilson
from clawgym_env.rollout import Rollout
from clawgym_env.tree.ledger import Ledger
from clawgym_env.tree.prefix_tree import PrefixTree
from clawgym_env.types import Reward, Status


@pytest.mark.parametrize(
    ("passed", "scored", "low", "high"),
    [
        # Newcombe (1998), Statistics in Medicine 17, table I, method 3.
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0, 0.1611),
        (1, 29, 0.0061, 0.1718),
        # p = 1/2, n = 100: centre 1/2, half width 1.959964 * sqrt(0.0025 + 0.00009604) / 1.03841459.
        (50, 100, 0.4038, 0.5962),
        (10, 10, 0.7225, 1.0),
    ],
)
def test_wilson_golden_values(passed: int, scored: int, low: float, high: float) -> None:
    rate = wilson(passed, scored)
    assert (round(rate.low, 4), round(rate.high, 4)) == (low, high)
    assert rate.rate == passed / scored


@given(st.integers(1, 500).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))))
def test_the_interval_holds_the_rate_and_mirrors(case: tuple[int, int]) -> None:
    passed, scored = case
    rate, mirror = wilson(passed, scored), wilson(scored - passed, scored)
    assert 0.0 <= rate.low <= rate.rate <= rate.high <= 1.0
    assert math.isclose(rate.low, 1 - mirror.high, abs_tol=1e-12)


def test_nothing_scored_says_nothing() -> None:
    rate = wilson(0, 0)
    assert math.isnan(rate.rate) and (rate.low, rate.high) == (0.0, 1.0)
    assert str(rate) == "no scored rollout"


def test_a_rate_reads_well() -> None:
    assert str(wilson(50, 100)) == "50.0% [40.4, 59.6] (50/100)"


def rollout(family: str, status: Status, passed: bool | None, harness: str = "h", task: str = "t") -> Rollout:
    reward = None if passed is None else Reward(float(passed), passed)
    return Rollout(
        "r", task, "s", family, harness, "g", status, reward, "", PrefixTree(), Ledger(), [], {}
    )  # fmt: skip


def test_unscored_rollouts_count_neither_way() -> None:
    found = evaluate(
        [
            rollout("files", Status.COMPLETED, True),
            rollout("files", Status.AGENT_TIMEOUT, False),
            rollout("files", Status.SANDBOX_ERROR, None),
            rollout("logs", Status.COMPLETED, True),
            rollout("web", Status.SANDBOX_ERROR, None),
            rollout("web", Status.NO_CALLS, None),
        ]
    )
    assert (found.overall.passed, found.overall.scored) == (2, 3)
    assert {k: (v.passed, v.scored) for k, v in found.by_family.items()} == {"files": (1, 2), "logs": (1, 1)}
    assert found.unscored == {"sandbox_error": 2, "no_calls": 1}
    assert found.as_dict()["pass_at_1"] == pytest.approx(2 / 3)


def test_no_rollouts_at_all() -> None:
    found = evaluate([])
    assert found.overall.scored == 0 and found.calls == 0 and found.by_family == {}


def test_by_harness_and_by_task() -> None:
    mixed = [
        rollout("files", Status.COMPLETED, True, "codex", "t1"),
        rollout("files", Status.COMPLETED, False, "pi", "t1"),
        rollout("files", Status.COMPLETED, True, "pi", "t1"),
        rollout("files", Status.SANDBOX_ERROR, None, "pi", "t2"),
    ]
    each = by_harness(mixed)
    assert list(each) == ["codex", "pi"] and len(each["pi"]) == 3
    assert passes_by_task(each["pi"]) == {"t1": [False, True]}, "a task that was not scored says nothing"


def test_bootstrap_of_one_rollout_a_task_is_binomial() -> None:
    # 40 of 100: the 2.5% and 97.5% quantiles of Binomial(100, 0.4) / 100 are 0.30 and 0.50.
    low, high = bootstrap([[k < 40] for k in range(100)])
    assert low == pytest.approx(0.30, abs=0.011) and high == pytest.approx(0.50, abs=0.011)


def test_bootstrap_draws_whole_tasks() -> None:
    """Eight rollouts of a task that always agree tell no more than one."""
    single = bootstrap([[k < 10] for k in range(20)])
    assert bootstrap([[k < 10] * 8 for k in range(20)]) == single
    spread = bootstrap([[k < 80] for k in range(160)])
    assert spread[1] - spread[0] < 0.5 * (single[1] - single[0])


@given(st.lists(st.lists(st.booleans(), max_size=4), max_size=12), st.integers(0, 3))
def test_bootstrap_holds_the_rate(clusters: list[list[bool]], seed: int) -> None:
    low, high = bootstrap(clusters, draws=500, seed=seed)
    outcomes = [x for cluster in clusters for x in cluster]
    if not outcomes:
        assert (low, high) == (0.0, 1.0)
    elif len({sum(c) / len(c) for c in clusters if c}) == 1:
        assert low == high == pytest.approx(sum(outcomes) / len(outcomes))
    else:
        assert 0.0 <= low < high <= 1.0
    assert (low, high) == bootstrap([c for c in clusters if c], draws=500, seed=seed), "empty tasks say nothing"
