"""Which checkpoint is kept, and what a person is told of a step."""

from __future__ import annotations

import math

import pytest

from torchrl_ext.trainer import describe_step, favoured


@pytest.mark.parametrize(
    ("rate", "earlier", "expected"),
    [
        (0.2, [], True),
        (0.50, [0.57], True),  # one standard error of 0.57 on 28 tasks is 0.094
        (0.47, [0.57], False),
        (0.60, [0.50, 0.65], True),
        (1.0, [1.0], True),
        (0.99, [1.0], False),  # all passed: no error left
        (math.nan, [0.5], False),
        (math.nan, [], False),
    ],
)
def test_the_later_checkpoint_wins_within_a_standard_error(rate: float, earlier: list[float], expected: bool) -> None:
    assert favoured(rate, earlier, 28) is expected


def test_a_step_without_an_update_says_so() -> None:
    row = {
        "step": 1, "reward": math.nan, "pass_at_1": 0.0, "captured": 0, "trained": 0, "unique_tokens": 0,
        "total_tokens": 0, "trained_rollouts": 0, "seconds": {"rollouts": 1.0, "update": 0.0},
        "by_harness": {"pi": {"pass_at_1": 0.0}},
    }  # fmt: skip
    line = describe_step(row)
    assert line.startswith("reward ") and "no update" in line and "validation" not in line and "gap" not in line
