"""What a harness may change in what it tells again, one tolerance at a time; which call a request then continues."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable
from typing import Any

import pytest

from clawgym_env.dialect import SAFE, Dialect, Hints, Rewrite, Tolerance
from clawgym_env.proxy.echoes import arrange, differences, includes, mint, same, stabilise
from clawgym_env.proxy.matching import History, Proposal
from clawgym_env.types import Message, ToolCall, ToolSpec
from clawgym_env.wire.base import parse_arguments
from clawgym_env.wire.openai_chat import parse_request

EVERYTHING = Dialect(frozenset(Tolerance))
TOOLS = (ToolSpec("bash", "runs", {"type": "object", "properties": {"command": {"type": "string"}}}),)
START = (Message("system", "You are an agent."), Message("user", "List the files."))
MORE = Message("user", "Go on.")


def call(command: str, number: int = 1, index: int = 0, **more: Any) -> ToolCall:
    return ToolCall("bash", {"command": command, **more}, mint(number, index))


def said(content: str = "", *calls: ToolCall, reasoning: str | None = None) -> Message:
    return Message("assistant", content, reasoning, calls)


def result(content: str, number: int = 1, index: int = 0) -> Message:
    return Message("tool", content, tool_call_id=mint(number, index))


class Calls:
    """A history, and how calls are committed to it."""

    def __init__(self, dialect: Dialect | None = None) -> None:
        self.history = History(dialect)
        self.made = 0

    def propose(self, *messages: Message, tools: tuple[ToolSpec, ...] = TOOLS) -> Proposal:
        return self.history.propose(tools, messages)

    def answer(self, messages: tuple[Message, ...], reply: Message, **more: Any) -> Proposal:
        proposal = self.propose(*messages, **more)
        self.history.commit(self.made, proposal, reply)
        self.made += 1
        return proposal


# --- tolerances ---

ORIGINAL = Message(
    "assistant",
    "Looking:\n",
    "First a.\nThen b.",
    (ToolCall("bash", {"command": "ls", "env": [{"A": 1}]}, mint(1, 0)), call("pwd", 1, 1)),
)


def with_arguments(change: Callable[[dict[str, Any]], Any]) -> Message:
    first = ORIGINAL.tool_calls[0]
    assert not isinstance(first.arguments, str)
    arguments = change(json.loads(json.dumps(first.arguments)))
    calls = (dataclasses.replace(first, arguments=arguments), *ORIGINAL.tool_calls[1:])
    return dataclasses.replace(ORIGINAL, tool_calls=calls)


def with_name(name: str, call_id: str) -> Message:
    first = dataclasses.replace(ORIGINAL.tool_calls[0], name=name, id=call_id)
    return dataclasses.replace(ORIGINAL, tool_calls=(first, *ORIGINAL.tool_calls[1:]))


def renamed(message: Message, name: str = "toolu_9f") -> Message:
    calls = tuple(dataclasses.replace(c, id=f"{name}{i}") for i, c in enumerate(message.tool_calls))
    return dataclasses.replace(message, tool_calls=calls)


ECHOES: dict[str, tuple[Message, set[Tolerance] | None]] = {
    "itself": (ORIGINAL, set()),
    "ids": (renamed(ORIGINAL), set()),
    "key order": (with_arguments(lambda a: dict(reversed(a.items()))), set()),
    "a number's type": (with_arguments(lambda a: {**a, "env": [{"A": 1.0}]}), set()),
    "white space": (dataclasses.replace(ORIGINAL, content=" Looking:"), {Tolerance.TRIMMED_TEXT}),
    "white space in thinking": (
        dataclasses.replace(ORIGINAL, reasoning="First a.\nThen b.\n"), {Tolerance.TRIMMED_TEXT},
    ),
    "other text": (dataclasses.replace(ORIGINAL, content="Look:"), None),
    "no text": (dataclasses.replace(ORIGINAL, content=""), {Tolerance.DROPPED_TEXT}),
    "no thinking": (dataclasses.replace(ORIGINAL, reasoning=None), {Tolerance.DROPPED_REASONING}),
    "some thinking": (dataclasses.replace(ORIGINAL, reasoning="Then b."), {Tolerance.PARTIAL_REASONING}),
    "other thinking": (dataclasses.replace(ORIGINAL, reasoning="Then c."), None),
    "a default": (with_arguments(lambda a: {**a, "timeout": 120}), {Tolerance.INSERTED_ARGUMENTS}),
    "a default deep down": (
        with_arguments(lambda a: {**a, "env": [{"A": 1, "B": None}]}),
        {Tolerance.INSERTED_ARGUMENTS},
    ),
    "a default and no id": (renamed(with_arguments(lambda a: {**a, "x": 1})), {Tolerance.INSERTED_ARGUMENTS}),
    "no argument": (with_arguments(lambda a: {"command": "ls"}), {Tolerance.REWRITTEN_ARGUMENTS}),
    "another argument": (with_arguments(lambda a: {**a, "command": "rm"}), {Tolerance.REWRITTEN_ARGUMENTS}),
    "true is not 1": (with_arguments(lambda a: {**a, "env": [{"A": True}]}), {Tolerance.REWRITTEN_ARGUMENTS}),
    "arguments as text": (with_arguments(lambda a: "{"), {Tolerance.REWRITTEN_ARGUMENTS}),
    "another argument and no id": (renamed(with_arguments(lambda a: {**a, "command": "rm"})), None),
    "another tool": (
        dataclasses.replace(ORIGINAL, tool_calls=(ToolCall("sh", {}, mint(1, 0)), call("pwd", 1, 1))),
        {Tolerance.RENAMED_CALLS, Tolerance.REWRITTEN_ARGUMENTS},
    ),
    "another name": (with_name("invalid", mint(1, 0)), {Tolerance.RENAMED_CALLS}),
    "another name and id": (with_name("invalid", mint(2, 0)), None),
    "another name and no id": (with_name("invalid", ""), None),
    "one call fewer": (dataclasses.replace(ORIGINAL, tool_calls=ORIGINAL.tool_calls[:1]), None),
    "calls swapped": (dataclasses.replace(ORIGINAL, tool_calls=ORIGINAL.tool_calls[::-1]), None),
    "several at once": (
        dataclasses.replace(renamed(with_arguments(lambda a: {**a, "x": 1})), content="Looking:", reasoning=None),
        {Tolerance.INSERTED_ARGUMENTS, Tolerance.TRIMMED_TEXT, Tolerance.DROPPED_REASONING},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", list(ECHOES))
def test_an_echo_differs_in_known_ways_or_is_another_message(name: str) -> None:
    echo, expected = ECHOES[name]
    found = differences(ORIGINAL, echo)
    assert found == (None if expected is None else frozenset(expected))


@pytest.mark.parametrize("name", list(ECHOES))
def test_what_a_dialect_tolerates_continues_and_is_recorded_else_it_forks(name: str) -> None:
    echo, expected = ECHOES[name]
    for tolerates in (frozenset(Tolerance), SAFE, *(frozenset(Tolerance) - {t} for t in Tolerance)):
        it = Calls(Dialect(tolerates))
        it.answer(START, ORIGINAL)
        proposal = it.propose(*START, echo, MORE)
        if expected is not None and expected <= tolerates:
            assert (proposal.parent, proposal.shared, proposal.tolerated) == (0, 3, expected)
        else:
            assert (proposal.parent, proposal.shared, proposal.tolerated) == (None, 0, frozenset())


def test_the_default_is_safe() -> None:
    unsafe = {Tolerance.REWRITTEN_ARGUMENTS, Tolerance.DROPPED_TEXT, Tolerance.RENAMED_CALLS}
    assert Dialect().tolerates == SAFE == frozenset(Tolerance) - unsafe


def test_arguments_that_we_keep_as_text_may_come_back_parsed() -> None:
    text = '{"x": 123456789012345678901234567890}'
    kept, parsed = ToolCall("bash", text), ToolCall("bash", parse_arguments(text))
    assert not isinstance(parsed.arguments, str)
    assert differences(said("", kept), said("", kept)) == differences(said("", kept), said("", parsed)) == set()
    assert differences(said("", kept), said("", ToolCall("bash", {"x": 1}))) is None
    assert differences(said("", ToolCall("bash", "{oops")), said("", ToolCall("bash", {}))) is None


def test_text_without_calls_cannot_be_dropped() -> None:
    assert differences(said("Done."), said("")) is None
    assert differences(said(" \n"), said("")) == {Tolerance.TRIMMED_TEXT}


def test_thinking_cannot_be_added() -> None:
    assert differences(said("Done."), said("Done.", reasoning="Hm.")) is None


@pytest.mark.parametrize(
    ("one", "other", "equal", "within"),
    [
        ({"a": 1}, {"a": 1.0}, True, True),
        ({"a": 1}, {"a": True}, False, False),
        ({"a": 0}, {"a": False}, False, False),
        ({"a": 0}, {"a": None}, False, False),
        ({}, {}, True, True),
        ({}, {"a": 1}, False, True),
        ({"a": 1}, {}, False, False),
        ({"a": {"b": 1}}, {"a": {"b": 1, "c": 2}}, False, True),
        ({"a": [1, 2]}, {"a": [1, 2, 3]}, False, False),
        ({"a": [{}, 2]}, {"a": [{"b": 1}, 2]}, False, True),
        ({"a": "x"}, {"a": "x "}, False, False),
        ("{", "{", True, True),
        ("{", {}, False, False),
        ({}, "{", False, False),
        ([], {}, False, False),
    ],
)
def test_arguments_are_compared_as_json(one: Any, other: Any, equal: bool, within: bool) -> None:
    assert same(one, other) == same(other, one) == equal
    assert includes(other, one) == within


@pytest.mark.parametrize("role", ["system", "user", "tool"])
def test_white_space_around_what_a_harness_tells_again(role: Any) -> None:
    chat = (*START, Message(role, "text\n"))
    again = (*START, Message(role, " text"))
    for tolerates in (SAFE, SAFE - {Tolerance.TRIMMED_TEXT}):
        it = Calls(Dialect(tolerates))
        it.answer(chat, said("Fine."))
        assert it.propose(*chat, said("Fine."), MORE).tolerated == frozenset()
        proposal = it.propose(*again, said("Fine."), MORE)
        if Tolerance.TRIMMED_TEXT in tolerates:
            assert (proposal.parent, proposal.tolerated) == (0, {Tolerance.TRIMMED_TEXT})
        else:
            assert proposal.parent is None


def test_one_text_as_a_list_is_no_difference() -> None:
    def request(content: Any, more: list[Any]) -> tuple[Message, ...]:
        body = {"model": "m", "messages": [{"role": "user", "content": content}, *more]}
        return parse_request(json.dumps(body).encode(), {}).messages

    it = Calls(Dialect(frozenset()))
    it.answer(request([{"type": "text", "text": "Hi.", "cache_control": {"type": "ephemeral"}}], []), said("Yes?"))
    more = [
        {"role": "assistant", "content": [{"type": "text", "text": "Yes?"}]},
        {"role": "user", "content": "So."},
    ]
    assert it.propose(*request("Hi.", more)).parent == 0


BOTH = said("Two.", call("a"), call("b", 1, 1))


def test_results_of_parallel_calls_are_seen_in_the_order_of_the_calls() -> None:
    swapped = (*START, BOTH, result("B", 1, 1), result("A"), MORE)
    ordered = (*START, BOTH, result("A"), result("B", 1, 1), MORE)
    assert arrange(swapped, SAFE) == (ordered, {Tolerance.REORDERED_RESULTS})
    assert arrange(ordered, SAFE) == (ordered, frozenset())
    assert arrange(swapped, SAFE - {Tolerance.REORDERED_RESULTS}) == (swapped, frozenset())


def test_results_told_in_another_order_later() -> None:
    swapped = (*START, BOTH, result("B", 1, 1), result("A"))
    ordered = (*START, BOTH, result("A"), result("B", 1, 1))
    for first, then in ((swapped, ordered), (ordered, swapped)):
        for dialect in (Dialect(), Dialect(SAFE - {Tolerance.REORDERED_RESULTS})):
            it = Calls(dialect)
            it.answer(START, BOTH)
            it.answer(first, said("So it is."))
            proposal = it.propose(*then, said("So it is."), MORE)
            if dialect == Dialect():
                assert (proposal.parent, proposal.shared) == (1, 6)
                assert proposal.tolerated == ({Tolerance.REORDERED_RESULTS} if then is swapped else set())
                assert proposal.messages == (*ordered, said("So it is."), MORE)
            else:
                assert proposal.parent == 0 and proposal.tolerated == frozenset()


@pytest.mark.parametrize(
    "results",
    [(result("A"), Message("tool", "?", tool_call_id="other")), (MORE, result("B", 1, 1), result("A"))],
    ids=["unknown id", "not next to the calls"],
)
def test_results_that_cannot_be_told_apart_stay_where_they_are(results: tuple[Message, ...]) -> None:
    chat = (*START, BOTH, *results)
    assert arrange(chat, SAFE) == (chat, frozenset())


SPLIT = {
    "results in between": (
        said("Two.", call("a")), result("A"), said("", call("b", 1, 1)), result("B", 1, 1),
    ),
    "the last first": (
        said("Two.", call("b", 1, 1)), result("B", 1, 1), said("", call("a")), result("A"),
    ),
    "results at the end": (
        said("Two.", call("a")), said("", call("b", 1, 1)), result("A"), result("B", 1, 1),
    ),
    "the text in each": (
        said("Two.", call("a")), result("A"), said("Two.", call("b", 1, 1)), result("B", 1, 1),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", list(SPLIT))
@pytest.mark.parametrize("reasoning", [None, "Hm."])
def test_an_answer_told_as_several_is_put_together(name: str, reasoning: str | None) -> None:
    first, *rest = SPLIT[name]
    told = (*START, dataclasses.replace(first, reasoning=reasoning), *rest, MORE)
    whole = dataclasses.replace(BOTH, reasoning=reasoning)
    assert arrange(told, SAFE) == ((*START, whole, result("A"), result("B", 1, 1), MORE), {Tolerance.SPLIT_CALLS})
    for dialect in (Dialect(), Dialect(SAFE - {Tolerance.SPLIT_CALLS})):
        it = Calls(dialect)
        it.answer(START, whole)
        proposal = it.propose(*told)
        if dialect == Dialect():
            assert (proposal.parent, proposal.shared, proposal.tolerated) == (0, 3, {Tolerance.SPLIT_CALLS})
        else:
            assert (proposal.parent, proposal.tolerated) == (None, frozenset())


@pytest.mark.parametrize(
    "turns",
    [
        (said("", call("a")), result("A"), said("", call("a", 2)), result("A", 2)),
        (said("", call("a")), result("A"), said("", call("a")), result("A")),
        (renamed(said("", call("a"))), result("A"), renamed(said("", call("b"))), result("A", 2)),
        (said("", call("a")), result("A"), said("Then."), MORE),
    ],
    ids=["another answer", "the same again", "ids of others", "no calls"],
)
def test_answers_of_their_own_are_left_alone(turns: tuple[Message, ...]) -> None:
    assert arrange((*START, *turns), SAFE) == ((*START, *turns), frozenset())


# --- system texts ---


def test_what_changes_in_system_texts_is_taken_out() -> None:
    rewrites = (
        Rewrite("billing line", re.compile(r"^billing: .*\n"), ""),
        Rewrite("clock", re.compile(r"It is \d\d:\d\d"), "It is now"),
    )
    it = Calls(Dialect(stabilise=rewrites))

    def chat(nonce: str, minute: str) -> tuple[Message, ...]:
        return (Message("system", f"billing: {nonce}\nBe good. It is 10:{minute}."), Message("user", "billing: x\n"))

    first = it.answer(chat("aa", "01"), said("Hello there."))
    assert first.messages[0].content == "Be good. It is now." and first.messages[1].content == "billing: x\n"
    assert first.stabilised == ("billing line", "clock")
    assert it.propose(*chat("bb", "02"), said("Hello there."), MORE).parent == 0
    assert it.propose(Message("system", "Be good."), MORE).stabilised == ()


def test_without_rewrites_nothing_is_copied() -> None:
    assert stabilise(START, ()) == (START, ())
    assert Calls().propose(*START).messages[0] is START[0]


# --- which call is continued ---


def test_the_longest_history_wins_and_counts_its_messages() -> None:
    it = Calls()
    chat = START
    for k in range(4):
        assert it.answer(chat, said(f"Answer {k}.")).parent == (k - 1 if k else None)
        chat = (*chat, said(f"Answer {k}."), MORE)
    proposal = it.propose(*chat[:5], Message("user", "Something else."))
    assert (proposal.parent, proposal.shared, proposal.history) == (1, 5, (0, 1))
    assert it.propose(*chat).shared == len(chat) - 1


@pytest.mark.parametrize("change", ["system", "user", "tools", "earlier answer"])
def test_a_rewritten_history_continues_nothing(change: str) -> None:
    it = Calls(EVERYTHING)
    it.answer(START, said("First."))
    chat = [*START, said("First."), MORE]
    tools = TOOLS * 2 if change == "tools" else TOOLS
    if change != "tools":
        k = {"system": 0, "user": 1, "earlier answer": 2}[change]
        chat[k] = dataclasses.replace(chat[k], content="rewritten")
    assert it.propose(*chat, tools=tools).parent is None


def test_tools_are_the_same_whatever_the_order_of_their_keys() -> None:
    it = Calls()
    it.answer(START, said("First."))
    turned = (dataclasses.replace(TOOLS[0], parameters=dict(reversed(TOOLS[0].parameters.items()))),)
    assert it.propose(*START, said("First."), MORE, tools=turned).parent == 0
    assert it.propose(*START, said("First."), MORE, tools=()).parent is None


def test_the_latest_of_equal_answers_is_continued() -> None:
    it = Calls()
    for _ in range(3):
        it.answer(START, said("The same."))
    assert it.propose(*START, said("The same."), MORE).parent == 2


def test_kept_ids_say_which_of_equal_answers_is_continued() -> None:
    it = Calls()
    for number in (1, 2, 3):
        it.answer(START, said("", call("ls", number)))
    for number in (1, 2, 3):
        assert it.propose(*START, said("", call("ls", number)), result("a", number)).parent == number - 1
    assert it.propose(*START, renamed(said("", call("ls"))), result("a")).parent == 2


def test_an_exact_answer_goes_before_one_that_differs() -> None:
    it = Calls()
    it.answer(START, said("The same."))
    it.answer(START, said("The same.\n"))
    it.answer(START, said(" The same."))
    assert it.propose(*START, said("The same."), MORE).parent == 0
    assert it.propose(*START, said("The same.\n"), MORE).parent == 1
    proposal = it.propose(*START, said("The same.\n\n"), MORE)
    assert (proposal.parent, proposal.tolerated) == (2, {Tolerance.TRIMMED_TEXT})


def test_a_kept_id_goes_before_exactness() -> None:
    it = Calls()
    it.answer(START, said("", call("ls", 1)))
    it.answer(START, said("", call("ls", 2, timeout=9)))
    proposal = it.propose(*START, said("", call("ls", 1, timeout=9)), result("a"))
    assert (proposal.parent, proposal.tolerated) == (0, {Tolerance.INSERTED_ARGUMENTS})
    unnamed = it.propose(*START, renamed(said("", call("ls", 1, timeout=9))), result("a"))
    assert (unnamed.parent, unnamed.tolerated) == (1, frozenset())


def test_a_conversation_survives_later_samples_that_resemble_its_answers() -> None:
    """It went on from the first sample; a second one that its echo resembles more does not cut it off."""
    it = Calls()
    it.answer(START, said("The same.\n"))
    chat = (*START, said("The same."), MORE)
    assert it.answer(chat, said("And then?")).parent == 0
    it.answer(START, said("The same."))
    assert it.propose(*chat, said("And then?"), MORE).parent == 1
    assert it.propose(*START, said("The same."), Message("user", "Another way.")).parent == 2


def test_equal_answers_are_one_place_in_the_conversation() -> None:
    it = Calls()
    it.answer(START, said("", call("ls", 1)))
    chat = (*START, renamed(said("", call("ls", 1))), result("a"))
    it.answer(chat, said("One file."))
    it.answer(START, said("", call("ls", 3)))
    proposal = it.propose(*chat, said("One file."), MORE)
    assert (proposal.parent, proposal.shared) == (1, 5)


def test_what_a_harness_made_up_may_be_sampled_later() -> None:
    """A few-shot answer equal to what the policy says later: the conversation that has it goes on."""
    it = Calls()
    shots = (*START, said("I would list them."), MORE)
    it.answer(shots, said("Then do."))
    it.answer(START, said("I would list them."))
    assert it.propose(*shots, said("Then do."), MORE).parent == 0
    assert it.propose(*START, said("I would list them."), Message("user", "Well?")).parent == 1


def test_the_same_answer_twice_in_a_row_is_not_one_place() -> None:
    it = Calls()
    it.answer(START, said("The same."))
    it.answer((*START, said("The same."), MORE), said("Else."))
    proposal = it.propose(*START, said("The same."), said("The same."), MORE)
    assert (proposal.parent, proposal.shared) == (0, 3)


def test_how_a_harness_told_an_answer_once_does_not_excuse_another_way() -> None:
    it = Calls(Dialect(SAFE - {Tolerance.DROPPED_REASONING}))
    it.answer(START, said("Hm, so.", call("ls", flag=True), reasoning="Well."))
    for more, parent in (({}, 0), ({"x": 1}, 0), ({"flag": 1}, None), ({"flag": 1, "x": 1}, None), ({"x": True}, 0)):
        told = said("Hm, so.", call("ls", **{"flag": True, **more}), reasoning="Well.")
        assert it.propose(*START, told, result("a")).parent == parent, more
        assert it.propose(*START, dataclasses.replace(told, reasoning=None), result("a")).parent is None


def test_requests_pending_together_meet_in_one_place() -> None:
    it = Calls()
    first, second = it.propose(*START), it.propose(*START)
    it.history.commit(0, first, said("", call("a", 1)))
    it.history.commit(1, second, said("", call("b", 2)))
    assert it.propose(*START, renamed(said("", call("a"))), result("x")).parent == 0
    assert it.propose(*START, renamed(said("", call("b"))), result("x")).parent == 1


def test_a_proposal_that_is_not_committed_leaves_no_trace() -> None:
    it = Calls()
    it.propose(*START, said("Never sampled."), MORE)
    it.answer(START, said("First."))
    before = it.propose(*START, said("First."), MORE)
    it.propose(*START, said("First."), Message("user", "x"), said("y"), MORE)
    after = it.propose(*START, said("First."), MORE)
    assert (before.parent, before.answers, before.history) == (after.parent, after.answers, after.history)
    assert it.history.continued == set()


def test_from_scratch_keeps_only_what_was_arranged() -> None:
    it = Calls()
    it.answer(START, dataclasses.replace(BOTH, reasoning="Hm."))
    proposal = it.propose(*START, BOTH, result("B", 1, 1), result("A"))
    assert proposal.tolerated == {Tolerance.DROPPED_REASONING, Tolerance.REORDERED_RESULTS}
    scratch = proposal.from_scratch()
    assert (scratch.parent, scratch.shared, scratch.tolerated) == (None, 0, {Tolerance.REORDERED_RESULTS})
    assert (scratch.history, scratch.answers) == ((), (0,))
    assert scratch.messages == proposal.messages and scratch.tip is proposal.tip


# --- answers that go on elsewhere ---


def test_answers_are_recognised_in_any_context() -> None:
    it = Calls()
    it.answer(START, said("", call("ls", 1)))
    it.answer((*START, said("", call("ls", 1)), result("a")), said("There is one file, a.\n"))
    it.answer((*START, said("", call("ls", 1)), result("a")), said("Short."))
    assert it.history.continued == {0}
    told = said("There is one file, a.")
    compacted = (Message("user", "So far: nothing."), said("", call("rm", 1)), result("a"), told)
    proposal = it.propose(*compacted, said("Short."), said("Never said by the policy."), MORE)
    assert (proposal.parent, proposal.history, proposal.answers) == (None, (), (0, 1))
    assert it.history.continued == {0}, "only what is committed counts"
    it.history.commit(3, proposal, said("Right."))
    assert it.history.continued == {0, 1}
    again = it.propose(*compacted, said("Short."), said("Never said by the policy."), MORE)
    assert again.answers == (0, 1), "a second sample tells as much as the first"
    after = it.propose(*again.messages, said("Right."), MORE)
    assert (after.parent, after.history, after.answers) == (3, (3,), ())


def test_an_edited_answer_is_still_recognised_by_its_id() -> None:
    it = Calls()
    it.answer(START, said("", call("ls", 1)))
    proposal = it.answer((*START, said("", call("rm -r", 1)), result("a")), said("Gone."))
    assert (proposal.parent, proposal.answers) == (None, (0,))
    assert it.history.continued == {0}


# --- headers ---


def test_headers_are_read_as_the_dialect_says() -> None:
    dialect = Dialect(
        agent_header="X-Agent", parent_header="x-parent", kind_header="x-kind", kinds={"compact": "compaction"}
    )
    assert dialect.hints({}) == Hints()
    assert dialect.hints({"x-stainless-retry-count": "0", "x-agent": " "}) == Hints()
    headers = {"x-stainless-retry-count": "2", "x-agent": "a1", "x-parent": "a0", "x-kind": "compact"}
    assert dialect.hints(headers) == Hints(True, "a1", "a0", "compaction")
    assert dialect.hints({"x-kind": "unheard of", "x-stainless-retry-count": "many"}) == Hints()
    assert Dialect(retry_header=None).hints(headers) == Hints()
