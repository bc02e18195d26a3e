"""What calls are for, on transcripts as real harnesses make them, with headers and without."""

from __future__ import annotations

from dataclasses import replace

import pytest

from clawgym_env.dialect import Hints
from clawgym_env.proxy.classify import Label, classify
from tests.transcripts import (
    SUMMARY,
    SYSTEM,
    TASK,
    TOOLS,
    Talk,
    claude_compaction,
    does,
    flat,
    openclaw_compaction,
    pi_compaction,
    result,
    says,
    spawns,
    subagents,
    system,
    user,
)


def kinds(talk: Talk) -> list[str]:
    """Kinds as one word a call: the agent and segment of its own calls, else the kind."""
    return [
        f"{label.agent}{label.segment}" if label.kind in ("main", "subagent") else label.kind for label in talk.labels
    ]


def test_a_chain_is_the_main_agents() -> None:
    talk = Talk()
    history = talk.work([system(), user()], 3)
    talk.ask(history, says("Done."))
    assert talk.labels == [Label(k - 1 if k else None) for k in range(4)]
    assert classify([]) == []


def test_pi_compaction() -> None:
    talk = Talk()
    pi_compaction(talk)
    assert kinds(talk) == ["main0", "main0", "main0", "compaction", "main1", "main1"]
    summary, restart = talk.labels[3:5]
    assert (summary.agent, summary.segment, summary.spawned_by, summary.confidence) == ("main", 0, 2, 0.95)
    assert restart.continues == 2 and restart.confidence == 0.9, "it tells the last answer and none before it"


def test_openclaw_makes_two_summaries() -> None:
    talk = Talk()
    openclaw_compaction(talk)
    assert kinds(talk) == ["main0", "main0", "main0", "compaction", "compaction", "main1", "main1"]
    assert [label.confidence for label in talk.labels[3:6]] == [0.95, 0.95, 0.9]
    assert talk.labels[5].continues is None


@pytest.mark.parametrize("hints", [False, True])
def test_claude_code_asks_for_the_summary_within_the_conversation(hints: bool) -> None:
    talk = Talk()
    claude_compaction(talk, hints)
    assert kinds(talk) == ["main0", "main0", "main0", "compaction", "main1", "main1", "main1"]
    assert talk.labels[3].confidence == (1.0 if hints else 0.95)
    assert talk.labels[3].spawned_by == 2
    assert talk.labels[4].confidence == (1.0 if hints else 0.9)


def test_a_summary_that_nothing_has_quoted_yet_is_known_by_what_it_retells() -> None:
    talk = Talk()
    history = talk.work([system(), user()], 2)
    talk.ask([system("You write summaries."), user(flat(history))], says(SUMMARY), ())
    assert kinds(talk)[-1] == "compaction" and talk.labels[-1].confidence == 0.7
    talk = Talk()
    history = talk.work([system(), user()], 2)
    talk.ask([system("Suggest what the user types next."), user(flat(history))], says("count the words too"), ())
    assert kinds(talk)[-1] == "side", "it retells, but sums nothing up"


def test_a_summary_of_summaries() -> None:
    talk = Talk()
    talk.work([system(), user()], 2)
    parts = [f"Part {k} of the story: it was read and {k + 3} things were noted." for k in range(2)]
    for part in parts:
        talk.ask([system("Describe."), user(f"chunk about {part[:6]}")], says(part), ())
    talk.ask([system("Merge."), user("\n".join(parts))], says(SUMMARY), ())
    talk.ask([system(), user(f"Before:\n{SUMMARY}")], says("Going on."))
    assert kinds(talk) == ["main0", "main0", "compaction", "compaction", "compaction", "main1"]


@pytest.mark.parametrize("hints", [False, True])
def test_sub_agents(hints: bool) -> None:
    talk = Talk()
    subagents(talk, hints=hints)
    names = ["a0", "a1"] if hints else ["sub1", "sub2"]
    assert kinds(talk) == ["main0", f"{names[0]}0", f"{names[1]}0", f"{names[0]}0", f"{names[1]}0", "main0"]
    assert [label.spawned_by for label in talk.labels] == [None, 0, 0, 0, 0, None]
    assert {label.confidence for label in talk.labels[1:5]} == {1.0 if hints else 0.95}


def test_a_sub_agent_of_a_sub_agent() -> None:
    talk = Talk()
    said = talk.ask([system(), user()], spawns("Delegate the counting of words."))
    helper = [system("You are a helper."), user("Delegate the counting of words.")]
    inner = talk.ask(helper, spawns("Count the words of part0.txt only."))
    report = talk.ask([system("You are a helper."), user("Count the words of part0.txt only.")], says("It has 12."))
    report = talk.ask([*helper, inner, result(inner, report.content)], says("The inner helper says 12."))
    talk.ask([system(), user(), said, result(said, report.content)], says("12 words."))
    assert kinds(talk) == ["main0", "sub10", "sub20", "sub10", "main0"]
    assert [label.spawned_by for label in talk.labels] == [None, 0, 1, 0, None]


def test_a_task_that_is_wrapped_is_still_known() -> None:
    talk = Talk()
    talk.ask([system(), user()], does("", "sessions_spawn", task="H4SUB-ONE: write sub1.txt", label="one"))
    wrapped = (
        "[Mon 2026-11-30 23:10 UTC] [Subagent Context] You are running as a subagent (depth 1/1). Results "
        "auto-announce to your requester; do not busy-poll for status.\n\n[Subagent Task]: H4SUB-ONE: write sub1.txt"
    )
    talk.ask([system("You are a subagent of the main agent."), user(wrapped)], does(command="echo > sub1.txt"))
    assert kinds(talk) == ["main0", "sub10"] and talk.labels[1].confidence == 0.95


def test_an_unexplained_conversation_during_a_tool_call_is_a_sub_agent_with_less_confidence() -> None:
    talk = Talk()
    said = talk.ask([system(), user()], does("", "helper", number=3))
    child = talk.work([system("You are helper 3."), user("Look around.")], 1, ("bash",))
    talk.ask(child, says("Nothing here."), ("bash",))
    talk.ask([system(), user(), said, result(said, "Nothing here.")], says("Fine."))
    assert kinds(talk) == ["main0", "sub10", "sub10", "main0"]
    assert [label.confidence for label in talk.labels] == [1.0, 0.7, 0.7, 1.0]
    assert talk.labels[1].spawned_by == 0


@pytest.mark.parametrize("first", [True, False])
def test_a_title_call_is_aside_whichever_comes_first(first: bool) -> None:
    talk = Talk()
    title = [system("You are a title generator."), user(f"Generate a title:\n{TASK}")]
    if first:
        talk.ask(title, says("Counting lines of all files"), ())
    history = talk.work([system(), user()], 1)
    if not first:
        talk.ask(title, says("Counting lines of all files"), ())
    talk.ask(history, says("Done."))
    assert kinds(talk) == (["side", "main0", "main0"] if first else ["main0", "side", "main0"])
    assert talk.labels[0 if first else 1].confidence == 0.8


def test_a_page_read_by_a_model_without_tools_is_aside_and_knows_its_call() -> None:
    talk = Talk()
    said = talk.ask([system(), user()], does("", "WebFetch", url="http://x/", prompt="List the prices on this page."))
    page = "Web page content:\n---\nTea 3, coffee 4\n---\n\nList the prices on this page."
    talk.ask([user(page)], says("Tea costs 3, coffee 4."), ())
    talk.ask([system(), user(), said, result(said, "Tea costs 3, coffee 4.")], says("Tea is cheaper."))
    assert kinds(talk) == ["main0", "side", "main0"] and talk.labels[1].spawned_by == 0


def test_the_same_prompt_again_is_a_resample() -> None:
    talk = Talk()
    talk.ask([system(), user()], says('{"name": "bash", "argu'))
    said = talk.ask([system(), user()], does(command="ls"))
    later = [system(), user(), said, result(said, "a b c")]
    talk.ask(later, says('{"name": "ba'))
    talk.ask(later, says("a, b and c"))
    talk.ask([system(), user()], does(command="ls -a"))
    assert kinds(talk) == ["main0"] * 5
    assert [label.continues for label in talk.labels] == [None, None, 1, 1, None]


def test_masked_tool_output_rewrites_the_same_segment() -> None:
    talk = Talk()
    history = talk.work([system(), user()], 4)
    hidden = [replace(m, content="[hidden]") if m.role == "tool" and i < 7 else m for i, m in enumerate(history)]
    history = talk.work(hidden, 1)
    talk.ask(history, says("Counted."))
    assert kinds(talk) == ["main0"] * 6
    assert [label.continues for label in talk.labels] == [None, 0, 1, 2, 3, 4]
    assert talk.facts[4].parent == 0, "its tokens hold no further than the first masked output"
    assert talk.labels[4].confidence == 0.95


def test_a_last_turn_without_tools_is_still_the_agents() -> None:
    talk = Talk()
    history = talk.work([system(), user()], 2)
    talk.ask([*history, user("No steps are left: answer now.")], says("So far: 100 and 101 lines."), ())
    assert talk.facts[2].parent is None, "other tools make another prompt"
    assert kinds(talk) == ["main0"] * 3 and talk.labels[2].continues == 1


def test_a_history_that_moves_into_the_system_prompt_is_the_agents() -> None:
    talk = Talk()
    talk.work([system(), user()], 2)
    talk.work([system("You are an agent.\n# Memory\nParts 0 and 1 were counted."), user()], 1)
    assert kinds(talk) == ["main0", "main0", "main1"]


def test_a_title_that_repeats_the_task_is_no_summary() -> None:
    talk, history = Talk(), [system(), user()]
    for k in range(3):
        said = talk.ask([*history, user(f"[{k}:00]")], does(f"Look {k}.", command=f"ls {k}"))
        history = [*history, said, result(said, f"listing {k}")]
        if k == 0:
            talk.ask([system("Make a title."), user()], says(TASK[:40]), ())
    assert kinds(talk) == ["main0", "side", "main0", "main0"]


def test_a_summary_begins_one_segment_however_often_it_is_told() -> None:
    talk = Talk()
    talk.work([system(), user()], 2)
    talk.ask([system("Sum up."), user("...")], says(f"<summary>{SUMMARY.splitlines()[3]}</summary>"), ())
    history = [system(), user(f"Before: {SUMMARY.splitlines()[3]}")]
    for k in range(3):
        said = talk.ask([*history, user(f"[{k}:00]")], does(f"Look {k}.", command=f"ls {k}"))
        history = [*history, said, result(said, f"listing {k}")]
    assert kinds(talk) == ["main0", "main0", "compaction", "main1", "main1", "main1"]
    talk.ask([system("Sum up."), user("...")], says("All three listings were looked at and are fine."), ())
    talk.ask([system(), user("So far: All three listings were looked at and are fine.")], says("Done."))
    assert kinds(talk)[6:] == ["compaction", "main2"]
    assert (talk.labels[6].segment, talk.labels[6].spawned_by) == (1, 5)


def test_an_answered_tool_call_began_nothing_later() -> None:
    talk = Talk()
    history = talk.work([system(), user()], 1)
    talk.ask(history, says("Done."))
    talk.ask([system("You are somebody else."), user("Look around.")], does(command="ls"), ("bash",))
    assert talk.labels[2] == Label(None, "subagent", "sub1", 0, None, 0.6)


def test_a_transient_message_at_the_end_of_every_request() -> None:
    talk, history = Talk(), [system(), user()]
    for k in range(3):
        said = talk.ask([*history, user(f"[{k}:00] nothing is running")], does(f"Look {k}.", command=f"ls {k}"))
        history = [*history, said, result(said, f"listing {k}")]
    assert [f.parent for f in talk.facts] == [None] * 3
    assert kinds(talk) == ["main0"] * 3
    assert [label.continues for label in talk.labels] == [None, 0, 1]


def test_a_first_answer_that_is_deleted_begins_no_segment() -> None:
    talk = Talk()
    talk.ask([system(), user()], says("I will now."))
    said = talk.ask([system(), user(), user("You must call exactly one tool.")], does(command="ls"))
    talk.ask([system(), user(), user("You must call exactly one tool."), said, result(said, "a")], says("a"))
    assert kinds(talk) == ["main0"] * 3
    assert talk.continued == {1}


def test_a_head_that_survives_compaction() -> None:
    talk = Talk()
    history = talk.work([system(), user()], 4)
    talk.ask([user(f"Compress this conversation:\n{flat(history[4:])}")], says(SUMMARY), ())
    talk.ask([*history[:4], user(f"[CONTEXT COMPACTION] {SUMMARY}")], says("Going on with the rest."))
    assert kinds(talk) == ["main0"] * 4 + ["compaction", "main1"]
    assert talk.labels[-1].continues == 0


def test_answers_left_out_of_the_middle_begin_a_segment() -> None:
    talk = Talk()
    history = talk.work([system(), user()], 4)
    talk.work([*history[:4], user("(earlier steps were left out)"), *history[-2:]], 1)
    assert kinds(talk) == ["main0"] * 4 + ["main1"]
    assert talk.labels[-1].continues == 3


def test_answers_that_are_told_in_other_words_are_known_by_their_place() -> None:
    talk, history = Talk(), [system(), user()]
    for k in range(3):
        talk.ask(history, says(f"Thought: look. Code: ls({k})"), ())
        history = [*history, says(f"Calling tools: ls with {k}"), user(f"Observation {k}")]
    assert [f.parent for f in talk.facts] == [None] * 3
    assert [label.continues for label in talk.labels] == [None, 0, 1]
    assert kinds(talk) == ["main0"] * 3


def test_a_partial_answer_told_again_with_a_note() -> None:
    talk = Talk()
    talk.ask([system(), user()], says("The files are the following: a, b, c, d."))
    note = [system(), user(), says("The files are the fol"), user("The connection broke. Resume.")]
    talk.ask(note, says("lowing: a, b, c, d."))
    assert kinds(talk) == ["main0", "main0"] and talk.labels[1].continues == 0


def test_a_history_that_is_lost_begins_a_segment() -> None:
    talk = Talk()
    talk.work([system(), user()], 2)
    talk.ask([system(), user("Resume. The task was: " + TASK)], says("Resuming."))
    talk.ask([system(), user("Something else entirely.")], says("As you like."))
    assert kinds(talk) == ["main0", "main0", "main1", "main2"]
    assert [label.confidence for label in talk.labels[2:]] == [0.9, 0.6]


def test_a_date_in_the_system_prompt_makes_no_other_agent() -> None:
    long = "\n".join(f"Rule {k}: behave like this and like that." for k in range(30))
    talk = Talk()
    talk.work([system(f"{long}\nIt is Monday."), user()], 1)
    talk.ask([system(f"{long}\nIt is Tuesday."), user("Go on.")], does(command="ls"))
    assert kinds(talk) == ["main0", "main1"]


def test_threads_named_in_headers() -> None:
    talk = Talk()
    main, helper = Hints(agent="t0"), Hints(agent="t1", parent="t0")
    said = talk.ask([system(), user()], does("", "spawn", what="?"), hints=main)
    child = talk.work([system(), user("<environment/>"), user("Help out.")], 2, hints=helper)
    talk.ask(child, says("Helped."), hints=helper)
    history = [system(), user(), said, result(said, "Helped.")]
    talk.ask(history, says("Done."), hints=main)
    talk.ask([system("Summarise."), user(flat(history))], says(SUMMARY), (), Hints(agent="t0", kind="compaction"))
    assert kinds(talk) == ["main0", "t10", "t10", "t10", "main0", "compaction"]
    assert {label.confidence for label in talk.labels} == {1.0}
    assert [label.spawned_by for label in talk.labels] == [None, 0, 0, 0, None, 4]


def test_a_named_sub_agents_task_is_found_in_whatever_it_is_wrapped() -> None:
    talk = Talk()
    main, helper = Hints(agent="m"), Hints(agent="h")
    said = talk.ask([system(), user()], does("", "sessions_spawn", task="PART-SEVEN: write part.txt."), hints=main)
    waits = talk.ask([system(), user(), said, result(said, "accepted")], does("", "sessions_yield"), hints=main)
    wrapped = f"{'You are a subagent. ' * 9}[Subagent Task] PART-SEVEN: write part.txt. {'Execute it. ' * 9}"
    talk.ask([system("Helper."), user(wrapped), user("No subagents are active.")], says("Written."), hints=helper)
    talk.ask([system(), user(), said, result(said, "accepted"), waits, user("Written.")], says("Done."), hints=main)
    assert kinds(talk) == ["main0", "main0", "h0", "main0"]
    assert [label.spawned_by for label in talk.labels] == [None, None, 0, None]


def test_a_sub_agent_in_headers_that_goes_on_from_the_main_agents_history() -> None:
    talk = Talk()
    history = talk.work([system(), user()], 2)
    fork = talk.work([*history, user("As a fork, check part 0.")], 1, hints=Hints(agent="fork", kind="subagent"))
    talk.ask(fork, says("Part 0 is fine."), hints=Hints(agent="fork", kind="subagent"))
    talk.ask(history, says("Done."))
    assert kinds(talk) == ["main0", "main0", "fork0", "fork0", "main0"]


def test_where_only_sub_agents_are_named_the_rest_is_not_theirs() -> None:
    talk = Talk()
    said = talk.ask([system(), user()], spawns("Find the longest file of the project."))
    talk.work([system("Helper."), user("Find the longest file of the project.")], 1, hints=Hints(agent="a"))
    talk.ask([system("Helper, told anew."), user("Find the longest file of the project.")], says("Is this it?"))
    talk.ask([system(), user(), said, result(said, "big.txt")], says("Done."))
    assert kinds(talk) == ["main0", "a0", "side", "main0"]


def test_a_headers_word_goes_before_structure() -> None:
    talk = Talk()
    history = talk.work([system(), user()], 1, hints=Hints(kind="main"))
    talk.ask([*history, user("Is this command safe?")], says("yes"), TOOLS, Hints(kind="side"))
    talk.ask(history, says("Done."), hints=Hints(kind="main"))
    assert kinds(talk) == ["main0", "side", "main0"]
    assert SYSTEM in talk.facts[0].messages[0].content
