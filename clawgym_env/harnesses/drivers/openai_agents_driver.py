"""Runs in a sandbox: an agent written with the OpenAI Agents SDK, ours or a script of the user's.

Invariant: the SDK is unchanged, and configured as its users configure it: a default client, a default API, a run's
settings. A user's script may override all of it; it takes the task from stdin and asks for any model.
"""

from __future__ import annotations

import asyncio
import json
import runpy
import subprocess
import sys
from typing import Any

from agents import (
    Agent,
    ModelSettings,
    RunConfig,
    Runner,
    function_tool,
    set_default_openai_api,
    set_default_openai_client,
)
from openai import AsyncOpenAI

#: Characters of a command's output that are shown, half of them of its end.
SHOWN = 10_000


async def bash(command: str) -> str:
    """Run a bash command.

    Args:
        command: The command.
    """
    done = await asyncio.create_subprocess_exec(
        "bash", "-c", command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    said, _ = await done.communicate()
    text = said.decode(errors="replace")
    if len(text) > SHOWN:
        left_out = len(text) - SHOWN
        text = f"{text[: SHOWN // 2]}\n... {left_out} characters left out ...\n{text[-SHOWN // 2 :]}"
    failed = f"exit code {done.returncode}\n" if done.returncode else ""
    return f"{failed}{text}" or "(no output)"


def own_agent(instructions: str, max_tokens: int, delegates: bool) -> Agent[Any]:
    """An agent with a shell, and with a second one that it can hand a part of its work."""
    settings = ModelSettings(max_tokens=max_tokens)
    agent = Agent(name="agent", instructions=instructions, tools=[function_tool(bash)], model_settings=settings)
    if delegates:
        helper = agent.clone(name="helper")
        agent.tools.append(helper.as_tool("delegate", "Have a helper do a part of the work.", max_turns=None))
    return agent


def main() -> None:
    """Runs the agent that the settings, one JSON object in the first argument, name."""
    settings = json.loads(sys.argv[1])
    set_default_openai_client(AsyncOpenAI(timeout=None, max_retries=0), use_for_tracing=False)
    set_default_openai_api(settings["api"])
    if settings["script"]:
        sys.argv[:] = [settings["script"]]
        runpy.run_path(settings["script"], run_name="__main__")
        return
    agent = own_agent(settings["instructions"], settings["max_tokens"], settings["delegates"])
    config = RunConfig(tool_not_found_behavior="return_error_to_model")
    result = Runner.run_sync(agent, sys.stdin.read(), max_turns=None, run_config=config)
    print(result.final_output)


if __name__ == "__main__":
    main()
