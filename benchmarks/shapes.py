"""Rollouts as token ids, for the benchmarks of the tree: made on the fly and the same for each structure.

A call names the earlier call that its messages would be matched to (``prefer``), as the proxy does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np

from clawgym_env.types import TokenArray

VOCABULARY = 150_000


@dataclass(frozen=True, slots=True, eq=False)
class Call:
    """One model call; ``prefer`` is the index of the earlier call that it goes on from."""

    prompt: TokenArray
    response: TokenArray
    prefer: int | None

    @property
    def history(self) -> TokenArray:
        return np.concatenate([self.prompt, self.response])


Shape = Callable[[], Iterator[Call]]


def chain(calls: int, observed: int, sampled: int, seed: int = 0) -> Iterator[Call]:
    """One history that only grows."""
    rng = np.random.default_rng(seed)
    history = np.empty(0, dtype=np.int64)
    for k in range(calls):
        prompt = np.concatenate([history, rng.integers(0, VOCABULARY, observed)])
        call = Call(prompt, rng.integers(0, VOCABULARY, sampled), k - 1 if k else None)
        yield call
        history = call.history


def agent(seed: int, turns: int, window: int = 40_000) -> Iterator[Call]:
    """A coding agent's rollout.

    A main agent whose tool output and answers are log-normal in length; every so often two or three sub-agents whose
    calls interleave, an answer that is asked for again, old tool output that is masked (a fork in mid-history), and,
    where the window is full, a summary by a side call and a history begun anew. All agents share the tools that open
    their prompts.
    """
    maker = _Agent(np.random.default_rng(seed))
    lines = [_Line(maker.opening(3_000))]
    main_turns = 0
    while main_turns < turns or len(lines) > 1:
        at = int(maker.rng.integers(1, len(lines))) if len(lines) > 1 else 0
        line = lines[at]
        if at and line.left == 0:
            lines.pop(at)
            continue
        line.left -= 1
        call = Call(line.prompt, maker.tokens(120), line.last)
        yield call
        number = maker.count()
        if maker.rng.random() < 0.04:
            call = Call(line.prompt, maker.tokens(120), line.last)
            yield call
            number = maker.count()
        line.goes_on(call.history, maker.tokens(300), number)
        if at:
            continue
        main_turns += 1
        event = maker.rng.random()
        if len(line.prompt) > window:
            yield Call(np.concatenate([maker.tokens(400), line.prompt[4_000:]]), maker.tokens(800), None)
            maker.count()
            lines[0] = _Line(maker.opening(3_000))
        elif event < 0.05:
            cut = int(len(line.prompt) * maker.rng.uniform(0.5, 0.9))
            line.mask(cut, maker.tokens(20))
        elif event < 0.12 and main_turns < turns:
            many = int(maker.rng.integers(2, 4))
            lines += [_Line(maker.opening(600), left=int(maker.rng.integers(4, 12))) for _ in range(many)]


class _Agent:
    """Draws token runs and counts the calls."""

    def __init__(self, rng: np.random.Generator) -> None:
        self.rng = rng
        self._tools = rng.integers(0, VOCABULARY, 2_500)
        self._calls = 0

    def opening(self, size: int) -> TokenArray:
        return np.concatenate([self._tools, self.rng.integers(0, VOCABULARY, size)])

    def tokens(self, median: int) -> TokenArray:
        size = int(np.clip(self.rng.lognormal(np.log(median), 1.0), 10, 4_000))
        return self.rng.integers(0, VOCABULARY, size)

    def count(self) -> int:
        self._calls += 1
        return self._calls - 1


@dataclass(slots=True, eq=False)
class _Line:
    """One agent: its next prompt, (tokens, call) of the histories in it, and how many calls a sub-agent has left."""

    prompt: TokenArray
    past: list[tuple[int, int]] = field(default_factory=list)
    left: int = 0

    @property
    def last(self) -> int | None:
        return self.past[-1][1] if self.past else None

    def goes_on(self, history: TokenArray, observed: TokenArray, call: int) -> None:
        self.prompt = np.concatenate([history, observed])
        self.past.append((len(history), call))

    def mask(self, cut: int, shown: TokenArray) -> None:
        self.prompt = np.concatenate([self.prompt[:cut], shown, self.prompt[cut + 200 :]])
        self.past = [(size, call) for size, call in self.past if size <= cut]
