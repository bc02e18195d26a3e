"""Labels do not depend on how agents were interleaved, and whatever a harness sends gets some."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from clawgym_env.dialect import Hints
from clawgym_env.proxy.classify import CallFacts, Label, classify
from clawgym_env.types import Message
from tests.transcripts import TOOLS, Talk, does, flat, result, says, spawns, system, user

PROMPTS = ["Find the longest file of all.", "Find the newest file of all.", "Count the words of all files."]


def crowd(order: list[int], turns: list[int], hints: bool) -> dict[tuple[int, int], Label]:
    """Sub-agents at work at once; an agent's last turn is its report, ``order`` says who comes next.

    Returns:
        (agent, turn) -> label, names replaced by numbers; agent -1 is the main one.
    """
    talk, where = Talk(), [(-1, 0)]
    tools = (*TOOLS, "Agent")
    main = Hints(kind="main") if hints else None
    said = talk.ask([system(), user()], spawns(*PROMPTS[: len(turns)]), tools, main)
    heads = [[system("You help an agent."), user(PROMPTS[k])] for k in range(len(turns))]
    done, reports = [0] * len(turns), [""] * len(turns)
    for who in order:
        hint = Hints(agent=f"helper {who}") if hints else None
        if done[who] + 1 == turns[who]:
            reports[who] = talk.ask(heads[who], says(f"Report of helper {who}: it is found."), TOOLS, hint).content
        else:
            reply = talk.ask(heads[who], does(command=f"look {who} {done[who]}"), TOOLS, hint)
            heads[who] = [*heads[who], reply, result(reply, f"seen {who} {done[who]}")]
        where.append((who, done[who]))
        done[who] += 1
    talk.ask([system(), user(), said, *(result(said, r, k) for k, r in enumerate(reports))], says("Fine."), tools, main)
    where.append((-1, 1))
    labels = talk.labels
    names = {labels[where.index((k, 0))].agent: str(k) for k in range(-1, len(turns))}
    assert len(names) == len(turns) + 1, "each agent has a name of its own"
    plain = [replace(label, agent=names[label.agent], continues=None) for label in labels]
    return dict(zip(where, plain, strict=True))


@st.composite
def interleavings(draw: st.DrawFn) -> tuple[list[int], list[int]]:
    turns = draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
    return draw(st.permutations([k for k, n in enumerate(turns) for _ in range(n)])), turns


@given(interleavings(), st.booleans())
@settings(max_examples=80, deadline=None)
def test_interleaving_changes_no_label(drawn: tuple[list[int], list[int]], hints: bool) -> None:
    order, turns = drawn
    found = crowd(order, turns, hints)
    assert found == crowd(sorted(order), turns, hints)
    assert {label.kind for (who, _), label in found.items() if who >= 0} == {"subagent"}
    assert {label.agent for (who, _), label in found.items() if who == 1} <= {"1"}


TEXTS = st.sampled_from(["", "ok", "Look at the second file now.", "A summary: all files were read.", "x" * 40])
REPLIES = st.one_of(
    TEXTS.map(says),
    st.sampled_from(PROMPTS).map(spawns),
    TEXTS.map(lambda t: does(t, command="ls", note=t)),
    st.just(does("", name="read", path=["a", {"deep": "Find the newest file of all."}])),
)
HINTS = st.one_of(
    st.none(),
    st.builds(
        Hints,
        agent=st.sampled_from([None, "a", "b"]),
        parent=st.sampled_from([None, "a"]),
        kind=st.sampled_from([None, "main", "subagent", "compaction", "side"]),
    ),
)


@st.composite
def wild_talks(draw: st.DrawFn) -> Talk:
    """Requests in every relation to earlier ones that a harness may think of, and some that none does."""
    talk, histories = Talk(), [[user()], [system(), user()], [system("Another."), user(PROMPTS[0])]]
    for _ in range(draw(st.integers(1, 10))):
        history = list(draw(st.sampled_from(histories)))
        match draw(st.integers(0, 5)):
            case 0:
                history = [*history, user(draw(TEXTS))]
            case 1 if len(history) > 2:
                del history[draw(st.integers(0, len(history) - 1))]
            case 2:
                at = draw(st.integers(0, len(history) - 1))
                history[at] = replace(history[at], content=draw(TEXTS))
            case 3:
                history = [system("Sum up."), user(f"Summarise:\n{flat(history)}")]
            case 4 if talk.facts:
                quoted = draw(st.sampled_from(talk.facts)).reply.content
                history = [*history[:2], user(f"<summary>\n{quoted}\n</summary>")]
        tools = draw(st.sampled_from([(), TOOLS, (*TOOLS, "Agent")]))
        said = talk.ask(history, draw(REPLIES), tools, draw(HINTS))
        results = [result(said, draw(TEXTS), k) for k in range(len(said.tool_calls))]
        histories.append([*history, said, *(results or [user("Go on.")])])
    return talk


def assert_sound(facts: list[CallFacts], labels: list[Label]) -> None:
    assert len(labels) == len(facts)
    subagents = {label.agent for label in labels if label.kind == "subagent"}
    assert "main" not in subagents
    for k, label in enumerate(labels):
        assert 0 < label.confidence <= 1 and label.segment >= 0
        assert all(before is None or 0 <= before < k for before in (label.continues, label.spawned_by))
        assert (label.kind == "main") <= (label.agent == "main") and label.agent in {"main", *subagents}
        if facts[k].hints.kind is not None:
            assert label.kind == facts[k].hints.kind or label.kind == "main" == facts[k].hints.kind


@given(wild_talks())
@settings(max_examples=300, deadline=None)
def test_every_call_gets_a_label(talk: Talk) -> None:
    labels = talk.labels
    assert_sound(talk.facts, labels)
    for facts, label in zip(talk.facts, labels, strict=True):
        told = {*facts.answers, facts.parent} - {None}
        assert not told or (label.continues is not None and label.continues >= max(told))  # type: ignore[type-var]
    assert classify(talk.facts) == labels, "pure"


@given(st.integers(1, 12))
def test_a_chain_stays_one_segment_however_long(steps: int) -> None:
    talk = Talk()
    talk.work([system(), user()], steps)
    assert [(label.agent, label.segment, label.continues) for label in talk.labels] == [
        ("main", 0, k - 1 if k else None) for k in range(steps)
    ]
    assert all(isinstance(m, Message) for f in talk.facts for m in f.messages)
