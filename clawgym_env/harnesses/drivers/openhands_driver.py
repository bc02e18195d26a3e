"""Runs in a sandbox: an agent of the OpenHands SDK with a terminal and a file editor, as its users write one.

Invariant: the SDK is unchanged, but for a race in its terminal (``settle``). Usage: ``openhands_driver.py SETTINGS``,
one JSON object, with the task on stdin.
"""

# ruff: noqa: E402 (the SDK is imported without garbage collection)
from __future__ import annotations

import gc
import json
import os
import sys
from typing import Any

gc.disable()  # a seventh of the imports' time goes into it, for nothing

from openhands.sdk import LLM, Agent, Conversation, ConversationExecutionStatus, Tool, register_tool
from openhands.sdk.context.condenser import default_condenser
from openhands.sdk.conversation.response_utils import get_agent_final_response
from openhands.tools.file_editor import FileEditorTool
from openhands.tools.preset.default import get_default_agent, register_builtins_agents
from openhands.tools.task import TaskToolSet
from openhands.tools.terminal import TerminalTool
from openhands.tools.terminal.terminal.subprocess_terminal import SubprocessTerminal

gc.freeze()
gc.enable()

FAILED = 1
#: No task is given up for the number of its steps: that is the run's budget.
STEPS = 1_000_000
PSEUDO_TERMINAL = {"terminal_type": "subprocess"}
TERMINAL = """\
Run a command in a shell that stays open. Exit code -1: it still runs, after timeout seconds or 30 without output; with
is_input, an empty command shows what it printed since, and others are typed into it (C-c, C-d). reset starts a new
shell."""
FILE_EDITOR = """\
View, create or edit a text file. path is absolute. str_replace replaces old_str, which must be unique in the file, by
new_str; insert puts new_str after line insert_line."""


class BriefTerminal(TerminalTool):  # type: ignore[misc]
    """The terminal, described in a few lines."""

    name = TerminalTool.name

    def to_openai_tool(self, *_: Any, **__: Any) -> Any:
        """What the model is told of it."""
        return _brief(super().to_openai_tool(), TERMINAL)


class BriefFileEditor(FileEditorTool):  # type: ignore[misc]
    """The file editor, described in a few lines."""

    name = FileEditorTool.name

    def to_openai_tool(self, *_: Any, **__: Any) -> Any:
        """What the model is told of it."""
        return _brief(super().to_openai_tool(), FILE_EDITOR)


def _brief(tool: Any, description: str) -> Any:
    """A tool's specification with another description, and parameters that speak for themselves."""
    parameters = tool["function"]["parameters"]
    fields = {name: field for name, field in parameters["properties"].items() if name != "summary"}
    for field in fields.values():
        field.pop("description", None)
    parameters |= {"properties": fields}
    return tool | {"function": tool["function"] | {"description": description, "parameters": parameters}}


def settle() -> None:
    """Has the terminal wait for the prompt that it asks for after a command: the next one would take it for its own."""
    clear = SubprocessTerminal.clear_screen

    def clear_screen(terminal: Any) -> None:
        clear(terminal)
        terminal._wait_for_prompt()

    SubprocessTerminal.clear_screen = clear_screen


def make_agent(settings: dict[str, Any], llm: LLM) -> Agent:
    """The agent that the settings describe: ``prompt`` (empty for the SDK's own agent) and ``delegates``."""
    terminal = Tool(name=TerminalTool.name, params=PSEUDO_TERMINAL)
    if settings["prompt"]:
        for tool in (BriefTerminal, BriefFileEditor):
            register_tool(tool.__name__, tool)
        agent = Agent(
            llm=llm,
            tools=[Tool(name="BriefTerminal", params=PSEUDO_TERMINAL), Tool(name="BriefFileEditor")],
            include_default_tools=[],
            system_prompt=settings["prompt"],
            condenser=default_condenser(llm),
        )
    else:
        agent = get_default_agent(llm, cli_mode=True)
    tools = [terminal if tool.name == TerminalTool.name else tool for tool in agent.tools]
    if settings["delegates"]:
        register_builtins_agents(enable_browser=False)
        tools.append(Tool(name=TaskToolSet.name))
    return agent.model_copy(update={"tools": tools})


def main() -> int:
    """Runs the agent; its exit code."""
    settings = json.loads(sys.argv[1])
    settle()
    llm = LLM(api_key=os.environ["OPENAI_API_KEY"], usage_id="agent", **settings["llm"])
    conversation = Conversation(
        agent=make_agent(settings, llm),
        workspace=settings["workspace"],
        visualizer=None,
        max_iteration_per_run=STEPS,
        stuck_detection=not settings["prompt"],
    )
    try:
        conversation.send_message(sys.stdin.read())
        conversation.run()
        state = conversation.state
        print(get_agent_final_response(state.events), flush=True)
        if state.execution_status is ConversationExecutionStatus.FINISHED:
            return 0
        why = f"the agent ended as {state.execution_status.value}"
    except Exception as error:  # whatever ends the SDK's loop is told in one line
        why = f"{type(error).__name__}: {error}"
    finally:
        conversation.close()
    print(" ".join(why.split()), file=sys.stderr)
    return FAILED


if __name__ == "__main__":
    sys.exit(main())
