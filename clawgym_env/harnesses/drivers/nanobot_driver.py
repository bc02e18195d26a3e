"""Runs in a sandbox: gives nanobot one task in a project folder, and waits until it and its sub-agents are done.

Invariant: nanobot itself is unchanged. Its command for one message (``nanobot agent -m``) has no project folder beside
its own workspace, ends without its sub-agents, and ends with exit code 0 whatever happened; this asks it as its WebUI
does, over its message bus. Usage: ``nanobot_driver.py SETTINGS.json``, with the task on stdin.
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

from loguru import logger
from nanobot.agent.hooks import create_file_edit_activity_hook
from nanobot.agent.loop import AgentLoop
from nanobot.agent.tools.registry import ToolRegistry
from nanobot.bus.events import InboundMessage
from nanobot.bus.outbound_events import StreamedResponseEvent
from nanobot.bus.queue import MessageBus
from nanobot.bus.runtime_events import TurnCompleted
from nanobot.config.loader import load_config
from nanobot.cron.service import CronService
from nanobot.utils.helpers import sync_workspace_templates

CHANNEL = "websocket"  # the one whose messages may name a project folder
FAILED = 1


async def main(settings: dict[str, Any], task: str) -> int:
    """Runs a task.

    Args:
        settings: ``config`` (path of nanobot's configuration), ``project`` (folder), ``prompt`` (system prompt, or
            ``None`` for nanobot's own) and ``tools`` (names, or ``None`` for all).

    Returns:
        The exit code.
    """
    config = load_config(Path(settings["config"]))
    bus, tools, errors = MessageBus(), ToolRegistry(), _errors()
    if settings["prompt"] is None:
        sync_workspace_templates(config.workspace_path, silent=True)
    loop = AgentLoop.from_config(
        config,
        bus,
        tool_registry=tools,
        cron_service=CronService(config.workspace_path / "cron" / "jobs.json"),
        hook_factories=[create_file_edit_activity_hook],
    )
    _narrow(loop, tools, settings)
    ended: asyncio.Queue[TurnCompleted] = asyncio.Queue()
    bus.subscribe(ended.put, TurnCompleted)
    said = asyncio.create_task(_print(bus))
    running = asyncio.create_task(loop.run())
    where = {"project_path": settings["project"], "access_mode": "full"}
    message = InboundMessage(CHANNEL, "user", "task", task, metadata={"workspace_scope": where, "_wants_stream": True})
    await bus.publish_inbound(message)
    turn = await ended.get()
    while loop.subagents.get_running_count() or not bus.inbound.empty() or not ended.empty():
        turn = await ended.get()  # each sub-agent's report is a turn of its own when the main agent has ended
    loop.stop()
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    said.cancel()
    if turn.outcome == "completed":
        return 0
    why = errors[-1] if errors else f"the turn failed ({turn.failure_kind})"
    print(" ".join(f"nanobot: {why}".split()), file=sys.stderr)
    return FAILED


def _narrow(loop: AgentLoop, tools: ToolRegistry, settings: dict[str, Any]) -> None:
    """Takes out the tools that are not wanted, and puts a prompt in the place of nanobot's."""
    if settings["tools"] is not None:
        for name in set(tools.tool_names) - set(settings["tools"]):
            tools.unregister(name)
    prompt = settings["prompt"]
    if prompt is None:
        return

    def build(*, session_summary: Any = None, **_: Any) -> str:
        if not session_summary or session_summary["text"] == "(nothing)":
            return str(prompt)
        return f"{prompt}\n\n[Archived Context Summary]\n\n{session_summary['text']}"

    loop.context.build_system_prompt = build


def _errors() -> list[str]:
    """What nanobot logs as errors, from now on."""
    errors: list[str] = []

    def keep(message: Any) -> None:
        raised = message.record["exception"]
        errors.append(message.record["message"] if raised is None else f"{raised.type.__name__}: {raised.value}")

    logger.remove()
    logger.add(keep, level="ERROR")
    logger.add(sys.stderr, level="WARNING", format="{level}: {message}", backtrace=False, diagnose=False)
    return errors


async def _print(bus: MessageBus) -> None:
    """Shows what nanobot says."""
    while True:
        message = await bus.consume_outbound()
        if message.content and isinstance(message.event, StreamedResponseEvent | None):
            print(message.content, flush=True)


if __name__ == "__main__":
    sys.exit(asyncio.run(main(json.loads(Path(sys.argv[1]).read_text()), sys.stdin.read())))
