"""Drawing: greedy, temperature, top-k, top-p, and their log-probabilities."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from torchrl_ext.sampling import draw, filter_logits


def one(
    logits: list[float], uniform: float, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0
) -> tuple[int, float]:
    token, log_prob = draw(
        torch.tensor([logits]),
        torch.tensor([temperature]),
        torch.tensor([top_k]),
        torch.tensor([top_p]),
        torch.tensor([uniform], dtype=torch.float64),
    )
    return int(token), float(log_prob)


PROBS = [0.1, 0.4, 0.2, 0.3]
LOGITS = [math.log(p) for p in PROBS]


@pytest.mark.parametrize(
    ("uniform", "token"), [(0.0, 0), (0.0999, 0), (0.11, 1), (0.49, 1), (0.51, 2), (0.71, 3), (0.9999999, 3)]
)
def test_the_uniform_number_picks_by_cumulative_mass(uniform: float, token: int) -> None:
    drawn, log_prob = one(LOGITS, uniform)
    assert drawn == token
    assert log_prob == pytest.approx(LOGITS[token], abs=1e-6)


def test_greedy_is_scored_untempered_and_unfiltered() -> None:
    assert one(LOGITS, 0.0, temperature=0.0, top_k=1, top_p=0.1) == (1, pytest.approx(math.log(0.4), abs=1e-6))


def test_temperature_scales_the_scored_distribution() -> None:
    squared = [p**2 / sum(q**2 for q in PROBS) for p in PROBS]
    assert one(LOGITS, 0.99, temperature=0.5) == (3, pytest.approx(math.log(squared[3]), abs=1e-6))


def test_top_k_renormalises() -> None:
    assert one(LOGITS, 0.0, top_k=2) == (1, pytest.approx(math.log(4 / 7), abs=1e-6))
    assert one(LOGITS, 0.9999999, top_k=2) == (3, pytest.approx(math.log(3 / 7), abs=1e-6))
    assert one(LOGITS, 0.0, top_k=99) == (0, pytest.approx(math.log(0.1), abs=1e-6))


@pytest.mark.parametrize(
    ("top_p", "kept"),
    [(0.05, {1}), (0.39, {1}), (0.41, {1, 3}), (0.69, {1, 3}), (0.71, {1, 2, 3}), (1.0, {0, 1, 2, 3})],
)
def test_top_p_keeps_the_smallest_sufficient_set(top_p: float, kept: set[int]) -> None:
    out = filter_logits(torch.tensor([LOGITS]), torch.tensor([0]), torch.tensor([top_p]))
    assert set(torch.isfinite(out[0]).nonzero()[:, 0].tolist()) == kept


def test_top_p_counts_mass_after_top_k() -> None:
    # of the two that top-k leaves, 0.4 / 0.7 = 0.57 of the mass already exceeds 0.5
    out = filter_logits(torch.tensor([LOGITS]), torch.tensor([2]), torch.tensor([0.5]))
    assert torch.isfinite(out[0]).nonzero()[:, 0].tolist() == [1]


def test_rows_do_not_disturb_each_other() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(6, 50, generator=generator) * 3
    settings = (
        torch.tensor([0.0, 1.0, 0.7, 1.0, 1.3, 0.5]),
        torch.tensor([0, 0, 5, 0, 3, 0]),
        torch.tensor([1.0, 1.0, 1.0, 0.8, 0.9, 0.3]),
        torch.rand(6, dtype=torch.float64, generator=generator),
    )
    together = draw(logits, *settings)
    for i in range(6):
        alone = draw(logits[i : i + 1], *(s[i : i + 1] for s in settings))
        assert int(alone[0]) == int(together[0][i])
        assert float(alone[1]) == pytest.approx(float(together[1][i]), abs=1e-6)


def frequencies(logits: Tensor, temperature: float, top_k: int, top_p: float, n: int = 40_000) -> tuple[Tensor, Tensor]:
    uniform = torch.rand(n, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    rows = (logits.expand(n, -1), torch.full((n,), temperature), torch.full((n,), top_k), torch.full((n,), top_p))
    tokens, log_probs = draw(*rows, uniform)
    expected = torch.zeros(logits.shape[-1]).scatter_(0, tokens, log_probs.exp())
    return torch.bincount(tokens, minlength=logits.shape[-1]) / n, expected


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"), [(1.0, 0, 1.0), (0.6, 0, 1.0), (1.0, 4, 1.0), (1.4, 6, 0.8)]
)
def test_tokens_come_as_often_as_their_log_probs_say(temperature: float, top_k: int, top_p: float) -> None:
    logits = torch.randn(10, generator=torch.Generator().manual_seed(2))
    seen, expected = frequencies(logits, temperature, top_k, top_p)
    assert float(expected.sum()) == pytest.approx(1.0, abs=1e-4)
    torch.testing.assert_close(seen, expected, rtol=0, atol=0.01)


def test_impossible_tokens_are_never_drawn() -> None:
    logits = torch.tensor([-torch.inf, 0.0, -torch.inf, 0.0, -torch.inf]).tolist()
    assert {one(logits, u)[0] for u in (0.0, 0.5, 1 - 2**-53)} == {1, 3}
