"""One rollout at the model boundary: requests come in as messages, leave as answers, and stay as a prefix tree.

Invariants:
    1. A draft becomes a call only by ``commit``; ``abort`` leaves nothing but a count of its tokens.
    2. The history of a continued call is grafted id for id; text never becomes tokens twice.
    3. Budgets bound calls and sampled tokens; a call beyond one is refused and sets ``exhausted``. Calls that are
       pending at once may each use the tokens that were left when they began.
    4. A request that repeats one whose answer has not arrived gets that answer (:mod:`clawgym_env.proxy.attempts`), and
       counts once.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Literal

import numpy as np

from clawgym_env.dialect import Dialect
from clawgym_env.engines.base import Engine, EngineRequest
from clawgym_env.errors import BudgetExhausted, ContextOverflow, EngineError
from clawgym_env.proxy.attempts import Attempt, Attempts, Question
from clawgym_env.proxy.calls import Admitted, CallRecord, Draft, FrozenCall, FrozenModel, Rendered
from clawgym_env.proxy.echoes import mint
from clawgym_env.proxy.matching import History, Proposal
from clawgym_env.proxy.seeds import CallSeeds
from clawgym_env.proxy.stopping import cut_at_stop
from clawgym_env.rendering import ChatRenderer, linked, off_loop
from clawgym_env.tree.ledger import Ledger
from clawgym_env.tree.prefix_tree import PrefixTree
from clawgym_env.types import Budget, ChatRequest, Generation, Message, ModelCall, Sampling, ToolCall

SamplingPolicy = Literal["override", "honour"]


@dataclass(slots=True, eq=False)
class Session:
    """See the module's invariants.

    Attributes:
        sampling: How answers are drawn.
        sampling_policy: ``override``: what the harness asks for counts only where it lowers the token limit.
            ``honour``: it takes the place of ``sampling``, field by field.
        frozen: Model names (shell patterns) -> models that answer them; every other name is the policy.
        call_timeout_s: Longest time that one answer may take.
        dialect: How the rollout's harness speaks.
        key: API key that names this rollout where the path does not.
        seed: Seeds every generation of this rollout by prompt and repetition, whatever the order of arrival; ``None``
            leaves sampling unseeded.
        served: Calls that reached the engine.
        exhausted: Set when a call was refused because a budget is met.
        failed: Set when the engine failed; ``failure`` says why.
        misdirected: The first request that was sent to a path of no API, and what was said to it.
    """

    rollout_id: str
    engine: Engine
    renderer: ChatRenderer
    sampling: Sampling = field(default_factory=Sampling)
    budget: Budget = field(default_factory=Budget)
    seed: int | None = None
    sampling_policy: SamplingPolicy = "override"
    frozen: Mapping[str, FrozenModel] = field(default_factory=dict)
    call_timeout_s: float = 600.0
    dialect: Dialect = field(default_factory=Dialect)
    tree: PrefixTree = field(default_factory=PrefixTree)
    ledger: Ledger = field(default_factory=Ledger)
    records: list[CallRecord] = field(default_factory=list)
    frozen_calls: list[FrozenCall] = field(default_factory=list)
    served: int = 0
    failure: str | None = None
    misdirected: str | None = None
    exhausted: asyncio.Event = field(default_factory=asyncio.Event)
    failed: asyncio.Event = field(default_factory=asyncio.Event)
    _history: History = field(init=False)
    _attempts: Attempts[Draft] = field(init=False)
    _seeds: CallSeeds | None = field(init=False)
    _began: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        self._history = History(self.dialect)
        self._seeds = None if self.seed is None else CallSeeds(self.seed)
        self._attempts = Attempts(self._discard)

    @property
    def in_flight(self) -> int:
        """Calls that are neither committed nor aborted."""
        return self._attempts.in_flight

    @property
    def continued(self) -> frozenset[int]:
        """Calls whose answers a later call's request told, whether or not its tokens extend theirs."""
        return frozenset(self._history.continued)

    @property
    def key(self) -> str:
        """The API key that names this rollout."""
        return f"clawgym-{self.rollout_id}"

    def context_of(self, model: str) -> int:
        """Tokens that one call to a model may hold."""
        frozen = self._frozen(model)
        return (self.engine if frozen is None else frozen.engine).max_context

    async def count(self, request: ChatRequest) -> int:
        """Prompt tokens that a request would be served with."""
        return len((await self._render(request)).prompt_ids)

    async def admit(self, request: ChatRequest, headers: Mapping[str, str]) -> Admitted:
        """Everything that can refuse a request without sampling.

        Args:
            headers: Of the HTTP request, names in lower case.

        Raises:
            BudgetExhausted: the rollout may make no more calls.
            ContextOverflow: the prompt leaves no room for an answer.
            RenderingError: no template holds the messages.
        """
        started = time.monotonic()
        question, hints = Question(request), self.dialect.hints(headers, request.messages)
        earlier = self._attempts.find(question, retry=hints.retry)
        if earlier is None:
            self._check_budget()
        rendered = await self._render(request)
        proposal, prompt, frozen = rendered.proposal, rendered.prompt_ids, rendered.frozen
        engine = self.engine if frozen is None else frozen.engine
        room = engine.max_context - len(prompt)
        if room < 1:
            raise ContextOverflow(len(prompt), engine.max_context)
        base = self.sampling if frozen is None else frozen.sampling
        wanted = _requested(base, request) if self.sampling_policy == "honour" or frozen is not None else base
        left = room if frozen is not None else max(1, self.budget.max_tokens - self.ledger.captured)
        sampling = replace(wanted, max_tokens=min(base.max_tokens, room, left, request.max_tokens or room))
        if proposal.messages is not request.messages:
            request = replace(request, messages=proposal.messages)
        return Admitted(request, question, hints, prompt, sampling, proposal, rendered.anew, frozen, earlier, started)

    async def draft(self, admitted: Admitted) -> Draft:
        """Samples and parses an answer, to be followed by one ``commit`` or ``abort``: ``begin``, wait, ``take``.

        Raises:
            BudgetExhausted: requests that were admitted meanwhile have used it up.
            EngineError: the engine failed.
        """
        attempt = self.begin(admitted)
        try:
            await asyncio.wait([attempt.task])
        except BaseException:
            await self.leave(attempt)
            raise
        return self.take(attempt, admitted)

    def begin(self, admitted: Admitted) -> Attempt[Draft]:
        """Starts to answer, to be followed by ``take`` when the attempt's task is done, or by ``leave``.

        Raises:
            BudgetExhausted: requests that were admitted meanwhile have used it up.
        """
        attempt = admitted.earlier
        if attempt is None or attempt.over:
            attempt = self._attempts.find(admitted.question, retry=admitted.hints.retry)
        if attempt is None:
            self._check_budget()
            self.served += 1
            attempt = self._attempts.begin(admitted.question, self._sample(admitted, self.served))
        self._attempts.enter(attempt)
        return attempt

    def take(self, attempt: Attempt[Draft], admitted: Admitted) -> Draft:
        """The answer of an attempt that is done, to be followed by one ``commit`` or ``abort``.

        Raises:
            EngineError: the engine failed.
        """
        draft = self._attempts.take(attempt)
        if draft.admitted.question is admitted.question:
            return draft
        self.ledger.note("retry answered by the first attempt's answer")
        return replace(draft, admitted=replace(draft.admitted, request=admitted.request))

    async def leave(self, attempt: Attempt[Draft]) -> None:
        """The client has gone away before the answer."""
        await self._attempts.leave(attempt)

    def commit(self, draft: Draft) -> None:
        """Makes a draft part of the rollout, where nobody did before; called before its terminal event is sent."""
        self._attempts.commit(draft, lambda: self._record(draft))

    def abort(self, draft: Draft) -> None:
        """The answer cannot reach the harness whole: nothing is committed, unless the same answer reaches a retry."""
        self._attempts.abort(draft)

    async def _sample(self, admitted: Admitted, number: int) -> Draft:
        request, prompt, frozen = admitted.request, admitted.prompt_ids, admitted.frozen
        renderer = self.renderer if frozen is None else frozen.renderer
        if self._seeds is not None and admitted.sampling.seed is None and frozen is None:
            seed = self._seeds.next(prompt, admitted.proposal.parent)
            admitted = replace(admitted, sampling=replace(admitted.sampling, seed=seed))
        sampled = await self._generate(
            EngineRequest(prompt, admitted.sampling, renderer.stop_token_ids, request, self.rollout_id), frozen
        )
        generation, stop_text = cut_at_stop(sampled, request.stop, renderer.decode)
        self.ledger.aborted += 0 if frozen else len(sampled.token_ids) - len(generation.token_ids)
        reply = renderer.parse(generation.token_ids, prompt, request.tools)
        if stop_text is not None:
            reply = replace(reply, content=reply.content.partition(stop_text)[0])
        return Draft(number, admitted, generation, _identify(reply, number), stop_text)

    def _discard(self, draft: Draft) -> None:
        if draft.admitted.frozen is None:
            self.ledger.aborted += len(draft.generation.token_ids)

    def _record(self, draft: Draft) -> int | None:
        admitted, generation = draft.admitted, draft.generation
        seconds = time.monotonic() - admitted.started_s
        began = admitted.started_s - self._began
        request, proposal = admitted.request, admitted.proposal
        if admitted.frozen is not None:
            tokens = len(admitted.prompt_ids), len(generation.token_ids)
            self.frozen_calls.append(FrozenCall(request.model, draft.reply, *tokens, began, seconds))
            return None
        call = ModelCall(
            call_id=len(self.records),
            prompt_tokens=len(admitted.prompt_ids),
            sampled_tokens=len(generation.token_ids),
            cached_tokens=generation.cached_tokens,
            finish_reason=generation.finish_reason,
            sampling=admitted.sampling,
        )
        self.tree.attach(call.call_id, admitted.prompt_ids, generation, prefer=proposal.parent)
        if self._seeds is not None:
            self._seeds.commit(call.call_id, admitted.prompt_ids, generation.token_ids, proposal.parent)
        self._history.commit(call.call_id, proposal, draft.reply)
        self._attempts.forget(self._history.continued)
        self.ledger.captured += len(generation.token_ids)
        self._note(admitted)
        new, tools = request.messages[proposal.shared :], tuple(t.name for t in request.tools)
        self.records.append(
            CallRecord(
                call,
                proposal.parent,
                new,
                draft.reply,
                tools,
                began,
                seconds,
                proposal.answers,
                admitted.hints,
                request.extra,
            )
        )
        return call.call_id

    def fail(self, why: str) -> None:
        """Marks the rollout as spoilt by us, not by the policy."""
        self.failure = why
        self.failed.set()

    async def _generate(self, request: EngineRequest, frozen: FrozenModel | None) -> Generation:
        engine = self.engine if frozen is None else frozen.engine
        try:
            async with asyncio.timeout(self.call_timeout_s):
                generation = await engine.generate(request)
            if len(generation.token_ids) == 0:
                raise EngineError("the engine answered without a single token")
        except TimeoutError:
            self.fail(f"no answer within {self.call_timeout_s:g} s")
            raise EngineError(f"no answer within {self.call_timeout_s:g} s") from None
        except EngineError as error:
            self.fail(str(error))
            raise
        return generation

    def _note(self, admitted: Admitted) -> None:
        """What a person should know about a call that is being committed."""
        proposal, sampling = admitted.proposal, admitted.sampling
        for what in sorted(proposal.tolerated):
            self.ledger.note(f"tolerated: {what}")
        for name in proposal.stabilised:
            note = f"taken out of prompts: {name}"
            if note not in self.ledger.notes:
                self.ledger.note(note)
        if admitted.anew is not None:
            self.ledger.note(f"history rendered anew: {admitted.anew}")
        elif proposal.parent is None and self.records:
            self.ledger.note("request rendered from scratch")
        if self.sampling_policy == "override" and _requested(sampling, admitted.request) != sampling:
            self.ledger.note("the run's sampling settings took the place of the harness's")
        if sampling.temperature > 0 and (sampling.top_p < 1 or sampling.top_k > 0):
            self.ledger.note("sampled from a truncated distribution")

    async def _render(self, request: ChatRequest) -> Rendered:
        """What a request continues, its prompt, and who answers it."""
        frozen = self._frozen(request.model)
        if frozen is not None:
            messages, renderer = request.messages, frozen.renderer
            prompt = await off_loop(messages, lambda: renderer.prompt(messages, request.tools))
            return Rendered(Proposal.nothing(messages), prompt, frozen)
        proposal = self._history.propose(request.tools, request.messages)
        why = None
        if proposal.parent is not None:
            history = self.tree.path_ids(proposal.parent)
            before, said = np.split(history, [self.records[proposal.parent].call.prompt_tokens])
            new = linked(proposal.messages, proposal.shared)
            longer = await off_loop(new, lambda: self.renderer.extend(before, said, new, request.tools))
            if longer is not None:
                return Rendered(proposal, longer)
            why = self.renderer.why_not_extended(before, said, new)
            proposal = proposal.from_scratch()
        prompt = await off_loop(proposal.messages, lambda: self.renderer.prompt(proposal.messages, request.tools))
        return Rendered(proposal, prompt, anew=why)

    def _frozen(self, model: str) -> FrozenModel | None:
        return next((served for name, served in self.frozen.items() if fnmatchcase(model, name)), None)

    def _check_budget(self) -> None:
        left = self.budget.max_tokens - self.ledger.captured
        calls = len(self.records) + len(self.frozen_calls) + self.in_flight
        if calls >= self.budget.max_calls or left < 1:
            self.exhausted.set()
            raise BudgetExhausted(
                f"rollout {self.rollout_id} has used up its budget of {self.budget.max_calls} calls and "
                f"{self.budget.max_tokens} sampled tokens; stop here"
            )


def _identify(reply: Message, number: int) -> Message:
    """Gives tool calls their ids."""
    if not reply.tool_calls:
        return reply
    calls = [ToolCall(c.name, c.arguments, mint(number, i)) for i, c in enumerate(reply.tool_calls)]
    return replace(reply, tool_calls=tuple(calls))


def _requested(sampling: Sampling, request: ChatRequest) -> Sampling:
    """Sampling with what the harness asked for in its place; token limits are left to the caller."""
    return replace(
        sampling,
        temperature=sampling.temperature if request.temperature is None else request.temperature,
        top_p=sampling.top_p if request.top_p is None else max(request.top_p, 1e-6),
        top_k=sampling.top_k if request.top_k is None else max(request.top_k, 0),
        seed=sampling.seed if request.seed is None else request.seed % (1 << 63),
    )
