"""Any conversation: extending turn by turn equals rendering the whole; what no template holds is refused by name."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from clawgym_env.errors import RenderingError
from clawgym_env.rendering import ChatRenderer, linked
from clawgym_env.tree.prefix_tree import PrefixTree
from clawgym_env.types import Generation, Message, TokenArray, ToolCall, ToolSpec
from tests.chat_families import CHATML, FAMILIES, renderer_for

RUN = ToolSpec("run", "Run a command.", {"type": "object", "properties": {"command": {"type": "string"}}})
#: Templates trim texts, some read markup in them, and a sign right after a line break may share a token with it.
WORDS = st.lists(st.sampled_from(["a", "file", "42", "times,", "no:", "(x)", "☃", "dir/"]), max_size=4).map(
    lambda words: " ".join(["So", *words])
)
CALLS = st.lists(st.builds(ToolCall, st.just("run"), st.fixed_dictionaries({"command": WORDS})), max_size=3)
HARNESS = st.lists(st.builds(Message, st.sampled_from(["user", "system"]), WORDS), max_size=2)


@st.composite
def turns(draw: st.DrawFn) -> list[tuple[Message, list[Message]]]:
    """Answers, each with what the harness adds: a result for every call in any order, and messages in between."""
    out = []
    for number in range(1, draw(st.integers(2, 4))):
        calls = [replace(c, id=f"call{number}x{i}") for i, c in enumerate(draw(CALLS))]
        new = [Message("tool", draw(WORDS), tool_call_id=c.id) for c in calls] + draw(HARNESS)
        new = draw(st.permutations(new)) or [Message("user", draw(WORDS))]
        out.append((Message("assistant", draw(WORDS), None, tuple(calls)), list(new)))
    return out


def answer(renderer: ChatRenderer, message: Message) -> TokenArray:
    return renderer.encode_reply(message.content, *message.tool_calls, reasoning=message.reasoning)


@pytest.mark.parametrize("family", CHATML)
@given(opening=st.lists(st.builds(Message, st.just("system"), WORDS), max_size=3), turns=turns())
@settings(max_examples=20)
def test_extending_turn_by_turn_equals_rendering_the_whole(
    family: str, opening: list[Message], turns: list[tuple[Message, list[Message]]]
) -> None:
    renderer = renderer_for(family)
    messages = [*opening, Message("user", "Begin.")]
    prompt = renderer.prompt(messages, [RUN])
    for said, new in turns:
        response = answer(renderer, said)
        messages += [said, *new]
        longer = renderer.extend(prompt, response, linked(messages)[-len(new) :], [RUN])
        assert longer is not None
        assert np.array_equal(longer[: len(prompt) + len(response)], np.concatenate([prompt, response]))
        assert np.array_equal(longer, renderer.prompt(messages, [RUN]))
        prompt = longer


@pytest.mark.parametrize("family", FAMILIES)
@given(turns=turns(), thoughts=st.lists(WORDS, min_size=3, max_size=3))
@settings(max_examples=5)
def test_thinking_kept_or_dropped_loses_no_token_and_refuses_no_request(
    family: str, turns: list[tuple[Message, list[Message]]], thoughts: list[str]
) -> None:
    """A rewritten history is a fork of the tree; every answer is a path of its own, as it was sampled."""
    renderer = renderer_for(family, enable_thinking=True)
    messages, tree = [Message("user", "Begin.")], PrefixTree()
    prompt = renderer.prompt(messages, [RUN])
    for number, (said, new) in enumerate(turns):
        said, new = held_by(family, replace(said, reasoning=thoughts[number]), new)
        response = answer(renderer, said)
        n = len(response)
        generation = Generation(response, np.zeros(n, np.float32), np.zeros(n, np.int64), "stop")
        tree.attach(number, prompt, generation, prefer=None)
        assert np.array_equal(tree.path_ids(number), np.concatenate([prompt, response]))
        messages += [said, *new]
        new = linked(messages)[-len(new) :]
        longer = renderer.extend(prompt, response, new, [RUN])
        if longer is None:
            assert renderer.why_not_extended(prompt, response, new)
            longer = renderer.prompt(messages, [RUN])
        prompt = longer


def held_by(family: str, said: Message, new: list[Message]) -> tuple[Message, list[Message]]:
    """A turn without what two families refuse by name: several calls in one answer, a result that is not next to it."""
    if family == "llama-3":
        said = replace(said, tool_calls=said.tool_calls[:1])
        kept = {c.id for c in said.tool_calls}
        new = [m for m in new if m.role != "tool" or m.tool_call_id in kept] or [Message("user", "Go on.")]
    if family == "gemma4":
        new = sorted(new, key=lambda m: m.role != "tool")
    return said, new


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
KEYWORDS = st.sampled_from(
    ["type", "properties", "items", "required", "enum", "description", "anyOf", "$ref", "$defs", "default", "title"]
)
SCHEMAS = st.dictionaries(
    KEYWORDS | st.text(max_size=5), st.recursive(JSON, lambda s: st.dictionaries(KEYWORDS, s, max_size=3), max_leaves=5)
)


@pytest.mark.parametrize("family", FAMILIES)
@given(schema=SCHEMAS)
@example(schema={"properties": {"a": True}})
@example(schema={"properties": []})
@example(schema={"type": ["string", "null"], "properties": {"a": {"type": ["string", "null"], "description": None}}})
@example(schema={"properties": {"a": {"$ref": "#/$defs/none"}}, "required": "a"})
@settings(max_examples=10)
def test_any_schema_is_rendered_or_refused_with_the_name_of_its_tool(family: str, schema: dict[str, Any]) -> None:
    renderer, tool = renderer_for(family), ToolSpec("odd_one", "Odd.", schema)
    start = [Message("user", "Begin.")]
    try:
        prompt = renderer.prompt(start, [RUN, tool])
    except RenderingError as refusal:
        assert "'odd_one'" in str(refusal)
        return
    said = Message("assistant", "Done.")
    read = renderer.parse(answer(renderer, said), prompt, [RUN, tool])
    assert read.content.strip() == "Done." or family == "deepseek-r1"
    renderer.extend(prompt, answer(renderer, said), [Message("user", "Go on.")], [RUN, tool])


@pytest.mark.parametrize("family", ["qwen3", "qwen3.5", "kimi-k2", "gemma4"])
@given(name=st.text(max_size=12))
@settings(max_examples=60)
def test_a_tool_is_refused_or_can_be_called(family: str, name: str) -> None:
    renderer, tool = renderer_for(family), ToolSpec(name)
    try:
        prompt = renderer.prompt([Message("user", "Begin.")], [tool])
    except RenderingError as refusal:
        assert repr(name) in str(refusal)
        return
    (call,) = renderer.parse(renderer.encode_reply("", ToolCall(name, {})), prompt, [tool]).tool_calls
    assert call == ToolCall(name, {})


@pytest.mark.parametrize("family", FAMILIES)
@given(name=st.from_regex(r"[a-zA-Z0-9_-]{1,64}", fullmatch=True))
@settings(max_examples=5)
def test_names_that_apis_allow_are_taken(family: str, name: str) -> None:
    renderer_for(family).prompt([Message("user", "Begin.")], [ToolSpec(name)])
