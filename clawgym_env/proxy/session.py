"""One rollout at the model boundary: requests come in as messages, leave as answers, and stay as a prefix tree.

Invariants:
    1. A draft becomes a call only by ``commit``; ``abort`` leaves nothing but a count of its tokens.
    2. The history of a continued call is grafted id for id; text never becomes tokens twice.
    3. Budgets bound calls and sampled tokens; a call beyond one is refused and sets ``exhausted``. Calls that are
       pending at once may each use the tokens that were left when they began.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from dataclasses import dataclass, field, replace
from hashlib import blake2b

import numpy as np

from clawgym_env.engines.base import Engine, EngineRequest
from clawgym_env.errors import BudgetExhausted, ContextOverflow, EngineError
from clawgym_env.proxy.matching import History, Proposal
from clawgym_env.rendering import ChatRenderer
from clawgym_env.tree.ledger import Ledger
from clawgym_env.tree.prefix_tree import PrefixTree
from clawgym_env.types import Budget as Budget
from clawgym_env.types import ChatRequest, Generation, Message, ModelCall, Sampling, TokenArray


@dataclass(frozen=True, slots=True, eq=False)
class Draft:
    """An answer that is sampled and parsed but not yet committed; ``number`` counts calls from 1 as they came."""

    number: int
    request: ChatRequest
    prompt_ids: TokenArray
    generation: Generation
    sampling: Sampling
    reply: Message
    proposal: Proposal
    started_s: float


@dataclass(frozen=True, slots=True, eq=False)
class CallRecord:
    """What a committed call looked like to the harness.

    Attributes:
        parent: The call it was matched to; ``None`` where it was rendered from scratch.
        messages: The messages that are new since the parent's answer (all of them without a parent).
        tools: Names of the tools that were offered.
        started_s: Seconds since the session began; ``seconds`` is how long the answer took.
    """

    call: ModelCall
    parent: int | None
    messages: tuple[Message, ...]
    reply: Message
    tools: tuple[str, ...]
    started_s: float
    seconds: float


@dataclass(slots=True, eq=False)
class Session:
    """See the module's invariants.

    Attributes:
        sampling: How answers are drawn; overrides what the harness asks for, except that its token limit is kept.
        seed: Seeds every generation of this rollout by prompt and repetition, whatever the order of arrival; ``None``
            leaves sampling unseeded.
        in_flight: Calls that are neither committed nor aborted.
        served: Calls that reached the engine.
        exhausted: Set when a call was refused because a budget is met.
        failed: Set when the engine failed; ``failure`` says why.
    """

    rollout_id: str
    engine: Engine
    renderer: ChatRenderer
    sampling: Sampling = field(default_factory=Sampling)
    budget: Budget = field(default_factory=Budget)
    seed: int | None = None
    tree: PrefixTree = field(default_factory=PrefixTree)
    ledger: Ledger = field(default_factory=Ledger)
    records: list[CallRecord] = field(default_factory=list)
    in_flight: int = 0
    served: int = 0
    failure: str | None = None
    exhausted: asyncio.Event = field(default_factory=asyncio.Event)
    failed: asyncio.Event = field(default_factory=asyncio.Event)
    _history: History = field(default_factory=History)
    _repeats: Counter[bytes] = field(default_factory=Counter)
    _began: float = field(default_factory=time.monotonic)

    async def draft(self, request: ChatRequest) -> Draft:
        """Samples and parses an answer.

        Raises:
            BudgetExhausted: the rollout may make no more calls.
            ContextOverflow: the prompt leaves no room for an answer.
            EngineError: the engine failed.
        """
        left = self._tokens_left()
        started = time.monotonic()
        proposal = self._history.propose(request.tools, request.messages)
        prompt = self._graft(request, proposal)
        if prompt is None:
            proposal = replace(proposal, parent=None, shared=0, tolerated=frozenset())
            prompt = self.renderer.prompt(request.messages, request.tools)
        room = self.engine.max_context - len(prompt)
        if room < 1:
            raise ContextOverflow(len(prompt), self.engine.max_context)
        limit = min(self.sampling.max_tokens, room, left, request.max_tokens or room)
        sampling = replace(self.sampling, max_tokens=limit, seed=self._call_seed(prompt))
        self.in_flight += 1
        self.served += 1
        number = self.served
        try:
            generation = await self._generate(
                EngineRequest(prompt, sampling, self.renderer.stop_token_ids, request, self.rollout_id)
            )
            reply = _identify(self.renderer.parse(generation.token_ids, prompt, request.tools), number)
        except BaseException:
            self.in_flight -= 1
            raise
        return Draft(number, request, prompt, generation, sampling, reply, proposal, started)

    def commit(self, draft: Draft) -> ModelCall:
        """Makes a draft part of the rollout; called before its terminal event is sent."""
        self.in_flight -= 1
        request, generation, proposal = draft.request, draft.generation, draft.proposal
        call = ModelCall(
            call_id=len(self.records),
            prompt_tokens=len(draft.prompt_ids),
            sampled_tokens=len(generation.token_ids),
            cached_tokens=generation.cached_tokens,
            finish_reason=generation.finish_reason,
            sampling=draft.sampling,
        )
        self.tree.attach(call.call_id, draft.prompt_ids, generation, prefer=proposal.parent)
        self._history.commit(call.call_id, proposal.tip, draft.reply)
        self.ledger.captured += len(generation.token_ids)
        for what in proposal.tolerated:
            self.ledger.note(what)
        if proposal.parent is None and self.records:
            self.ledger.note("request rendered from scratch")
        if _asks_for_other_sampling(request, draft.sampling):
            self.ledger.note("the run's sampling settings took the place of the harness's")
        now = time.monotonic()
        self.records.append(
            CallRecord(
                call,
                proposal.parent,
                request.messages[proposal.shared :],
                draft.reply,
                tuple(t.name for t in request.tools),
                draft.started_s - self._began,
                now - draft.started_s,
            )
        )
        return call

    def abort(self, draft: Draft) -> None:
        """The answer cannot reach the harness whole: nothing is committed."""
        self.in_flight -= 1
        self.ledger.aborted += len(draft.generation.token_ids)

    def fail(self, why: str) -> None:
        """Marks the rollout as spoilt by us, not by the policy."""
        self.failure = why
        self.failed.set()

    async def _generate(self, request: EngineRequest) -> Generation:
        try:
            generation = await self.engine.generate(request)
            if len(generation.token_ids) == 0:
                raise EngineError("the engine answered without a single token")
        except EngineError as error:
            self.fail(str(error))
            raise
        return generation

    def _tokens_left(self) -> int:
        left = self.budget.max_tokens - self.ledger.captured
        if len(self.records) + self.in_flight >= self.budget.max_calls or left < 1:
            self.exhausted.set()
            raise BudgetExhausted(
                f"rollout {self.rollout_id} has used up its budget of {self.budget.max_calls} calls and "
                f"{self.budget.max_tokens} sampled tokens; stop here"
            )
        return left

    def _graft(self, request: ChatRequest, proposal: Proposal) -> TokenArray | None:
        parent = proposal.parent
        if parent is None:
            return None
        history = self.tree.path_ids(parent)
        prompt, response = np.split(history, [self.records[parent].call.prompt_tokens])
        return self.renderer.extend(prompt, response, request.messages[proposal.shared :], request.tools)

    def _call_seed(self, prompt: TokenArray) -> int | None:
        if self.seed is None:
            return None
        key = blake2b(prompt.tobytes(), digest_size=8, key=(self.seed % (1 << 64)).to_bytes(8, "little")).digest()
        self._repeats[key] += 1
        return (int.from_bytes(key, "little") + self._repeats[key]) % (1 << 63)


def _identify(reply: Message, number: int) -> Message:
    """Mints tool-call ids: unique in the rollout; letters and digits only, as some harnesses strip the rest."""
    calls = [replace(c, id=f"call{number}x{i}") for i, c in enumerate(reply.tool_calls)]
    return replace(reply, tool_calls=tuple(calls))


def _asks_for_other_sampling(request: ChatRequest, sampling: Sampling) -> bool:
    return (
        request.temperature not in (None, sampling.temperature)
        or request.top_p not in (None, sampling.top_p)
        or any(request.extra.get(key) is not None for key in ("seed", "top_k", "min_p"))
    )
