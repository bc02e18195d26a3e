"""The message graph of ``verifiers``, driven as its interception server drives it; only where that is installed.

Its unit is a message: a prompt is matched by the messages' hashes, and the tokens that it stores for them are then
compared. The texts are kept short here, so that what is measured is the work on tokens.
"""

from __future__ import annotations

from typing import Any

from verifiers.v1 import graph
from verifiers.v1.trace import Trace
from verifiers.v1.types import AssistantMessage, Response, TurnTokens, UserMessage


class MessageGraph:
    """One trace; prompts are chains of a user's message and an answer each, of constant length in tokens."""

    def __init__(self, observed: int, sampled: int) -> None:
        self.trace = Trace.model_construct(nodes=[], tools=[], mm_token_type_id_map={})
        self._observed, self._turn = observed, observed + sampled

    @property
    def unique_tokens(self) -> int:
        return sum(len(node.token_ids) for node in self.trace.nodes)

    def prepare(self, number: int, prompt: list[int], response: list[int]) -> tuple[list[Any], Response]:
        """A request and its answer as the library's types."""
        messages: list[Any] = []
        spans = []
        for k in range(number + 1):
            at = k * self._turn
            messages.append(UserMessage(content=f"u{k}"))
            spans.append((at, at + self._observed))
            if k < number:
                messages.append(AssistantMessage(content=f"a{k}"))
                spans.append((at + self._observed, at + self._turn))
        tokens = TurnTokens.model_construct(
            prompt_ids=prompt,
            completion_ids=response,
            completion_logprobs=[0.0] * len(response),
            renderer_prompt_ids=None,
            message_spans=spans,
            is_content=None,
            mm_placeholders=None,
            mm_token_type_id_map=None,
            routed_experts=None,
            sampling_mask=None,
            bridged=False,
        )
        answer = AssistantMessage(content=f"a{number}")
        response_ = Response.model_construct(id="r", message=answer, finish_reason="stop", tokens=tokens)
        return messages, response_

    def attach(self, messages: list[Any], response: Response) -> None:
        """Adds a call."""
        graph.prepare_turn(self.trace, messages).commit(response)
