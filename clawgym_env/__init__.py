"""ClawGym: train a language model through the agent harness that it will really run in.

Importing this package registers ``ClawGym/<Harness>-v0`` and ``ClawGym/<Harness>-<Suite>-v0`` with Gymnasium. It
imports neither torch nor any harness.
"""

from __future__ import annotations

import gymnasium

__version__ = "0.1.0"
__all__ = ["__version__"]

#: Name in an environment's id -> name of the harness; the scripted one is beside, as it is deterministic.
ENVIRONMENTS = {
    "ClaudeCode": "claude-code",
    "Codex": "codex",
    "Command": "command",
    "Hermes": "hermes",
    "MiniSweAgent": "mini-swe-agent",
    "Nanobot": "nanobot",
    "OpenClaw": "openclaw",
    "OpenAIAgents": "openai-agents",
    "OpenCode": "opencode",
    "OpenHands": "openhands",
    "Pi": "pi",
    "QwenCode": "qwen-code",
    "Smolagents": "smolagents",
}


def _register() -> None:
    entry = "clawgym_env.env:HarnessEnv"
    scripted = {"harness": "scripted", "sandbox": "process"}
    for suffix in ("", "-Builtin"):
        for title, name in ENVIRONMENTS.items():
            gymnasium.register(f"ClawGym/{title}{suffix}-v0", entry, kwargs={"harness": name}, nondeterministic=True)
        gymnasium.register(f"ClawGym/Scripted{suffix}-v0", entry, kwargs=scripted)


_register()
