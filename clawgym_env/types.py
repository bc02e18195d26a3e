"""The nouns that every room shares: messages, sampling, generations, calls, rewards, statuses.

Invariant: values here are frozen and hold numpy at most; nothing of ours is imported. Token arrays are ``int64``,
log-probabilities ``float32``, policy versions ``int64``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

TokenArray = NDArray[np.int64]
FloatArray = NDArray[np.float32]
Role = Literal["system", "user", "assistant", "tool"]
FinishReason = Literal["stop", "length"]


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One tool invocation of an assistant turn.

    Attributes:
        name: Tool name as the model wrote it.
        arguments: Parsed JSON object, or the raw text where the model's JSON did not parse.
        id: Wire identifier; never part of a node's identity.
    """

    name: str
    arguments: Mapping[str, Any] | str
    id: str = ""


@dataclass(frozen=True, slots=True)
class Message:
    """One conversation turn, independent of any wire format.

    Attributes:
        is_error: The harness says that the tool failed. Chat formats have no place for it: the policy is told by the
            text alone.
    """

    role: Role
    content: str = ""
    reasoning: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    name: str | None = None
    is_error: bool = False


@dataclass(frozen=True, slots=True)
class Namespace:
    """A named group of tools, on wires that have such."""

    name: str
    description: str = ""


@dataclass(frozen=True, slots=True)
class ToolSpec:
    """A tool that the harness offers.

    Attributes:
        name: As the model is to write it; that of a tool in a namespace begins with the namespace's.
        parameters: JSON schema of its arguments.
        free_text: The harness takes a text rather than an object: the model is offered one string argument, ``input``.
    """

    name: str
    description: str = ""
    parameters: Mapping[str, Any] = field(default_factory=dict)
    free_text: bool = False
    namespace: Namespace | None = None


@dataclass(frozen=True, slots=True)
class Sampling:
    """How a generation is drawn.

    Attributes:
        temperature: 0 is greedy. Log-probabilities are those of the distribution that was sampled from; when greedy,
            of the distribution at temperature 1.
        top_p: Nucleus mass in (0, 1]; 1 keeps everything.
        top_k: Number of tokens kept; 0 keeps everything.
        max_tokens: Upper bound on generated tokens.
        seed: Seeds this one generation where the engine supports it.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    max_tokens: int = 1024
    seed: int | None = None


@dataclass(frozen=True, slots=True)
class Budget:
    """What one rollout may use.

    Attributes:
        max_calls: Committed model calls.
        max_tokens: Sampled tokens over all calls.
    """

    max_calls: int = 64
    max_tokens: int = 65_536


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """What a harness asked for, in no wire's terms.

    Attributes:
        temperature: This and what follows up to ``seed`` is the sampling that the harness asked for; ``None`` where it
            left it out.
        stop: Texts that end the answer and are not part of it.
        wants: What the answer should hold besides the message, in the wire's own words.
        extra: Harmless request fields that were recorded and not acted on.
    """

    model: str
    messages: tuple[Message, ...]
    tools: tuple[ToolSpec, ...] = ()
    temperature: float | None = None
    top_p: float | None = None
    max_tokens: int | None = None
    top_k: int | None = None
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stream: bool = False
    wants: frozenset[str] = frozenset()
    extra: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, eq=False)
class Generation:
    """Sampled tokens of one call.

    Attributes:
        token_ids: [T] int64, stop token included where one was sampled.
        log_probs: [T] float32, of the sampled distribution.
        versions: [T] int64, policy version that made each token.
        finish_reason: ``stop`` or ``length``.
        cached_tokens: Prompt tokens whose KV was reused.
    """

    token_ids: TokenArray
    log_probs: FloatArray
    versions: TokenArray
    finish_reason: FinishReason
    cached_tokens: int = 0

    def __post_init__(self) -> None:
        if not (len(self.token_ids) == len(self.log_probs) == len(self.versions)):
            raise ValueError(
                f"generation arrays differ in length: {len(self.token_ids)} ids, {len(self.log_probs)} log-probs, "
                f"{len(self.versions)} versions"
            )


CallKind = Literal["main", "subagent", "compaction", "side"]


@dataclass(frozen=True, slots=True)
class ModelCall:
    """Facts of one committed call; its tokens are in the prefix tree and nowhere else.

    What follows ``sampling`` is known once the rollout has settled (``clawgym_env.proxy.classify``).

    Attributes:
        call_id: 0, 1, ... in order of commitment.
        prompt_tokens: Tokens the engine was given.
        sampled_tokens: Tokens it sampled.
        cached_tokens: Prompt tokens whose KV was reused.
        sampling: What was in force, after every limit.
        continues: The latest call whose answer the request carried on, re-rendered or not.
        kind: What the call is for.
        agent: Whose conversation it belongs to: ``main``, or a sub-agent's name.
        segment: Counts the agent's rewrites of its history (compaction, restart) from 0.
        spawned_by: The call that made the harness begin this conversation, where it has one.
        confidence: That kind and agent are right: 1 where the harness said so, less where they are guessed.
    """

    call_id: int
    prompt_tokens: int
    sampled_tokens: int
    cached_tokens: int
    finish_reason: FinishReason
    sampling: Sampling
    continues: int | None = None
    kind: CallKind = "main"
    agent: str = "main"
    segment: int = 0
    spawned_by: int | None = None
    confidence: float = 1.0


@dataclass(frozen=True, slots=True)
class Reward:
    """A verifier's judgement, made outside the agent's reach.

    Attributes:
        score: In [0, 1]; the number that trains.
        passed: Whether the task counts as solved for Pass@1.
        parts: Named partial scores.
        note: One line for a person.
    """

    score: float
    passed: bool
    parts: Mapping[str, float] = field(default_factory=dict)
    note: str = ""


class Status(StrEnum):
    """How a rollout ended. Only *scored* ones carry a reward; the others never count as reward 0."""

    COMPLETED = "completed"
    AGENT_TIMEOUT = "agent_timeout"
    BUDGET_EXHAUSTED = "budget_exhausted"
    HARNESS_FAILED = "harness_failed"
    HARNESS_CRASHED = "harness_crashed"
    NO_CALLS = "no_calls"
    SANDBOX_ERROR = "sandbox_error"
    ENGINE_ERROR = "engine_error"
    VERIFIER_ERROR = "verifier_error"
    CANCELLED = "cancelled"

    @property
    def scored(self) -> bool:
        """Whether the verifier's finding stands for the policy's doing.

        A time-out, an exhausted budget and a harness that gave up on what the policy said are the policy's doing. A
        harness killed by a signal, one that never called the model, and every infrastructure fault are not.
        """
        return self in _SCORED


_SCORED = frozenset({Status.COMPLETED, Status.AGENT_TIMEOUT, Status.BUDGET_EXHAUSTED, Status.HARNESS_FAILED})
