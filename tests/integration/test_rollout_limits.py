"""What a rollout's record says of the sandbox's limits, and that nobody gets out of a score by meeting one."""

from __future__ import annotations

import pytest

from clawgym_env.rollout import RolloutSettings
from clawgym_env.sandboxes import Limits
from clawgym_env.tasks.base import FreshSandbox, Snapshot
from clawgym_env.types import Reward, Status
from tests.rollout_world import run

HOLD = "import subprocess; ask(); subprocess.run([sys.executable, '-c', 'b = bytearray(400 << 20)'])"
FORK = """
    ask()
    try:
        while True:
            if os.fork() == 0:
                time.sleep(60)
    except OSError:
        pass
"""


@pytest.mark.parametrize(
    ("source", "limits", "status", "says"),
    [
        (HOLD, Limits(memory_mb=100), Status.COMPLETED, "met the sandbox's memory_mb (100)"),
        (FORK, Limits(pids=20), Status.COMPLETED, "met the sandbox's pids (20)"),
        ("ask(); time.sleep(60)", Limits(wall_s=2.0), Status.AGENT_TIMEOUT, "met the sandbox's wall_s (2.0)"),
        (
            "ask(); open('big', 'wb').write(b'x' * (3 << 20))",
            Limits(disk_mb=2),
            Status.HARNESS_FAILED,
            "met the sandbox's disk_mb (2)",
        ),
        (
            "ask()\n    for n in range(5000): open(f'f{n}', 'w')".replace("    ", ""),
            Limits(),
            Status.COMPLETED,
            "more than 4096 files",
        ),
    ],
)
def test_the_record_names_the_limit_that_was_met(source: str, limits: Limits, status: Status, says: str) -> None:
    seen: list[Snapshot] = []

    async def verify(snapshot: Snapshot, fresh: FreshSandbox) -> Reward:
        seen.append(snapshot)
        return Reward(0.0, False)

    (rollout,) = run(source, settings=RolloutSettings(timeout_s=20.0, limits=limits), verify=verify)
    assert rollout.status is status, rollout.detail
    assert says in rollout.detail
    assert rollout.reward == Reward(0.0, False)
    assert len(seen) == 1
