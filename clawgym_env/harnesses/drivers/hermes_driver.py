"""Runs in a sandbox: Hermes's own command with the task from stdin, where the kernel does not bound its length.

Invariant: Hermes itself is unchanged: this is ``hermes chat -Q OPTIONS -q TASK``, with the system prompt of a file in
place of Hermes's own where one is named. As in ``hermes -z``, sub-agents are waited for: nobody is there to be told
later. Usage: ``hermes_driver.py PROMPT_FILE_OR_EMPTY OPTIONS``, the task on stdin.
"""

from __future__ import annotations

import sys
from pathlib import Path

from gateway.session_context import declare_stateless_channel
from hermes_cli.main import main


def replace_prompt(prompt: str) -> None:
    """Has every agent say this as its system prompt, also after Hermes shortened a conversation."""
    from run_agent import AIAgent

    AIAgent._build_system_prompt = lambda self, system_message=None: prompt


if __name__ == "__main__":
    own, *options = sys.argv[1:]
    if own:
        replace_prompt(Path(own).read_text())
    declare_stateless_channel()
    sys.argv = ["hermes", "chat", "-Q", *options, f"--query={sys.stdin.read()}"]
    sys.exit(main())
