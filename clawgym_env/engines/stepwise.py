"""Whoever calls ``env.step`` is the policy: a call waits here until its tokens are handed in.

Invariant: calls are answered first in, first out, one a step; nothing waits for a call that cannot come, since only a
pending call or the end of the rollout wakes the waiter.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import numpy as np

from clawgym_env.engines.base import EngineRequest
from clawgym_env.errors import EngineError
from clawgym_env.types import Generation, TokenArray


@dataclass(frozen=True, slots=True, eq=False)
class PendingCall:
    """A model call that waits for its answer."""

    request: EngineRequest
    answer: asyncio.Future[Generation]


class StepwiseEngine:
    """An engine without a model; lives in one event loop."""

    def __init__(self, *, max_context: int) -> None:
        self._max_context = max_context
        self._pending: asyncio.Queue[PendingCall] = asyncio.Queue()
        self._unanswered: set[PendingCall] = set()
        self._closed = False

    @property
    def max_context(self) -> int:
        """Tokens that one call may hold."""
        return self._max_context

    @property
    def policy_version(self) -> int:
        """Always 0: the caller's policy has its own count."""
        return 0

    @property
    def waiting(self) -> int:
        """Calls that wait for an answer, the one in hand not counted."""
        return self._pending.qsize()

    async def generate(self, request: EngineRequest) -> Generation:
        """Waits until someone answers.

        Raises:
            EngineError: the engine was closed.
        """
        if self._closed:
            raise EngineError("the environment was closed")
        answer: asyncio.Future[Generation] = asyncio.get_running_loop().create_future()
        call = PendingCall(request, answer)
        self._unanswered.add(call)
        try:
            await self._pending.put(call)
            return await answer
        finally:
            self._unanswered.discard(call)

    async def next_call(self) -> PendingCall:
        """The oldest call whose client still waits."""
        while True:
            call = await self._pending.get()
            if not call.answer.done():
                return call

    def answer(self, call: PendingCall, token_ids: TokenArray) -> None:
        """Answers a call; log-probs are NaN, since only the caller knows its policy's."""
        if call.answer.done():
            return
        ids = np.asarray(token_ids, dtype=np.int64)
        limit = call.request.sampling.max_tokens
        cut = ids[:limit]
        stopped = len(cut) > 0 and int(cut[-1]) in call.request.stop_token_ids
        call.answer.set_result(
            Generation(
                cut,
                np.full(len(cut), np.nan, np.float32),
                np.zeros(len(cut), np.int64),
                "stop" if stopped or len(ids) < limit else "length",
            )
        )

    async def aclose(self) -> None:
        """Fails every call that still waits, the one in hand included."""
        self._closed = True
        for call in self._unanswered:
            if not call.answer.done():
                call.answer.set_exception(EngineError("the environment was closed"))
