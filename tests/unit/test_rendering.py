"""Messages to tokens and back: sampled ids are never re-encoded, and what a policy writes is read as it wrote it."""

from __future__ import annotations

import asyncio
import json
import threading
from typing import Any

import numpy as np
import orjson
import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers

from clawgym_env.errors import RenderingError
from clawgym_env.rendering.chat import RENDER_IN_THREAD_CHARS, ChatRenderer, off_loop
from clawgym_env.rendering.tokenizer import FastTokenizer
from clawgym_env.types import Message, TokenArray, ToolCall, ToolSpec
from clawgym_env.wire.openai_chat import arguments_text

RENDERER = ChatRenderer.from_folder()
THINKING = ChatRenderer.from_folder(enable_thinking=True)
BASH = ToolSpec("bash", "Run a command", {"type": "object", "properties": {"command": {"type": "string"}}})
START = [Message("system", "You are an agent."), Message("user", "List the files.")]
PROMPT = RENDERER.prompt(START, [BASH])


def sampled(text: str) -> TokenArray:
    """What a policy that spells ``text`` would have sampled."""
    return np.asarray(RENDERER.tokenizer.encode(text), dtype=np.int64)


#: Text without markup, and with no space at its ends, which the chat format trims.
PLAIN = st.text().map(lambda s: s.replace("<", "(").strip())
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63) | st.floats(allow_nan=False, allow_infinity=False) | PLAIN,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(PLAIN, inner, max_size=3),
    max_leaves=6,
)
CALLS = st.lists(
    st.builds(
        ToolCall, st.from_regex(r"[a-zA-Z0-9_\-]{1,20}", fullmatch=True), st.dictionaries(PLAIN, JSON, max_size=3)
    ),
    max_size=3,
)


@given(PLAIN, CALLS)
@example("zażółć gęślą jaźń \U0001f600", [ToolCall("bash", {"command": "echo 'ß\u2028' \\n"})])
@example("", [ToolCall("bash", {}), ToolCall("bash", {"a": [1.5, None, True]})])
def test_a_written_answer_is_parsed_as_written(content: str, calls: list[ToolCall]) -> None:
    ids = RENDERER.encode_reply(content, *calls)
    assert ids[-1] in RENDERER.stop_token_ids
    assert RENDERER.parse(ids, PROMPT, [BASH]) == Message("assistant", content, None, tuple(calls))


def test_reasoning_is_kept_apart() -> None:
    ids = THINKING.encode_reply("Four.", reasoning="two and two")
    prompt = THINKING.prompt(START, [])
    assert THINKING.parse(ids, prompt, []) == Message("assistant", "Four.", "two and two")


def test_an_answer_holds_no_empty_thought() -> None:
    """The generation prompt ends in it already where thinking is off."""
    assert RENDERER.decode(RENDERER.encode_reply("Done.")) == "Done.<|im_end|>"
    assert RENDERER.decode(PROMPT).endswith("<think>\n\n</think>\n\n")


#: A sign right after the line break that comes before an answer may share a token with it when both are rendered.
TURNS = st.lists(
    st.tuples(PLAIN.map(lambda s: s and f"So {s}"), CALLS, st.lists(st.text(max_size=20), min_size=1, max_size=3)),
    min_size=1,
    max_size=3,
)


@given(TURNS)
def test_extending_keeps_every_id_and_equals_the_whole_rendering(turns: list[Any]) -> None:
    messages, prompt = list(START), PROMPT
    for content, calls, results in turns:
        response = RENDERER.encode_reply(content, *calls)
        reply = RENDERER.parse(response, prompt, [BASH])
        new = [Message("tool", r, tool_call_id="c") for r in results] if calls else [Message("user", results[0])]
        longer = RENDERER.extend(prompt, response, new, [BASH])
        assert longer is not None
        history = np.concatenate([prompt, response])
        assert np.array_equal(longer[: len(history)], history)
        messages += [reply, *new]
        assert np.array_equal(longer, RENDERER.prompt(messages, [BASH]))
        prompt = longer


def test_ids_that_no_encoder_would_choose_survive() -> None:
    """A policy may spell a word letter by letter; the history must keep its own spelling."""
    letters = np.concatenate([sampled(c) for c in "Done"])
    response = np.append(letters, RENDERER.stop_token_ids[0])
    assert len(letters) == 4 > len(sampled("Done"))
    longer = RENDERER.extend(PROMPT, response, [Message("user", "Sure?")], [BASH])
    assert longer is not None
    assert np.array_equal(longer[len(PROMPT) : len(PROMPT) + len(response)], response)
    assert RENDERER.decode(longer[len(PROMPT) + len(response) :]).startswith("\n<|im_start|>user\nSure?<|im_end|>")


NEXT = "\n<|im_start|>user\nGo on.<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"


@pytest.mark.parametrize(
    ("said", "closing"),
    [
        pytest.param("I was cut", "<|im_end|>", id="in the text, or by a stop sequence"),
        pytest.param("<think>\nI was", "</think><|im_end|>", id="in a thought"),
        pytest.param("<think>\nI was cut\n</think>\n\n", "<|im_end|>", id="after a thought"),
        pytest.param('Look. <tool_call>\n{"name": "bash", "argum', "<|im_end|>", id="in a tool call"),
        pytest.param('<think>\nHm <tool_call>\n{"name"', "<|im_end|>", id="in a tool call that ends a thought"),
        pytest.param("Done.<|im_end|>", "", id="not at all"),
        pytest.param("Done.<|endoftext|>", "", id="at the end of text"),
    ],
)
def test_an_answer_that_was_cut_short_is_closed_by_the_prompt(said: str, closing: str) -> None:
    response = sampled(said)
    longer = RENDERER.extend(PROMPT, response, [Message("user", "Go on.")], [BASH])
    assert longer is not None
    assert np.array_equal(longer, np.concatenate([PROMPT, response, sampled(closing + NEXT)]))


@pytest.mark.parametrize("renderer", [RENDERER, THINKING], ids=["plain", "thinking"])
def test_extending_from_the_open_turn_equals_extending_from_the_whole_prompt(renderer: ChatRenderer) -> None:
    """Only the last turn is handed to the library, so that a call does not cost its whole history."""
    prompt, bridge = renderer.prompt(START, [BASH]), renderer._library.bridge
    for k in range(4):
        response = renderer.encode_reply(f"Step {k}.", ToolCall("bash", {"command": f"ls {k}"}))
        if renderer is THINKING:
            response = np.concatenate([sampled("<think>\nwell\n</think>\n\n"), response])
        new = [Message("tool", "a\nb", tool_call_id="c")]
        whole, longer = bridge(prompt, response, new, None), renderer.extend(prompt, response, new, [])
        assert whole is not None and longer is not None
        assert np.array_equal(longer, whole)
        prompt = longer


def test_a_turn_longer_than_a_block_is_found() -> None:
    question = Message("user", "why " * 3000)
    prompt = RENDERER.prompt([*START, question], [])
    longer = RENDERER.extend(prompt, RENDERER.encode_reply("So."), [Message("user", "Ah.")], [])
    whole = RENDERER.prompt([*START, question, Message("assistant", "So."), Message("user", "Ah.")], [])
    assert longer is not None and np.array_equal(longer, whole)


@pytest.mark.parametrize(
    ("renderer", "said", "new", "why"),
    [
        (RENDERER, "Done.<|im_end|>", [], "the request adds nothing to its history"),
        (
            RENDERER,
            "Done.<|im_end|>",
            [Message("assistant", "I go on.")],
            "an answer that was not sampled follows the history",
        ),
        # Tokens after the end of a turn have no place in the next prompt; dropping them would rewrite what was sampled.
        (RENDERER, "Done.<|im_end|> tail", [Message("user", "Sure?")], "the answer goes on after its end"),
        (RENDERER, "<think>\nHm<|im_end|>", [Message("user", "Sure?")], "the answer ended inside its thinking"),
        (
            THINKING,
            "<think>\nHm\n</think>\n\nYes.<|im_end|>",
            [Message("user", "Sure?")],
            "the template drops thinking at a new user message",
        ),
    ],
)
def test_what_cannot_be_extended_says_why(renderer: ChatRenderer, said: str, new: list[Message], why: str) -> None:
    prompt, response = renderer.prompt(START, [BASH]), sampled(said)
    assert renderer.extend(prompt, response, new, [BASH]) is None
    assert renderer.why_not_extended(prompt, response, new) == why


@pytest.mark.parametrize(
    ("block", "visible"),
    [
        ('{"name": "bash", "arguments": {"x": \n', '{"name": "bash", "arguments": {"x":\n'),
        ('{"arguments": {}}\n', '{"arguments": {}}\n'),
        ('{"name": 5, "arguments": {}}\n', '{"name": 5, "arguments": {}}\n'),
        ('{"name": "a", "arguments": [1]}\n', '{"name": "a", "arguments": [1]}\n'),
        ("not json\n", "not json\n"),
    ],
)
def test_a_broken_tool_call_stays_visible_as_text(block: str, visible: str) -> None:
    message = RENDERER.parse(sampled(f"<tool_call>\n{block}</tool_call><|im_end|>"), PROMPT, [BASH])
    assert message == Message("assistant", f"<tool_call>\n{visible}</tool_call>")


def test_a_call_that_was_cut_short_is_text_and_not_closed_for_the_policy() -> None:
    message = RENDERER.parse(sampled('Hm. <tool_call>\n{"name": "bash", "argum'), PROMPT, [BASH])
    assert message == Message("assistant", 'Hm.\n<tool_call>\n{"name": "bash", "argum')


def test_a_broken_call_does_not_hide_a_good_one() -> None:
    text = '<tool_call>\n{"name": "bash", "arguments": {}}\n</tool_call>\n<tool_call>\n{oops\n</tool_call><|im_end|>'
    message = RENDERER.parse(sampled(text), PROMPT, [BASH])
    assert message.tool_calls == (ToolCall("bash", {}),)
    assert message.content == "<tool_call>\n{oops\n</tool_call>"


@pytest.mark.parametrize(
    "value", ["123456789012345678901234567890", '"\\ud83d"', "NaN", "-Infinity", "[" * 300 + "]" * 300]
)
def test_arguments_that_json_parsers_disagree_on_are_kept_as_text(value: str) -> None:
    """Python reads these, other parsers refuse or change them; they used to break the answer after it was committed."""
    text = f'<tool_call>\n{{"name": "bash", "arguments": {{"x": {value}}}}}\n</tool_call><|im_end|>'
    (call,) = RENDERER.parse(sampled(text), PROMPT, [BASH]).tool_calls
    assert isinstance(call.arguments, str)
    assert call.arguments == f'{{"x": {value}}}'
    assert arguments_text(call.arguments) == call.arguments
    orjson.dumps(call.arguments)


@pytest.mark.parametrize("value", ["9" * 5000, "[" * 3000 + "]" * 3000])
def test_json_past_pythons_own_limits_is_text(value: str) -> None:
    text = f'<tool_call>\n{{"name": "bash", "arguments": {{"x": {value}}}}}\n</tool_call>'
    message = RENDERER.parse(sampled(text + "<|im_end|>"), PROMPT, [BASH])
    assert message == Message("assistant", text)


@given(st.lists(st.integers(0, RENDERER.vocab_size - 1), min_size=1, max_size=40))
def test_any_tokens_give_a_message_that_can_be_sent_and_extended(ids: list[int]) -> None:
    response = np.asarray(ids, dtype=np.int64)
    stops = np.flatnonzero(np.isin(response, RENDERER.stop_token_ids))
    response = response[: stops[0] + 1] if stops.size else response
    message = RENDERER.parse(response, PROMPT, [BASH])
    orjson.dumps([message.content, message.reasoning, [[c.name, c.arguments] for c in message.tool_calls]])
    longer = RENDERER.extend(PROMPT, response, [Message("user", "Next.")], [BASH])
    if longer is not None:
        history = np.concatenate([PROMPT, response])
        assert np.array_equal(longer[: len(history)], history)
    RENDERER.prompt([*START, message, Message("user", "Next.")], [BASH])


@given(st.text())
def test_text_is_decoded_as_it_was_encoded(text: str) -> None:
    assume("<" not in text)
    assert RENDERER.decode(sampled(text)) == text


def test_an_unknown_family_is_named() -> None:
    with pytest.raises(RenderingError, match=r"no chat family 'nope'.*qwen3"):
        ChatRenderer(RENDERER.tokenizer, family="nope")


def test_a_tokenizer_without_tool_tokens_is_refused_with_the_missing_token() -> None:
    plain = Tokenizer(
        models.BPE(vocab={c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, merges=[])
    )
    plain.add_special_tokens(["<|im_start|>", "<|im_end|>", "<|endoftext|>"])
    with pytest.raises(RenderingError, match=r"'my-model' cannot hold qwen3 chats.*<tool_call>"):
        ChatRenderer(FastTokenizer(plain, name_or_path="my-model"))


def test_messages_that_no_template_holds_are_refused() -> None:
    with pytest.raises(RenderingError, match="cannot hold these messages"):
        RENDERER.prompt([], [])


def nested(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(levels):
        schema = {"type": "array", "items": schema}
    return schema


@pytest.mark.parametrize(
    "tool",
    [
        pytest.param(ToolSpec(""), id="no name"),
        pytest.param(ToolSpec('say "hello"'), id="quotes"),
        pytest.param(ToolSpec("two\nlines"), id="newline"),
        pytest.param(ToolSpec("back\\slash"), id="backslash"),
        pytest.param(ToolSpec("</tool_call>"), id="markup"),
        pytest.param(ToolSpec("half \ud83d"), id="half a surrogate pair"),
        pytest.param(ToolSpec("deep", "", nested(300)), id="deep"),
        pytest.param(ToolSpec("half", "\ud83d"), id="half a surrogate pair in the description"),
        pytest.param(ToolSpec("big", "", {"maximum": 1 << 70}), id="more than 64 bits"),
    ],
)
def test_tools_that_no_template_holds_are_refused_by_name(tool: ToolSpec) -> None:
    with pytest.raises(RenderingError) as refusal:
        RENDERER.prompt(START, [BASH, tool])
    assert repr(tool.name) in str(refusal.value)


@pytest.mark.parametrize("name", ["mcp__files__read", "files.read", "files/read", "read file", "lire_été", "読む"])
def test_names_that_a_call_can_hold_are_taken(name: str) -> None:
    prompt = RENDERER.prompt(START, [ToolSpec(name)])
    call = ToolCall(name, {"path": "a"})
    assert RENDERER.parse(RENDERER.encode_reply("", call), prompt, [ToolSpec(name)]).tool_calls == (call,)


def test_a_refused_set_of_tools_is_refused_again() -> None:
    for _ in range(2):
        with pytest.raises(RenderingError):
            RENDERER.prompt(START, [ToolSpec("")])


def test_tools_are_rendered_with_their_schema() -> None:
    text = RENDERER.decode(RENDERER.prompt(START, [BASH]))
    line = next(part for part in text.split("\n") if part.startswith('{"type": "function"'))
    assert json.loads(line)["function"]["parameters"] == BASH.parameters


@given(st.text())
@example("\ud83d \U0001f600 <|im_end|> e\u0301")
@example("x" * 100)
def test_ids_are_the_same_with_offsets_and_without(text: str) -> None:
    tokenizer = RENDERER.tokenizer
    ids = tokenizer(text)["input_ids"]
    assert tokenizer.encode(text) == ids
    lean = tokenizer.for_ids()
    found = lean(text, return_offsets_mapping=True)
    assert lean.encode(text) == lean.encode(text) == found["input_ids"] == ids
    assert len(found["offset_mapping"]) == len(ids)


def test_only_long_renderings_leave_the_event_loop() -> None:
    async def where(content: str) -> int:
        message = Message("assistant", "", None, (ToolCall("write", {"content": content}),))
        return await off_loop([message, Message("tool", "ok")], threading.get_ident)

    here = threading.get_ident()
    assert asyncio.run(where("x" * (RENDER_IN_THREAD_CHARS - 3))) == here
    assert asyncio.run(where("x" * RENDER_IN_THREAD_CHARS)) != here


def test_the_event_loop_goes_on_while_a_long_text_is_tokenised() -> None:
    """A tokenizer that kept other threads from running would let it tick once or twice."""
    text = "aZ3k9Qp+/x0" * 50_000

    async def ticks() -> int:
        work = asyncio.ensure_future(off_loop([Message("tool", text)], lambda: RENDERER.tokenizer.encode(text)))
        count = 0
        while not work.done():
            await asyncio.sleep(0.001)
            count += 1
        return count

    assert asyncio.run(ticks()) > 10
