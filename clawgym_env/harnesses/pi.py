"""pi, a coding agent with four tools and a short prompt: our cheapest real harness.

Invariant: the first prompt of every rollout of a task is the same, whatever the machine: pi and Node are mounted at
fixed paths (pi's system prompt names its own folder), and nothing of the user's configuration is inside.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from clawgym_env.errors import ConfigError
from clawgym_env.harnesses import install
from clawgym_env.harnesses.base import HarnessInfo, Launch, LaunchContext
from clawgym_env.sandboxes.base import ExecResult, Mount, Sandbox

ThinkingLevel = Literal["off", "minimal", "low", "medium", "high", "xhigh", "max"]

PI_TARGET = "/opt/clawgym/pi"
NODE_TARGET = "/opt/clawgym/node/bin/node"
PROVIDER = "local"
KEY_VARIABLE = "LOCAL_KEY"
FREE = {"input": 0, "output": 0, "cacheRead": 0, "cacheWrite": 0}
