"""Messages <-> tokens, on the ``renderers`` library.

Invariant: a sampled token is never re-encoded. ``extend`` keeps every id of the history as it is and encodes only what
is new; where the template cannot do that it says so with ``None``, and the caller renders from scratch (the tree then
shares whatever prefix is still equal).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from clawgym_env.errors import RenderingError
from clawgym_env.rendering_tokenizer import FastTokenizer, load_tokenizer
from clawgym_env.types import Message, TokenArray, ToolCall, ToolSpec
from clawgym_env.wire.openai_chat import message_json, tool_json


class ChatRenderer:
    """One policy's chat format.

    Args:
        tokenizer: The policy's tokenizer.
        family: A configuration name of the ``renderers`` library.
        enable_thinking: Whether the generation prompt leaves room for a thinking block.

    Raises:
        RenderingError: an unknown family, or a tokenizer that lacks a special token of the family.
    """

    def __init__(self, tokenizer: FastTokenizer, *, family: str = "qwen3", enable_thinking: bool = False) -> None:
        import renderers  # 1.3 s: only where tokens are made

        self.tokenizer = tokenizer
        kwargs = {"enable_thinking": enable_thinking}
        try:
            config = renderers.config_from_name(family)
        except ValueError as error:
            raise RenderingError(f"there is no chat family {family!r}: {error}") from error
        try:
            self._renderer = renderers.create_renderer(tokenizer, config, chat_template_kwargs=kwargs)
        except (AssertionError, ValueError, KeyError) as error:
            raise RenderingError(
                f"the tokenizer at {tokenizer.name_or_path!r} cannot hold {family} chats: {error}. Use a model whose "
                "tokenizer has the family's chat and tool-call tokens."
            ) from error
        self.stop_token_ids: tuple[int, ...] = tuple(self._renderer.get_stop_token_ids())

    @classmethod
    def from_folder(cls, path: Path | None = None, *, enable_thinking: bool = False) -> ChatRenderer:
        """The renderer of a model folder; ``None`` is the tokenizer that ClawGym ships."""
        return cls(load_tokenizer(path), enable_thinking=enable_thinking)

    @property
    def vocab_size(self) -> int:
        """Number of token ids."""
        return self.tokenizer.vocab_size

    def prompt(self, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> TokenArray:
        """Renders a whole conversation up to where the next answer begins; [P] int64."""
        try:
            ids = self._renderer.render_ids(
                [_plain(m) for m in messages], tools=_tools(tools), add_generation_prompt=True
            )
        except (ValueError, KeyError, TypeError) as error:
            raise RenderingError(f"the chat template cannot hold these messages: {error}") from error
        return np.asarray(ids, dtype=np.int64)

    def extend(
        self, prompt_ids: TokenArray, response_ids: TokenArray, new: Sequence[Message], tools: Sequence[ToolSpec]
    ) -> TokenArray | None:
        """The prompt of the next call: history kept id for id, new messages encoded once.

        Returns:
            [P'] int64 whose first P + T ids are the history, or ``None`` where the template cannot extend it.
        """
        turn = self._open_turn(prompt_ids)
        bridged = self._renderer.bridge_to_next_turn(
            turn.tolist(), response_ids.tolist(), [_plain(m) for m in new], tools=_tools(tools)
        )
        if bridged is None:
            return None
        ids = np.asarray(bridged.token_ids, dtype=np.int64)
        history = np.concatenate([turn, response_ids])
        if not np.array_equal(ids[: len(history)], history):
            return None
        return np.concatenate([prompt_ids[: len(prompt_ids) - len(turn)], ids])

    def parse(self, response_ids: TokenArray, prompt_ids: TokenArray, tools: Sequence[ToolSpec]) -> Message:
        """The assistant message that sampled tokens spell; call ids are left empty.

        A tool call that did not parse stays visible as text. Arguments that JSON parsers disagree on (NaN, half a
        surrogate pair, integers past 64 bits) are kept as text.
        """
        try:
            parsed = self._renderer.parse_response(
                response_ids.tolist(), tools=_tools(tools), prompt_ids=self._open_turn(prompt_ids).tolist()
            )
        except (ValueError, RecursionError):  # Python's own limits: 4,300 digits, brackets nested a thousand deep
            return Message("assistant", self.decode(response_ids[~np.isin(response_ids, self.stop_token_ids)]))
        content, calls = parsed.content, []
        for call in parsed.tool_calls:
            name, arguments = _portable(call.name), _portable(call.arguments)
            if isinstance(name, str) and name and arguments is not None:
                calls.append(ToolCall(name, arguments))
            else:
                end = "" if call.status.name == "UNCLOSED_BLOCK" else "\n</tool_call>"
                content = "\n".join(filter(None, [content, f"<tool_call>\n{call.raw}{end}"]))
        return Message("assistant", content, parsed.reasoning_content or None, tuple(calls))

    def _open_turn(self, prompt_ids: TokenArray) -> TokenArray:
        """A prompt from its last closed turn on: all that the library reads, so a call costs what is new in it."""
        closes = np.flatnonzero(np.isin(prompt_ids, self.stop_token_ids))
        return prompt_ids[closes[-1] :] if closes.size else prompt_ids

    def encode_reply(self, content: str = "", *tool_calls: ToolCall, reasoning: str | None = None) -> TokenArray:
        """Token ids of an assistant turn, end of turn included: what a hand-driven or scripted policy answers."""
        messages = [{"role": "user", "content": ""}, _plain(Message("assistant", content, reasoning, tool_calls))]
        rendered = self._renderer.render(messages)
        ids = [t for t, sampled in zip(rendered.token_ids, rendered.sampled_mask, strict=True) if sampled]
        empty_thought = self.tokenizer.encode("<think>\n\n</think>\n\n")
        if reasoning is None and ids[: len(empty_thought)] == empty_thought:
            ids = ids[len(empty_thought) :]
        return np.asarray(ids, dtype=np.int64)

    def decode(self, ids: TokenArray) -> str:
        """Text of token ids, special tokens included."""
        return self.tokenizer.decode(ids.tolist())


def _plain(message: Message) -> dict[str, Any]:
    """The library's message form; tool arguments stay objects so that they render as the model wrote them."""
    out = message_json(message)
    for call, plain in zip(message.tool_calls, out.get("tool_calls", ()), strict=True):
        plain["function"]["arguments"] = call.arguments
    return out


def _portable(value: object) -> Mapping[str, Any] | str | None:
    """A name or arguments in a form that every JSON parser reads alike; ``None`` where there is none."""
    if not isinstance(value, dict | str):
        return None
    try:
        if orjson.loads(orjson.dumps(value)) == value:
            return value
        return json.dumps(value) if isinstance(value, dict) else None
    except (TypeError, RecursionError):
        return json.dumps(value) if isinstance(value, dict) else None


def _tools(tools: Sequence[ToolSpec]) -> list[Any] | None:
    return [tool_json(t) for t in tools] or None
