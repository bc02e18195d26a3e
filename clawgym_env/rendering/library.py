"""The ``renderers`` library behind types of ours: one chat family with one tokenizer.

Invariant: nothing is decided here. Ids go in and come out as the library makes them; what it raises on what it did not
expect leaves as :data:`LIBRARY_ERRORS`, and only :meth:`Library.parse` turns such an error into an answer.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import orjson

from clawgym_env.errors import RenderingError
from clawgym_env.rendering.tokenizer import FastTokenizer
from clawgym_env.types import Message, TokenArray, ToolCall
from clawgym_env.wire.openai_chat import message_json

#: What the library raises on messages, tools or ids that it did not expect; recursion limits are RuntimeErrors.
LIBRARY_ERRORS = (ValueError, TypeError, KeyError, IndexError, AttributeError, AssertionError, RuntimeError)

Spec = dict[str, Any]


class Library:
    """One chat family.

    Attributes:
        stop_token_ids: Tokens that end an answer.

    Raises:
        RenderingError: an unknown family, or a tokenizer that lacks a special token of the family.
    """

    def __init__(self, tokenizer: FastTokenizer, family: str, enable_thinking: bool) -> None:
        import renderers  # 1.3 s: only where tokens are made

        self._tokenizer = tokenizer
        if family in ("auto", "default"):
            raise RenderingError(f"name a chat family: {family!r} would run a template that came with the model")
        try:
            config = renderers.config_from_name(family)
        except ValueError as error:
            raise RenderingError(f"there is no chat family {family!r}: {error}") from error
        known = "enable_thinking" in renderers.template_field_names(config)
        kwargs = {"enable_thinking": enable_thinking} if known else None
        try:
            # Which message a token came from is asked for written answers only, and costs half of the time.
            self._ids = renderers.create_renderer(tokenizer.for_ids(), config, chat_template_kwargs=kwargs)
            self._attributed = renderers.create_renderer(tokenizer, config, chat_template_kwargs=kwargs)
            self.stop_token_ids: tuple[int, ...] = tuple(self._ids.get_stop_token_ids())
            self.prompt([Message("user", "Hello")])
        except LIBRARY_ERRORS as error:
            raise RenderingError(
                f"the tokenizer at {tokenizer.name_or_path!r} cannot hold {family} chats: {error}. Use a model whose "
                "tokenizer has the family's chat and tool-call tokens."
            ) from error

    def prompt(self, messages: Sequence[Message], specs: list[Spec] | None = None) -> TokenArray:
        """A conversation up to where the next answer begins; [P] int64."""
        plain = [_plain(m) for m in messages]
        return np.asarray(self._ids.render_ids(plain, tools=specs, add_generation_prompt=True), dtype=np.int64)

    def bridge(
        self, prompt_ids: TokenArray, response_ids: TokenArray, new: Sequence[Message], specs: list[Spec] | None
    ) -> TokenArray | None:
        """What the library makes of a prompt, its answer and what follows; ``None`` where it will not or cannot."""
        plain = [_plain(m) for m in new]
        try:
            bridged = self._ids.bridge_to_next_turn(prompt_ids.tolist(), response_ids.tolist(), plain, tools=specs)
        except LIBRARY_ERRORS:  # a rendering from scratch will say what is wrong, if anything is
            return None
        return None if bridged is None else np.asarray(bridged.token_ids, dtype=np.int64)

    def parse(self, response_ids: TokenArray, prompt_ids: TokenArray, specs: list[Spec] | None) -> Message:
        """See :meth:`clawgym_env.rendering.ChatRenderer.parse`."""
        try:
            parsed = self._ids.parse_response(response_ids.tolist(), tools=specs, prompt_ids=prompt_ids.tolist())
        except LIBRARY_ERRORS:  # such as Python's own limits: 4,300 digits, brackets nested a thousand deep
            shown = response_ids[~np.isin(response_ids, self.stop_token_ids)]
            return Message("assistant", self._tokenizer.decode(shown.tolist()))
        content, calls = parsed.content, []
        for call in parsed.tool_calls:
            name, arguments = _portable(call.name), _portable(call.arguments)
            if isinstance(name, str) and name and arguments is not None:
                calls.append(ToolCall(name, arguments))
            else:
                end = "" if call.status.name == "UNCLOSED_BLOCK" else "\n</tool_call>"
                content = "\n".join(filter(None, [content, f"<tool_call>\n{call.raw}{end}"]))
        return Message("assistant", content, parsed.reasoning_content or None, tuple(calls))

    def answer(self, message: Message) -> TokenArray:
        """What a policy samples to say this, end of turn included; [T] int64.

        Raises:
            RenderingError: no answer in this chat format says this.
        """
        try:
            ids = self._answer(message)
        except LIBRARY_ERRORS as error:
            raise RenderingError(f"the chat template cannot hold this answer: {error}") from error
        return np.asarray(ids, dtype=np.int64)

    def _answer(self, message: Message) -> list[int]:
        turns = [_plain(Message("user")), _plain(message)]
        opening = self._ids.render_ids(turns[:1], add_generation_prompt=True)
        rendered = self._attributed.render(turns)
        whole, sampled = rendered.token_ids, [i for i, mine in enumerate(rendered.sampled_mask) if mine]
        if whole[: len(opening)] == opening:
            ids = [whole[i] for i in sampled if i >= len(opening)]
        else:
            ids = self._after_opening(turns, opening) or [whole[i] for i in sampled]
        empty_thought = self._tokenizer.encode("<think>\n\n</think>\n\n")
        if message.reasoning is None and ids[: len(empty_thought)] == empty_thought:
            ids = ids[len(empty_thought) :]
        if not ids or ids[-1] not in self.stop_token_ids:
            ids.append(self._closing(turns))
        return ids

    def _after_opening(self, turns: list[dict[str, Any]], opening: list[int]) -> list[int]:
        """The answer where its rendering begins otherwise than the generation prompt ends, as in an open thought."""
        before = self._tokenizer.decode(opening)
        thought = turns[1].get("reasoning_content")
        for filler in ("",) if thought else ("", "-"):  # a thought that is there only to be taken out again
            said = {**turns[1], "reasoning_content": filler} if filler else turns[1]
            rendered = self._attributed.render([turns[0], said])
            end = max(i for i, mine in enumerate(rendered.sampled_mask) if mine) + 1
            text = self._tokenizer.decode(rendered.token_ids[:end])
            if text.startswith(before + filler):
                return self._tokenizer.encode(text[len(before + filler) :])
        return []

    def _closing(self, turns: list[dict[str, Any]]) -> int:
        """The token that ends an answer in families where the opening of the next turn does."""
        follows = Message("tool", tool_call_id="") if turns[-1].get("tool_calls") else Message("user")
        rendered = self._attributed.render([*turns, _plain(follows)])
        tokens = zip(rendered.token_ids, rendered.sampled_mask, rendered.message_indices, strict=True)
        last = [token for token, mine, turn in tokens if mine and turn == 1][-1:]
        return last[0] if last and last[0] in self.stop_token_ids else self.stop_token_ids[0]


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
