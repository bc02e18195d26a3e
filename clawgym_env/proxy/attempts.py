"""A question that is asked again before its answer has arrived gets the same answer.

Clients ask again when a connection broke or nothing came in time. Official SDKs mark that; others send the same bytes.

Invariants:
    1. Equal questions share one generation from its start until its answer is committed. It is cancelled when the last
       who waits for it leaves, not before.
    2. A question asked again later is a new one, whose answer is another sample; unless it is marked as a retry, and
       nothing has continued the answer given.
    3. Each who was given an answer commits or aborts it, once. The first to commit makes it a call; it is discarded
       when the last aborts and nobody committed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Coroutine
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from clawgym_env.types import ChatRequest

#: Answers that are kept for marked retries: a client retries within seconds.
KEPT = 16


class Question:
    """A request, as far as that decides what is sampled.

    Equality reads whole conversations, but only where hashes are equal: where two in all likelihood are the same.
    """

    __slots__ = ("_hash", "_request")

    def __init__(self, request: ChatRequest) -> None:
        last = request.messages[-1].content
        self._request = request
        self._hash = hash((request.model, len(request.messages), len(last), last[:256], last[-256:]))

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Question):
            return NotImplemented
        return self._hash == other._hash and _asked(self._request) == _asked(other._request)


def _asked(request: ChatRequest) -> tuple[object, ...]:
    sampling = request.temperature, request.top_p, request.top_k, request.max_tokens, request.seed, request.stop
    return request.model, sampling, request.messages, request.tools


class Numbered(Protocol):
    """An answer that can be told from others."""

    @property
    def number(self) -> int: ...


A = TypeVar("A", bound=Numbered)


@dataclass(slots=True, eq=False)
class Attempt(Generic[A]):
    """One generation and those who wait for it.

    Attributes:
        waiting: Who neither left nor committed nor aborted.
        committed: Somebody committed the answer; ``call`` is the call it became, where it became one.
        over: Nobody will have its answer any more.
    """

    question: Question
    task: asyncio.Task[A]
    waiting: int = 0
    committed: bool = False
    call: int | None = None
    over: bool = False


class Attempts(Generic[A]):
    """See the module's invariants.

    Args:
        discard: Told of every answer that was sampled whole and then not committed.
    """

    def __init__(self, discard: Callable[[A], None]) -> None:
        self._discard = discard
        self._pending: dict[Question, Attempt[A]] = {}
        self._given: dict[int, Attempt[A]] = {}
        self._answered: dict[Question, Attempt[A]] = {}
        self._open: set[Attempt[A]] = set()

    @property
    def in_flight(self) -> int:
        """Generations whose answers are neither committed nor given up."""
        return len(self._open)

    def find(self, question: Question, *, retry: bool) -> Attempt[A] | None:
        """The attempt whose answer a question gets; ``None`` where it is to be sampled.

        Args:
            retry: The client marked it as one.
        """
        attempt = self._pending.get(question)
        return self._answered.get(question) if attempt is None and retry else attempt

    def begin(self, question: Question, generation: Coroutine[Any, Any, A]) -> Attempt[A]:
        """Starts a generation, to be joined or entered at once."""
        attempt = Attempt(question, asyncio.create_task(generation))
        self._pending[question] = attempt
        self._open.add(attempt)
        return attempt

    async def join(self, attempt: Attempt[A]) -> A:
        """The attempt's answer, to be followed by one ``commit`` or ``abort``: ``enter``, wait, ``take``.

        Raises:
            Exception: whatever its generation raised.
        """
        self.enter(attempt)
        try:
            await asyncio.wait([attempt.task])
        except BaseException:
            await self.leave(attempt)
            raise
        return self.take(attempt)

    def enter(self, attempt: Attempt[A]) -> None:
        """One more waits for an attempt's task; to be followed by ``take`` when it is done, or by ``leave``."""
        attempt.waiting += 1

    def take(self, attempt: Attempt[A]) -> A:
        """The answer of an attempt that is done, to be followed by one ``commit`` or ``abort``.

        Raises:
            Exception: whatever its generation raised.
        """
        try:
            answer = attempt.task.result()
        except BaseException:
            attempt.waiting -= 1
            if attempt.waiting == 0 and not attempt.over:
                self._close(attempt)
            raise
        self._given[answer.number] = attempt
        return answer

    async def leave(self, attempt: Attempt[A]) -> None:
        """One of those who waited goes; with the last the generation ends."""
        attempt.waiting -= 1
        if attempt.waiting > 0 or attempt.committed or attempt.over:
            return
        self._end(attempt)
        attempt.task.cancel()
        attempt.task.add_done_callback(lambda task: self._ended(attempt, task))
        await asyncio.wait([attempt.task])

    def commit(self, answer: A, make: Callable[[], int | None]) -> None:
        """Makes an answer a call.

        Args:
            make: Does it, where nobody did before; returns the call's id, ``None`` where it is no call of the policy.
        """
        attempt = self._given[answer.number]
        self._settle(attempt, answer)
        if attempt.committed:
            return
        attempt.committed = True
        self._close(attempt)
        attempt.call = make()
        self._answered.pop(attempt.question, None)
        self._answered[attempt.question] = attempt
        if len(self._answered) > KEPT:
            del self._answered[next(iter(self._answered))]

    def abort(self, answer: A) -> None:
        """The answer did not reach one of those who waited."""
        attempt = self._given[answer.number]
        self._settle(attempt, answer)
        if attempt.waiting == 0 and not attempt.committed:
            self._close(attempt)
            self._discard(answer)

    def forget(self, continued: Collection[int]) -> None:
        """Calls whose answers have arrived, as later requests show: they are not given again."""
        for question in [q for q, a in self._answered.items() if a.call in continued]:
            del self._answered[question]

    def _settle(self, attempt: Attempt[A], answer: A) -> None:
        attempt.waiting -= 1
        if attempt.waiting == 0:
            del self._given[answer.number]

    def _ended(self, attempt: Attempt[A], task: asyncio.Task[A]) -> None:
        """A generation that nobody waits for is over: cancelled, failed, or done because it could not be stopped."""
        self._open.discard(attempt)
        if not task.cancelled() and task.exception() is None:
            self._discard(task.result())

    def _close(self, attempt: Attempt[A]) -> None:
        self._end(attempt)
        self._open.discard(attempt)

    def _end(self, attempt: Attempt[A]) -> None:
        attempt.over = not attempt.committed
        if self._pending.get(attempt.question) is attempt:
            del self._pending[attempt.question]
