"""What every chat family makes of a conversation: system messages anywhere, results side by side, answers cut short."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from clawgym_env.errors import RenderingError
from clawgym_env.rendering import ChatRenderer, linked
from clawgym_env.types import Message, TokenArray, ToolCall, ToolSpec
from tests.chat_families import CHATML, FAMILIES, renderer_for

TOOL = ToolSpec("run", "Run a command.", {"type": "object", "properties": {"command": {"type": "string"}}})
START = [Message("system", "You are an agent."), Message("user", "How many files are there?")]
TOLD = Message("assistant", "There are four.")
CALLED = Message("assistant", "", None, (ToolCall("run", {"command": "ls -a"}),))
TWICE = replace(CALLED, tool_calls=(*CALLED.tool_calls, ToolCall("run", {"command": "pwd"})))
RESULTS = [Message("tool", "a b c d", tool_call_id="call1x0"), Message("tool", "here", tool_call_id="call1x1")]
RULE, AGAIN = Message("system", "Be brief from now on."), Message("user", "And folders?")


def answer(renderer: ChatRenderer, message: Message) -> TokenArray:
    return renderer.encode_reply(message.content, *message.tool_calls, reasoning=message.reasoning)


def echoed(message: Message) -> Message:
    """As a harness sends it back."""
    return replace(message, tool_calls=tuple(replace(c, id=f"call1x{i}") for i, c in enumerate(message.tool_calls)))


def continued(renderer: ChatRenderer, said: Message, *new: Message) -> tuple[TokenArray | None, TokenArray]:
    """The next prompt, extended and rendered from scratch."""
    messages = linked([*START, echoed(said), *new])
    prompt = renderer.prompt(START, [TOOL])
    longer = renderer.extend(prompt, answer(renderer, said), messages[-len(new) :], [TOOL])
    return longer, renderer.prompt(messages, [TOOL])


def places(text: str, *messages: Message) -> list[int]:
    return [text.index(m.content) for m in messages]


@pytest.mark.parametrize("thinking", [False, True], ids=["plain", "thinking"])
@pytest.mark.parametrize("family", FAMILIES)
def test_system_messages_are_held_wherever_they_stand(family: str, thinking: bool) -> None:
    renderer = renderer_for(family, enable_thinking=thinking)
    extra = Message("system", "The date is unknown.")
    for conversation in (
        [*START, TOLD, RULE, AGAIN],
        [*START, RULE, TOLD, AGAIN],
        [START[1], RULE, TOLD, AGAIN],
        [*START, TOLD, AGAIN, RULE],
        [START[0], extra, START[1]],
        [START[0], extra, START[1], TOLD, RULE, AGAIN],
    ):
        found = places(renderer.decode(renderer.prompt(conversation, [TOOL])), *conversation)
        assert found == sorted(set(found)), conversation


@pytest.mark.parametrize("family", [f for f in FAMILIES if f not in ("laguna-xs.2", "laguna-m.1")])
def test_a_system_message_shows_alike_at_once_and_on_later_turns(family: str) -> None:
    """The two families that are left out break the line after an answer only when they render it from scratch."""
    renderer = renderer_for(family)
    longer, whole = continued(renderer, TOLD, RULE)
    later = renderer.prompt([*START, TOLD, RULE, TOLD, AGAIN], [TOOL])
    shown = {renderer.decode(ids).split(TOLD.content)[1].split(RULE.content)[0] for ids in (whole, later)}
    assert len(shown) == 1
    if longer is not None:
        after = [renderer.decode(ids).split(TOLD.content)[1] for ids in (longer, whole)]
        assert after[0] == after[1]


def test_what_becomes_of_system_messages_where_the_template_takes_one() -> None:
    text = renderer_for("qwen3.5").decode(
        renderer_for("qwen3.5").prompt([START[0], RULE, START[1], TOLD, RULE, AGAIN], [])
    )
    assert text.startswith("<|im_start|>system\nYou are an agent.\nBe brief from now on.<|im_end|>\n<|im_start|>user\n")
    assert text.count("<|im_start|>system") == 1
    assert "There are four.<|im_end|>\n<|im_start|>user\nBe brief from now on.<|im_end|>\n<|im_start|>user\nAnd" in text


def test_what_becomes_of_system_messages_where_the_template_takes_many() -> None:
    text = renderer_for("qwen3").decode(renderer_for("qwen3").prompt([START[0], RULE, START[1], TOLD, RULE, AGAIN], []))
    assert "You are an agent.<|im_end|>\n<|im_start|>system\nBe brief from now on.<|im_end|>\n<|im_start|>user" in text
    assert (
        "There are four.<|im_end|>\n<|im_start|>system\nBe brief from now on.<|im_end|>\n<|im_start|>user\nAnd" in text
    )


@pytest.mark.parametrize(
    "new",
    [
        pytest.param((TOLD, AGAIN), id="user"),
        pytest.param((TOLD, RULE, AGAIN), id="system and user"),
        pytest.param((CALLED, RESULTS[0]), id="result"),
        pytest.param((TWICE, *RESULTS), id="parallel results"),
        pytest.param((TWICE, *reversed(RESULTS)), id="parallel results, the second first"),
        pytest.param((TWICE, *RESULTS, AGAIN), id="results and user"),
        pytest.param((TWICE, *RESULTS, RULE), id="results and system"),
        pytest.param((TWICE, RESULTS[0], RULE, RESULTS[1]), id="system between results"),
        pytest.param((TWICE, RULE, AGAIN, *RESULTS), id="results last"),
    ],
)
@pytest.mark.parametrize("family", CHATML)
def test_extending_equals_the_whole_rendering_without_thinking(family: str, new: tuple[Message, ...]) -> None:
    longer, whole = continued(renderer_for(family), *new)
    assert longer is not None
    assert np.array_equal(longer, whole)


@pytest.mark.parametrize("family", CHATML)
def test_parallel_results_share_one_turn(family: str) -> None:
    renderer = renderer_for(family)
    longer, _ = continued(renderer, TWICE, *RESULTS)
    assert longer is not None
    tail = renderer.decode(longer).split("pwd")[1]
    assert tail.count("<|im_start|>user") == 1 and tail.count("<tool_response>") == 2


@pytest.mark.parametrize("thinking", [False, True], ids=["plain", "thinking"])
@pytest.mark.parametrize("family", FAMILIES)
def test_histories_are_kept_id_for_id_or_the_reason_is_named(family: str, thinking: bool) -> None:
    renderer = renderer_for(family, enable_thinking=thinking)
    prompt = renderer.prompt(START, [TOOL])
    for said, new in [(TOLD, AGAIN), (replace(TOLD, reasoning="Two and two."), AGAIN), (CALLED, RESULTS[0])]:
        whole, new = answer(renderer, said), linked([*START, echoed(said), new])[-1]
        for response in (whole, whole[:-1], whole[:-3]):
            longer = renderer.extend(prompt, response, [new], [TOOL])
            if longer is None:
                why = renderer.why_not_extended(prompt, response, [new])
                assert "template" in why or why == "the answer ended inside its thinking"
            else:
                assert np.array_equal(longer[: len(prompt) + len(response)], np.concatenate([prompt, response]))


@pytest.mark.parametrize("thinking", [False, True], ids=["plain", "thinking"])
@pytest.mark.parametrize("family", [f for f in FAMILIES if f != "deepseek-r1"])
def test_written_answers_are_read_as_they_were_written(family: str, thinking: bool) -> None:
    """R1 takes no answer without a thought, and renders none with one."""
    renderer = renderer_for(family, enable_thinking=thinking)
    prompt = renderer.prompt(START, [TOOL])
    for message in (TOLD, CALLED, TWICE):
        if family == "llama-3" and message is TWICE:
            with pytest.raises(RenderingError, match="single tool call"):
                answer(renderer, message)
            continue
        response = answer(renderer, message)
        assert response[-1] in renderer.stop_token_ids
        read = renderer.parse(response, prompt, [TOOL])
        assert replace(read, content=read.content.strip()) == message


def test_the_template_that_drops_thinking_forks_and_does_not_crash() -> None:
    """Qwen3 keeps the thoughts of a turn up to the next user message, then renders the turn without them."""
    renderer = renderer_for("qwen3", enable_thinking=True)
    thought = replace(CALLED, reasoning="Let me look.")
    longer, whole = continued(renderer, thought, RESULTS[0])
    assert longer is not None and np.array_equal(longer, whole)
    longer, whole = continued(renderer, thought, RESULTS[0], AGAIN)
    assert longer is None
    assert "Let me look." not in renderer.decode(whole)
    prompt = renderer.prompt(START, [TOOL])
    assert np.array_equal(whole[: len(prompt)], prompt)
    why = renderer.why_not_extended(prompt, answer(renderer, thought), [RESULTS[0], AGAIN])
    assert why == "the template drops thinking at a new user message"


def test_tool_results_carry_the_name_and_number_that_some_formats_show() -> None:
    conversation = [*START, echoed(TWICE), *reversed(RESULTS)]
    out = linked(conversation)
    assert [c.id for c in out[2].tool_calls] == ["functions.run:0", "functions.run:1"]
    assert [(m.tool_call_id, m.name) for m in out[3:]] == [("functions.run:1", "run"), ("functions.run:0", "run")]
    assert linked(out) == out
    for start in range(len(conversation) + 1):
        assert linked(conversation, start) == out[start:]
    assert conversation[3].name is None
    kimi = renderer_for("kimi-k2")
    text = kimi.decode(kimi.prompt(conversation, [TOOL]))
    assert "<|tool_call_begin|>functions.run:0<|tool_call_argument_begin|>" in text
    assert text.index("## Return of functions.run:1\nhere") < text.index("## Return of functions.run:0\na b c d")


def test_a_result_whose_call_is_not_there_stays_as_it_is() -> None:
    assert linked([RESULTS[0]]) == [RESULTS[0]]
