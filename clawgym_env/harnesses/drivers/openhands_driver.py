"""Runs in a sandbox: an agent of the OpenHands SDK with a terminal and a file editor, as its users write one.

Invariant: the SDK is unchanged. Usage: ``openhands_driver.py SETTINGS``, one JSON object, with the task on stdin.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

from openhands.sdk import LLM, Agent, Conversation, ConversationExecutionStatus, Tool
from openhands.sdk.context.condenser import default_condenser
from openhands.sdk.conversation.response_utils import get_agent_final_response
from openhands.tools.file_editor import FileEditorTool
from openhands.tools.preset.default import get_default_agent, register_builtins_agents
from openhands.tools.task import TaskToolSet
from openhands.tools.terminal import TerminalTool

FAILED = 1
#: No task is given up for the number of its steps: that is the run's budget.
STEPS = 1_000_000


def make_agent(settings: dict[str, Any], llm: LLM) -> Agent:
    """The agent that the settings describe: ``prompt`` (empty for the SDK's own agent) and ``delegates``."""
    terminal = Tool(name=TerminalTool.name, params={"terminal_type": "subprocess"})
    if settings["prompt"]:
        agent = Agent(
            llm=llm,
            tools=[terminal, Tool(name=FileEditorTool.name)],
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
