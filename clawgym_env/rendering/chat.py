"""Messages <-> tokens, in the policy's chat format.

Invariant: a sampled token is never re-encoded. ``extend`` keeps every id of the history as it is and encodes only what
is new; where the template cannot do that it says so with ``None``, and the caller renders from scratch (the tree then
shares whatever prefix is still equal).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import numpy as np

from clawgym_env.errors import RenderingError
from clawgym_env.rendering.library import LIBRARY_ERRORS, Library
from clawgym_env.rendering.messages import Folding, ToolSpecs, linked
from clawgym_env.rendering.tokenizer import FastTokenizer, load_tokenizer
from clawgym_env.types import Message, TokenArray, ToolCall, ToolSpec

#: Characters of new text from which a rendering belongs in a thread: about 10 ms of work, and other threads get a turn
#: every 5 ms. Below, the hop to a thread costs more than it gains.
RENDER_IN_THREAD_CHARS = 8192
#: Tokens that are looked through at a time for the last closed turn.
_BLOCK = 512

T = TypeVar("T")


class ChatRenderer:
    """One policy's chat format.

    Args:
        tokenizer: The policy's tokenizer.
        family: A configuration name of the ``renderers`` library.
        enable_thinking: Whether the generation prompt leaves room for a thinking block, in families that know both.

    Attributes:
        stop_token_ids: Tokens that end an answer.
        folding: Which system messages the family cannot hold as they are.

    Raises:
        RenderingError: an unknown family, or a tokenizer that lacks a special token of the family.
    """

    def __init__(self, tokenizer: FastTokenizer, *, family: str = "qwen3", enable_thinking: bool = False) -> None:
        self.tokenizer = tokenizer
        self._library = Library(tokenizer, family, enable_thinking)
        self.stop_token_ids = self._library.stop_token_ids
        self.folding = Folding.of(self._library, tokenizer)
        self._specs = ToolSpecs(self._library)
        self._open_turn_suffices = True
        self._open_turn_suffices = self._bridges_open_turns()

    @classmethod
    def from_folder(
        cls, path: Path | None = None, *, family: str = "qwen3", enable_thinking: bool = False
    ) -> ChatRenderer:
        """The renderer of a model folder; ``None`` is the tokenizer that ClawGym ships."""
        return cls(load_tokenizer(path), family=family, enable_thinking=enable_thinking)

    @property
    def vocab_size(self) -> int:
        """Number of token ids."""
        return self.tokenizer.vocab_size

    def prompt(self, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> TokenArray:
        """Renders a whole conversation up to where the next answer begins; [P] int64.

        Raises:
            RenderingError: no template holds the messages, or one of the tools.
        """
        specs = self._specs(tools)
        try:
            return self._library.prompt(self.folding.apply(linked(messages), opening=True), specs)
        except LIBRARY_ERRORS as error:
            raise RenderingError(f"the chat template cannot hold these messages: {error}") from error

    def extend(
        self, prompt_ids: TokenArray, response_ids: TokenArray, new: Sequence[Message], tools: Sequence[ToolSpec]
    ) -> TokenArray | None:
        """The prompt of the next call: history kept id for id, new messages encoded once.

        An answer that was cut short is closed first. Tool results should come :func:`linked` to their calls.

        Returns:
            [P'] int64 whose first P + T ids are the history, or ``None`` where the template cannot extend it; then
            :meth:`why_not_extended` says why.
        """
        turn = self._open_turn(prompt_ids)
        ids = self._library.bridge(turn, response_ids, self.folding.apply(new, opening=False), self._specs(tools))
        if ids is None or not _begins(ids, turn, response_ids):
            return None
        return np.concatenate([prompt_ids[: len(prompt_ids) - len(turn)], ids])

    def why_not_extended(self, prompt_ids: TokenArray, response_ids: TokenArray, new: Sequence[Message]) -> str:
        """Why :meth:`extend` gave ``None``, in words for the ledger; found out by trying."""
        turn, folded = self._open_turn(prompt_ids), self.folding.apply(new, opening=False)
        if not new:
            return "the request adds nothing to its history"
        if any(m.role == "assistant" for m in new):
            return "an answer that was not sampled follows the history"
        if self._library.bridge(turn, response_ids, folded, None) is not None:
            return "the answer goes on after its end"
        open_ids = response_ids[~np.isin(response_ids, self.stop_token_ids)]
        read = self._library.parse(open_ids, turn, None)
        if read.reasoning and not read.content and not read.tool_calls:
            return "the answer ended inside its thinking"
        asks = any(m.role == "user" for m in folded)
        if asks and self._library.bridge(turn, response_ids, [Message("tool")], None) is not None:
            return "the template drops thinking at a new user message"
        return "the template cannot be extended"

    def parse(self, response_ids: TokenArray, prompt_ids: TokenArray, tools: Sequence[ToolSpec]) -> Message:
        """The assistant message that sampled tokens spell; call ids are left empty.

        A tool call that did not parse stays visible as text. Arguments that JSON parsers disagree on (NaN, half a
        surrogate pair, integers past 64 bits) are kept as text.
        """
        return self._library.parse(response_ids, self._open_turn(prompt_ids), self._specs(tools))

    def encode_reply(self, content: str = "", *tool_calls: ToolCall, reasoning: str | None = None) -> TokenArray:
        """Token ids of an assistant turn, end of turn included: what a hand-driven or scripted policy answers."""
        return self._library.answer(*linked([Message("assistant", content, reasoning, tool_calls)]))

    def decode(self, ids: TokenArray) -> str:
        """Text of token ids, special tokens included."""
        return self.tokenizer.decode(ids.tolist())

    def _open_turn(self, prompt_ids: TokenArray) -> TokenArray:
        """A prompt from its last closed turn on, where that is all that the library reads; a call costs what is new."""
        if not self._open_turn_suffices:
            return prompt_ids
        for end in range(len(prompt_ids), 0, -_BLOCK):
            start = max(0, end - _BLOCK)
            block = prompt_ids[start:end]
            closes = [int(found[-1]) for stop in self.stop_token_ids if (found := (block == stop).nonzero()[0]).size]
            if closes:
                return prompt_ids[start + max(closes) :]
        return prompt_ids

    def _bridges_open_turns(self) -> bool:
        """Whether the library makes the same of a prompt's last turn as of the whole prompt."""
        call = ToolCall("probe", {}, "probe")
        asked, said, result = linked(
            [
                Message("user", "probe"),
                Message("assistant", "probe", None, (call,)),
                Message("tool", "probe", tool_call_id=call.id),
            ]
        )
        try:
            answer = self._library.answer(said)
            prompt = self._library.prompt([asked, said, result, asked])
        except (*LIBRARY_ERRORS, RenderingError):
            return False
        turn = self._open_turn(prompt)
        for new in ([result], [asked]):
            whole, part = (self._library.bridge(before, answer, new, None) for before in (prompt, turn))
            if (whole is None) != (part is None):
                return False
            if whole is not None and part is not None and not np.array_equal(whole[len(prompt) :], part[len(turn) :]):
                return False
        return self._library.parse(answer, prompt, None) == self._library.parse(answer, turn, None)


def _begins(ids: TokenArray, turn: TokenArray, response_ids: TokenArray) -> bool:
    """Whether ids begin with a turn and its answer."""
    end = len(turn) + len(response_ids)
    return np.array_equal(ids[: len(turn)], turn) and np.array_equal(ids[len(turn) : end], response_ids)


async def off_loop(messages: Sequence[Message], work: Callable[[], T]) -> T:
    """Renders here, or in a thread where the new text is so long that it would hold up the event loop.

    Args:
        messages: What ``work`` has to encode.
    """
    size = 0
    for message in messages:
        size += len(message.content) + len(message.reasoning or "")
        for call in message.tool_calls:
            values = [call.arguments] if isinstance(call.arguments, str) else call.arguments.values()
            size += sum(len(value) for value in values if isinstance(value, str))
    return work() if size < RENDER_IN_THREAD_CHARS else await asyncio.to_thread(work)
