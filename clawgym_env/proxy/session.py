"""One rollout at the model boundary: requests come in as messages, leave as answers, and stay as a prefix tree.

Invariants:
    1. A draft becomes a call only by ``commit``; ``abort`` leaves nothing but a count of its tokens.
    2. The history of a continued call is grafted id for id; text never becomes tokens twice.
    3. Budgets bound calls and sampled tokens; once one is met, ``exhausted`` is set and no further call is served.
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
from clawgym_env.proxy.matching import History
from clawgym_env.rendering import ChatRenderer
from clawgym_env.tree.ledger import Ledger
from clawgym_env.tree.prefix_tree import PrefixTree
from clawgym_env.types import ChatRequest, Generation, Message, ModelCall, Sampling, TokenArray


@dataclass(frozen=True, slots=True)
class Budget:
    """What one rollout may use.

    Attributes:
        max_calls: Committed model calls.
        max_tokens: Sampled tokens over all calls.
    """

    max_calls: int = 64
    max_tokens: int = 65_536


@dataclass(frozen=True, slots=True, eq=False)
class Draft:
    """An answer that is sampled and parsed but not yet committed."""

    request: ChatRequest
    prompt_ids: TokenArray
    generation: Generation
    sampling: Sampling
    reply: Message
    parent: int | None
    shared: int
    tolerated: frozenset[str]
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


@dataclass(slots=True)
class Session:
    """See the module's invariants.

    Attributes:
        sampling: How answers are drawn; overrides what the harness asks for, except that its token limit is kept.
        seed: Seeds every generation of this rollout by prompt and repetition, whatever the order of arrival; ``None``
            leaves sampling unseeded.
        exhausted: Set when a budget is met.
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
        proposal, tolerated = self._history.propose(request.tools, request.messages)
        parent = proposal.parent if proposal else None
        shared = proposal.shared if proposal else 0
        prompt = self._graft(request, parent, shared)
        if prompt is None:
            parent, shared, tolerated = None, 0, frozenset()
            prompt = self.renderer.prompt(request.messages, request.tools)
        room = self.engine.max_context - len(prompt)
        if room < 1:
            raise ContextOverflow(len(prompt), self.engine.max_context)
        limit = min(self.sampling.max_tokens, room, left, request.max_tokens or room)
        sampling = replace(self.sampling, max_tokens=limit, seed=self._call_seed(prompt))
        self.in_flight += 1
        self.served += 1
        try:
            generation = await self.engine.generate(
                EngineRequest(prompt, sampling, self.renderer.stop_token_ids, request, self.rollout_id)
            )
        except EngineError as error:
            self.failure = str(error)
            self.failed.set()
            raise
        finally:
            self.in_flight -= 1
        reply = self._identify(self.renderer.parse(generation.token_ids, prompt, request.tools))
        return Draft(request, prompt, generation, sampling, reply, parent, shared, tolerated, started)

    def commit(self, draft: Draft) -> ModelCall:
        """Makes a draft part of the rollout; called before its terminal event is sent."""
        request, generation = draft.request, draft.generation
        call = ModelCall(
            call_id=len(self.records),
            prompt_tokens=len(draft.prompt_ids),
            sampled_tokens=len(generation.token_ids),
            cached_tokens=generation.cached_tokens,
            finish_reason=generation.finish_reason,
            sampling=draft.sampling,
        )
        self.tree.attach(call.call_id, draft.prompt_ids, generation, prefer=draft.parent)
        self._history.commit(call.call_id, request.tools, request.messages, draft.reply)
        self.ledger.captured += len(generation.token_ids)
        for what in draft.tolerated:
            self.ledger.note(what)
        if draft.parent is None and self.records:
            self.ledger.note("request rendered from scratch")
        now = time.monotonic()
        self.records.append(
            CallRecord(
                call,
                draft.parent,
                request.messages[draft.shared :],
                draft.reply,
                tuple(t.name for t in request.tools),
                draft.started_s - self._began,
                now - draft.started_s,
            )
        )
        return call

    def abort(self, draft: Draft) -> None:
        """The answer never reached the harness whole: nothing is committed."""
        self.ledger.aborted += len(draft.generation.token_ids)
        self.ledger.note("client went away before the answer ended")

    def _tokens_left(self) -> int:
        left = self.budget.max_tokens - self.ledger.captured
        if len(self.records) + self.in_flight >= self.budget.max_calls or left < 1:
            self.exhausted.set()
            raise BudgetExhausted(
                f"rollout {self.rollout_id} has used up its budget of {self.budget.max_calls} calls and "
                f"{self.budget.max_tokens} sampled tokens; stop here"
            )
        return left

    def _graft(self, request: ChatRequest, parent: int | None, shared: int) -> TokenArray | None:
        if parent is None:
            return None
        history = self.tree.path_ids(parent)
        prompt, response = np.split(history, [self.records[parent].call.prompt_tokens])
        return self.renderer.extend(prompt, response, request.messages[shared:], request.tools)

    def _call_seed(self, prompt: TokenArray) -> int | None:
        if self.seed is None:
            return None
        key = blake2b(prompt.tobytes(), digest_size=8, key=self.seed.to_bytes(8, "little")).digest()
        self._repeats[key] += 1
        return (int.from_bytes(key, "little") + self._repeats[key]) % (1 << 63)

    def _identify(self, reply: Message) -> Message:
        """Mints tool-call ids: unique in the rollout, made of letters and digits only, as some harnesses strip the rest."""
        calls = [replace(c, id=f"call{self.served}x{i}") for i, c in enumerate(reply.tool_calls)]
        return replace(reply, tool_calls=tuple(calls))


