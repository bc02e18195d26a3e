"""Who gets whose answer, and when a generation ends."""

from __future__ import annotations

import asyncio
import dataclasses
import gc
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clawgym_env.proxy.attempts import KEPT, Attempts, Question
from clawgym_env.types import ChatRequest, Message, ToolCall, ToolSpec

ASKED = ChatRequest("policy", (Message("system", "s"), Message("user", "u")), (ToolSpec("bash"),))


@dataclass(frozen=True)
class Answer:
    number: int


class Desk:
    """Attempts whose generations end when the test says so."""

    def __init__(self) -> None:
        self.discarded: list[int] = []
        self.calls: list[int] = []
        self.gates: list[asyncio.Event] = []
        self.begun: list[int] = []
        self.cancelled: list[int] = []
        self.attempts: Attempts[Answer] = Attempts(lambda answer: self.discarded.append(answer.number))

    async def ask(self, request: ChatRequest = ASKED, *, retry: bool = False) -> Answer:
        question = Question(request)
        attempt = self.attempts.find(question, retry=retry)
        if attempt is None:
            self.gates.append(asyncio.Event())
            attempt = self.attempts.begin(question, self._generate(len(self.gates) - 1))
        return await self.attempts.join(attempt)

    def asking(self, request: ChatRequest = ASKED, *, retry: bool = False) -> asyncio.Task[Answer]:
        return asyncio.create_task(self.ask(request, retry=retry))

    async def _generate(self, number: int) -> Answer:
        self.begun.append(number)
        try:
            await self.gates[number].wait()
        except asyncio.CancelledError:
            self.cancelled.append(number)
            raise
        return Answer(number)

    def commit(self, answer: Answer) -> None:
        def make() -> int:
            self.calls.append(answer.number)
            return len(self.calls) - 1

        self.attempts.commit(answer, make)


def run(scenario: Callable[[Desk], Awaitable[None]]) -> Desk:
    async def main() -> Desk:
        desk = Desk()
        async with asyncio.timeout(10):
            await scenario(desk)
        return desk

    return asyncio.run(main())


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def test_a_question_asked_twice_is_answered_once_and_is_one_call() -> None:
    async def scenario(desk: Desk) -> None:
        asks = [desk.asking(), desk.asking(dataclasses.replace(ASKED, stream=True))]
        await settle()
        assert len(desk.gates) == 1 and desk.attempts.in_flight == 1
        desk.gates[0].set()
        answers = await asyncio.gather(*asks)
        assert answers[0] is answers[1]
        late = desk.asking()  # not committed yet: the same still
        await settle()
        for answer in answers:
            desk.commit(answer)
        desk.commit(await late)

    desk = run(scenario)
    assert (desk.calls, desk.discarded, desk.cancelled, desk.attempts.in_flight) == ([0], [], [], 0)


@pytest.mark.parametrize("leaver", [0, 1])
def test_one_who_leaves_takes_nothing_away(leaver: int) -> None:
    async def scenario(desk: Desk) -> None:
        asks = [desk.asking(), desk.asking()]
        await settle()
        asks[leaver].cancel()
        await settle()
        assert asks[leaver].cancelled() and desk.attempts.in_flight == 1
        desk.gates[0].set()
        desk.commit(await asks[1 - leaver])

    desk = run(scenario)
    assert (desk.calls, desk.discarded, desk.cancelled) == ([0], [], [])


def test_the_last_who_leaves_ends_the_generation() -> None:
    async def scenario(desk: Desk) -> None:
        asks = [desk.asking() for _ in range(3)]
        await settle()
        for ask in asks:
            assert desk.cancelled == []
            ask.cancel()
            await asyncio.wait([ask])
        assert desk.cancelled == [0] and desk.attempts.in_flight == 0
        again = desk.asking()
        await settle()
        desk.gates[1].set()
        assert await again == Answer(1)

    assert run(scenario).discarded == []


def test_who_comes_after_the_last_has_left_asks_anew() -> None:
    """The cancelled generation takes its time; nobody may join it any more."""

    async def scenario(desk: Desk) -> None:
        stubborn = asyncio.Event()

        async def generate() -> Answer:
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                await stubborn.wait()
            return Answer(7)

        attempt = desk.attempts.begin(Question(ASKED), generate())
        first = asyncio.create_task(desk.attempts.join(attempt))
        await settle()
        first.cancel()
        await settle()
        assert desk.attempts.in_flight == 1, "until it has ended"
        second = desk.asking()
        await settle()
        assert desk.attempts.in_flight == 2
        first.cancel()  # impatient
        await settle()
        stubborn.set()
        await settle()
        assert desk.attempts.in_flight == 1 and first.cancelled()
        desk.gates[0].set()
        desk.commit(await second)

    desk = run(scenario)
    assert (desk.calls, desk.discarded) == ([0], [7])


@pytest.mark.parametrize("commits", [0, 1, 2])
def test_an_answer_is_discarded_when_the_last_aborts_and_nobody_committed(commits: int) -> None:
    async def scenario(desk: Desk) -> None:
        asks = [desk.asking(), desk.asking()]
        await settle()
        desk.gates[0].set()
        for k, answer in enumerate(await asyncio.gather(*asks)):
            assert desk.discarded == []
            if k >= 2 - commits:
                desk.commit(answer)
            else:
                desk.attempts.abort(answer)

    desk = run(scenario)
    assert (desk.calls, desk.discarded) == (([0], []) if commits else ([], [0]))
    assert desk.attempts.in_flight == 0


def test_an_answer_that_comes_as_its_only_client_leaves_is_discarded() -> None:
    async def scenario(desk: Desk) -> None:
        ask = desk.asking()
        await settle()
        desk.gates[0].set()
        await asyncio.sleep(0)  # the generation is done, the client has not been woken
        ask.cancel()
        await asyncio.wait([ask])
        await settle()
        assert ask.cancelled()

    desk = run(scenario)
    assert (desk.calls, desk.discarded, desk.attempts.in_flight) == ([], [0], 0)


def test_a_failure_reaches_all_who_wait_and_leaves_nothing() -> None:
    async def scenario(desk: Desk) -> None:
        async def generate() -> Answer:
            await asyncio.sleep(0)
            raise ZeroDivisionError("broken")

        attempt = desk.attempts.begin(Question(ASKED), generate())
        outcomes = await asyncio.gather(*(desk.attempts.join(attempt) for _ in range(2)), return_exceptions=True)
        assert [type(o) for o in outcomes] == [ZeroDivisionError] * 2
        assert desk.attempts.in_flight == 0 and desk.attempts.find(Question(ASKED), retry=True) is None

    assert run(scenario).discarded == []
    gc.collect()  # an exception that nobody looked at would be a warning now


def test_a_later_question_is_a_new_one_unless_marked_as_a_retry() -> None:
    async def scenario(desk: Desk) -> None:
        async def answered(*, retry: bool) -> int:
            ask = desk.asking(retry=retry)
            await settle()
            desk.gates[-1].set()
            desk.commit(await ask)
            return (await ask).number

        assert [await answered(retry=r) for r in (False, True, False, True, True)] == [0, 0, 1, 1, 1]
        assert desk.calls == [0, 1]
        desk.attempts.forget({1})
        assert await answered(retry=True) == 2, "the harness has gone on: this is no retry of that answer"
        desk.attempts.forget({0, 1})
        assert await answered(retry=True) == 2

    run(scenario)


def test_a_retry_that_goes_away_takes_nothing_back() -> None:
    async def scenario(desk: Desk) -> None:
        first = desk.asking()
        await settle()
        desk.gates[0].set()
        desk.commit(await first)
        desk.attempts.abort(await desk.ask(retry=True))
        retry = desk.asking(retry=True)
        retry.cancel()
        await asyncio.wait([retry])

    desk = run(scenario)
    assert (desk.calls, desk.discarded, desk.attempts.in_flight) == ([0], [], 0)


def test_few_answers_are_kept_for_retries() -> None:
    async def scenario(desk: Desk) -> None:
        requests = [dataclasses.replace(ASKED, max_tokens=k + 1) for k in range(KEPT + 2)]
        for request in requests:
            ask = desk.asking(request)
            await settle()
            desk.gates[-1].set()
            desk.commit(await ask)
        found = [desk.attempts.find(Question(r), retry=True) for r in requests]
        assert [f is not None for f in found] == [False] * 2 + [True] * KEPT

    run(scenario)


SAME: list[ChatRequest] = [
    dataclasses.replace(ASKED, stream=True),
    dataclasses.replace(ASKED, wants=frozenset({"usage"})),
    dataclasses.replace(ASKED, extra={"user": "x"}),
]
OTHER: list[ChatRequest] = [
    dataclasses.replace(ASKED, model="other"),
    dataclasses.replace(ASKED, tools=()),
    dataclasses.replace(ASKED, tools=(ToolSpec("bash", parameters={"type": "object"}),)),
    dataclasses.replace(ASKED, messages=ASKED.messages[:1]),
    dataclasses.replace(ASKED, messages=(Message("system", "t"), ASKED.messages[1])),
    dataclasses.replace(ASKED, messages=(ASKED.messages[0], Message("user", "u ")),),
    dataclasses.replace(ASKED, messages=(ASKED.messages[0], Message("assistant", "u", "thought"))),
    dataclasses.replace(ASKED, messages=(ASKED.messages[0], Message("user", "u", None, (ToolCall("bash", {}, "1"),)))),
    *(
        dataclasses.replace(ASKED, **{name: value})  # type: ignore[arg-type]
        for name, value in [
            ("temperature", 0.5), ("top_p", 0.5), ("top_k", 3), ("max_tokens", 3), ("seed", 3), ("stop", ("x",)),
        ]
    ),
]  # fmt: skip


@pytest.mark.parametrize("request_", SAME)
def test_how_the_answer_is_to_be_sent_does_not_make_another_question(request_: ChatRequest) -> None:
    assert Question(request_) == Question(ASKED) and hash(Question(request_)) == hash(Question(ASKED))


@pytest.mark.parametrize("request_", OTHER)
def test_what_decides_the_answer_makes_another_question(request_: ChatRequest) -> None:
    assert Question(request_) != Question(ASKED)


def test_a_question_is_no_request() -> None:
    assert Question(ASKED) != ASKED


@given(st.data())
@settings(max_examples=100, deadline=None)
def test_whatever_happens_every_answer_is_committed_or_discarded_once(data: st.DataObject) -> None:
    """Clients ask, leave, get answers and use them or not, in any order; at the end nothing is left over."""

    async def scenario(desk: Desk) -> None:
        waiting: list[asyncio.Task[Answer]] = []
        given: list[Answer] = []
        for _ in range(data.draw(st.integers(1, 12))):
            step = data.draw(st.sampled_from(["ask", "ask", "retry", "leave", "answer", "commit", "abort", "turn"]))
            if step in ("ask", "retry"):
                request = dataclasses.replace(ASKED, max_tokens=data.draw(st.integers(1, 2)))
                waiting.append(desk.asking(request, retry=step == "retry"))
            elif step == "leave" and waiting:
                waiting[data.draw(st.integers(0, len(waiting) - 1))].cancel()
            elif step == "answer" and desk.gates:
                desk.gates[data.draw(st.integers(0, len(desk.gates) - 1))].set()
            elif step in ("commit", "abort") and given:
                answer = given.pop(data.draw(st.integers(0, len(given) - 1)))
                (desk.commit if step == "commit" else desk.attempts.abort)(answer)
            else:
                await asyncio.sleep(0)
            given += [t.result() for t in waiting if t.done() and not t.cancelled()]
            waiting = [t for t in waiting if not t.done()]
        for task in waiting:
            task.cancel()
        for outcome in await asyncio.gather(*waiting, return_exceptions=True):
            given += [outcome] if isinstance(outcome, Answer) else []
        for answer in given:
            desk.attempts.abort(answer)
        await settle()

    desk = run(scenario)
    assert desk.attempts.in_flight == 0
    assert len(set(desk.calls)) == len(desk.calls) and not set(desk.calls) & set(desk.discarded)
    ended = sorted([*desk.calls, *desk.discarded, *desk.cancelled])
    assert ended == sorted(desk.begun), "each generation ended in exactly one way"
