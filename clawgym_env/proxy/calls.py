"""What a model call is on its way through a session, from the request that was admitted to the record it leaves."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from clawgym_env.dialect import Hints
from clawgym_env.engines.base import Engine
from clawgym_env.proxy.attempts import Attempt, Question
from clawgym_env.proxy.matching import Proposal
from clawgym_env.rendering import ChatRenderer
from clawgym_env.types import ChatRequest, Generation, Message, ModelCall, Sampling, TokenArray


@dataclass(frozen=True, slots=True, eq=False)
class FrozenModel:
    """A model beside the policy that a harness may ask for by name: what it says is context, never training data."""

    engine: Engine
    renderer: ChatRenderer
    sampling: Sampling = field(default_factory=Sampling)


@dataclass(frozen=True, slots=True, eq=False)
class Rendered:
    """A request as the engine will see it.

    Attributes:
        anew: Why the history that it continues could not be kept, where that is so.
    """

    proposal: Proposal
    prompt_ids: TokenArray
    frozen: FrozenModel | None = None
    anew: str | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Admitted:
    """A request that will be answered: rendered, within the budget and the context.

    Attributes:
        request: With its messages as the policy is to see them.
        anew: Why the history that it continues was rendered again, where that is so.
        frozen: The model that answers in the policy's place.
        earlier: The attempt whose answer this gets, where it was asked before.
    """

    request: ChatRequest
    question: Question
    hints: Hints
    prompt_ids: TokenArray
    sampling: Sampling
    proposal: Proposal
    anew: str | None
    frozen: FrozenModel | None
    earlier: Attempt[Draft] | None
    started_s: float


@dataclass(frozen=True, slots=True, eq=False)
class Draft:
    """An answer that is sampled and parsed but not yet committed.

    Attributes:
        number: Counts calls from 1 as they were admitted to the engine.
        stop_text: The request's stop sequence that ended the answer, where one did.
    """

    number: int
    admitted: Admitted
    generation: Generation
    reply: Message
    stop_text: str | None


@dataclass(frozen=True, slots=True, eq=False)
class FrozenCall:
    """A call that a frozen model answered; its tokens are in no tree."""

    model: str
    reply: Message
    prompt_tokens: int
    sampled_tokens: int
    started_s: float
    seconds: float


@dataclass(frozen=True, slots=True, eq=False)
class CallRecord:
    """What a committed call looked like to the harness.

    Attributes:
        parent: The call it was matched to; ``None`` where it was rendered from scratch.
        messages: The messages that are new since the parent's answer (all of them without a parent).
        tools: Names of the tools that were offered.
        started_s: Seconds since the session began; ``seconds`` is how long the answer took.
        answers: Calls whose answers appear among ``messages``, in order.
        hints: What the request's headers said.
        extra: Request fields that were not acted on.
    """

    call: ModelCall
    parent: int | None
    messages: tuple[Message, ...]
    reply: Message
    tools: tuple[str, ...]
    started_s: float
    seconds: float
    answers: tuple[int, ...] = ()
    hints: Hints = field(default_factory=Hints)
    extra: Mapping[str, Any] = field(default_factory=dict)
