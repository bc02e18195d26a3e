"""Runs in a sandbox: an agent of smolagents with a shell, as its users write one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.resources import files

import yaml
from smolagents import CodeAgent, LogLevel, OpenAIModel, Tool, ToolCallingAgent

#: Characters of a command's output that are shown, half of them of its end.
SHOWN = 10_000
#: No task is given up for the number of its steps: that is the run's budget.
STEPS = 1_000_000


class Bash(Tool):  # type: ignore[misc]
    """The agent's shell."""

    name = "bash"
    description = "Runs a bash command and returns what it printed."
    inputs = {"command": {"type": "string", "description": "The command."}}  # noqa: RUF012 (a protocol of the library)
    output_type = "string"

    def forward(self, command: str) -> str:
        """Its output, and its exit code where that is not 0."""
        done = subprocess.run(
            ["bash", "-c", command], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        text = done.stdout.decode(errors="replace")
        if len(text) > SHOWN:
            left_out = len(text) - SHOWN
            text = f"{text[: SHOWN // 2]}\n... {left_out} characters left out ...\n{text[-SHOWN // 2 :]}"
        failed = f"exit code {done.returncode}\n" if done.returncode else ""
        return f"{failed}{text}" or "(no output)"


def main() -> None:
    """Runs the agent that the settings, one JSON object in the first argument, describe."""
    settings = json.loads(sys.argv[1])
    model = OpenAIModel(
        model_id=settings["model"],
        api_base=os.environ["OPENAI_BASE_URL"],
        api_key=os.environ["OPENAI_API_KEY"],
        client_kwargs={"timeout": None, "max_retries": 0},
        tool_choice="auto",
        max_tokens=settings["max_tokens"],
    )
    kind, prompts = (
        (CodeAgent, "code_agent.yaml") if settings["agent"] == "code" else (ToolCallingAgent, "toolcalling_agent.yaml")
    )
    templates = yaml.safe_load((files("smolagents.prompts") / prompts).read_text())
    if settings["system_prompt"]:
        templates["system_prompt"] = settings["system_prompt"]
    agent = kind(
        tools=[Bash()], model=model, prompt_templates=templates, max_steps=STEPS, verbosity_level=LogLevel.ERROR
    )
    print(agent.run(sys.stdin.read()))


if __name__ == "__main__":
    main()
