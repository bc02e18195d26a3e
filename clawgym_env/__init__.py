"""ClawGym: train a language model through the agent harness that it will really run in.

Importing this package registers ``ClawGym/<Harness>-v0`` and ``ClawGym/<Harness>-<Suite>-v0`` with Gymnasium. It
imports neither torch nor any harness.
"""

from __future__ import annotations

import gymnasium

__version__ = "0.1.0"
__all__ = ["__version__"]


def _register() -> None:
    entry = "clawgym_env.env:HarnessEnv"
    scripted = {"harness": "scripted", "sandbox": "process"}
    for suffix in ("", "-Builtin"):
        gymnasium.register(f"ClawGym/Pi{suffix}-v0", entry, kwargs={"harness": "pi"}, nondeterministic=True)
        gymnasium.register(f"ClawGym/Scripted{suffix}-v0", entry, kwargs=scripted)


_register()
