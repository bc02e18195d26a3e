"""The policy engine's contract: token ids in; ids, log-probs and policy versions out.

Invariant: a token engine never reads text and no engine knows an HTTP server. What it returns is exactly what it
sampled.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from clawgym_env.types import ChatRequest, Generation, Sampling, TokenArray


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """One generation.

    Attributes:
        prompt_ids: [P] int64.
        stop_token_ids: Generation ends after one of these; it is part of the output.
        chat: The same conversation as messages, for engines that pass it on and for people; token engines ignore it.
        rollout_id: Whose call it is: for prefix-aware routing and for scripted policies.
    """

    prompt_ids: TokenArray
    sampling: Sampling
    stop_token_ids: tuple[int, ...]
    chat: ChatRequest
    rollout_id: str = ""


@runtime_checkable
class Engine(Protocol):
    """Serves the policy. Implementations batch concurrent calls as they like."""

    @property
    def max_context(self) -> int:
        """Prompt plus generated tokens that one call may hold."""
        ...

    @property
    def policy_version(self) -> int:
        """Version of the weights that the next call will be served with."""
        ...

    async def generate(self, request: EngineRequest) -> Generation:
        """Samples one response.

        Cancelling the awaiting task stops the generation and frees what it held.

        Raises:
            EngineError: the engine failed; nothing was sampled that counts.
        """
        ...

    async def aclose(self) -> None:
        """Frees what the engine holds; idempotent."""
        ...
