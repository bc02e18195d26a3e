"""Transcripts of harnesses as facts of calls: what a session would record, made by the real matching.

``Talk`` plays the part of harness and session; the functions below it are conversations as real harnesses hold them
(versions and shapes as in ``docs/harnesses.md``), short ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from clawgym_env.dialect import Dialect, Hints
from clawgym_env.proxy.classify import CallFacts, Label, classify
from clawgym_env.proxy.matching import History
from clawgym_env.types import Message, ToolCall, ToolSpec

SYSTEM = "You are a coding agent.\nUse the tools.\nWork in the current folder."
TASK = "Count the lines of every file and write them to report.txt."
TOOLS = ("bash", "read", "write")


def system(text: str = SYSTEM) -> Message:
    return Message("system", text)


def user(text: str = TASK) -> Message:
    return Message("user", text)


def says(text: str) -> Message:
    return Message("assistant", text)


def does(text: str = "", /, name: str = "bash", **arguments: object) -> Message:
    return Message("assistant", text, None, (ToolCall(name, arguments),))


def spawns(*prompts: str, name: str = "Agent") -> Message:
    calls = (ToolCall(name, {"description": "helper", "prompt": p, "subagent_type": "general"}) for p in prompts)
    return Message("assistant", "Spawning.", None, tuple(calls))


def result(of: Message, text: str, index: int = 0) -> Message:
    return Message("tool", text, tool_call_id=of.tool_calls[index].id)


@dataclass
class Talk:
    """Records calls as they are committed."""

    dialect: Dialect = field(default_factory=Dialect)
    facts: list[CallFacts] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._history = History(self.dialect)

    def ask(
        self, messages: Sequence[Message], reply: Message, tools: Sequence[str] = TOOLS, hints: Hints | None = None
    ) -> Message:
        """One call; returns the answer with minted ids, as the harness would tell it again."""
        specs = tuple(ToolSpec(t) for t in tools)
        proposal = self._history.propose(specs, tuple(messages))
        number = len(self.facts)
        calls = tuple(replace(c, id=f"call{number + 1}x{i}") for i, c in enumerate(reply.tool_calls))
        said = replace(reply, tool_calls=calls)
        self._history.commit(number, proposal, said)
        self.facts.append(
            CallFacts(
                number, proposal.parent, proposal.messages[proposal.shared :], said, tuple(tools),
                proposal.answers, hints or Hints(),
            )
        )  # fmt: skip
        return said

    def work(
        self, messages: list[Message], steps: int, tools: Sequence[str] = TOOLS, hints: Hints | None = None
    ) -> list[Message]:
        """Tool calls in a chain; the conversation after the last result."""
        for k in range(steps):
            step = does(f"Step {k}: looking at part {k}.", command=f"wc -l part{k}.txt")
            said = self.ask(messages, step, tools, hints)
            messages = [*messages, said, result(said, f"{100 + k} part{k}.txt has that many lines")]
        return messages

    @property
    def labels(self) -> list[Label]:
        return classify(self.facts)

    @property
    def continued(self) -> set[int]:
        return self._history.continued


def flat(messages: Sequence[Message]) -> str:
    """A conversation told as one text, as summary prompts hold it."""
    names = {"user": "User", "assistant": "Assistant", "tool": "Tool result"}
    return "\n\n".join(f"[{names[m.role]}]: {m.content}" for m in messages if m.role != "system")


SUMMARY = "## Goal\nCount lines in all files.\n## Progress\nParts 0 and 1 are counted: 100 and 101 lines.\n## Next\nGo."


def pi_compaction(talk: Talk) -> None:
    """A side call retells the history and asks for a summary; the next request has it in place of the first turns."""
    history = talk.work([system(), user()], 3)
    asked = f"<conversation>\n{flat(history[:-2])}\n</conversation>\n\nCreate a structured context checkpoint summary."
    said = talk.ask([system("You are a context summarization assistant."), user(asked)], says(SUMMARY), ())
    told = "The conversation history before this point was compacted into the following summary:\n\n"
    history = [system(), user(f"{told}<summary>\n{said.content}\n</summary>"), *history[-2:]]
    history = talk.work(history, 1)
    talk.ask(history, says("All is counted; the report is written."))


def openclaw_compaction(talk: Talk) -> None:
    """After a refused request two summaries are made, one of the history and one of the turn that was cut."""
    history = talk.work([system(), user()], 3)
    prompt = system("You are a context summarization assistant. Do not continue the conversation.")
    first = talk.ask([prompt, user(f"{flat(history[:-2])}\n\nSummarise this as a checkpoint.")], says(SUMMARY), ())
    cut = "## Original request\nA report of line counts.\n## Early progress\nPart 2 was looked at when it was cut."
    second = talk.ask([prompt, user("[Assistant]: ...\n\nSummarise the turn's prefix.")], says(cut), ())
    text = f"{first.content}\n\n---\n\n**Turn context:**\n\n{second.content}"
    history = talk.work([system(), user(f"<summary>\n{text}\n</summary>\n\nContinue.")], 1)
    talk.ask(history, says("Done after compaction, everything is counted."))


def claude_compaction(talk: Talk, hints: bool = False) -> None:
    """The summary is asked for at the end of the conversation itself; its analysis is cut off."""
    kind = Hints(kind="compaction") if hints else None
    main = Hints(kind="main") if hints else None
    history = talk.work([system(), user()], 3, hints=main)
    order = user("CRITICAL: Respond with TEXT ONLY. Your task is to create a detailed summary of the conversation.")
    text = f"<analysis>\nThe user wants counts; three parts were seen.\n</analysis>\n<summary>\n{SUMMARY}\n</summary>"
    talk.ask([*history, order], says(text), hints=kind)
    told = f"This session is being continued from a previous conversation.\n\nSummary:\n{SUMMARY}"
    history = talk.work([system(), user(told)], 2, hints=main)
    talk.ask(history, says("Finished: the report holds all counts."), hints=main)


def subagents(talk: Talk, order: Sequence[int] = (0, 1, 0, 1), hints: bool = False) -> None:
    """Two sub-agents at once, two calls each, committed in the given order; then the main agent goes on.

    Each reads, then reports.
    """
    prompts = ["Find the longest file of the project.", "Find the newest file of the project."]
    main = Hints(kind="main") if hints else None
    history = [system(), user()]
    said = talk.ask(history, spawns(*prompts), (*TOOLS, "Agent"), main)
    heads = [[system("You are a helper of an agent.\nWork in the folder."), user(p)] for p in prompts]
    turns = [0, 0]
    reports = ["", ""]
    for who in order:
        hint = Hints(agent=f"a{who}", kind="subagent") if hints else None
        if turns[who] == 0:
            reply = talk.ask(heads[who], does(command=f"ls -l{who}"), TOOLS, hint)
            heads[who] = [*heads[who], reply, result(reply, f"a listing for helper {who}")]
        else:
            reports[who] = talk.ask(heads[who], says(f"Report {who}: part{who}.txt it is."), TOOLS, hint).content
        turns[who] += 1
    history = [*history, said, *(result(said, text, i) for i, text in enumerate(reports))]
    talk.ask(history, says("The helpers have found both files."), (*TOOLS, "Agent"), main)
