"""A policy that says what it is told: demonstrators, oracles and tests, through the same boundary as a real one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import numpy as np

from clawgym_env.engines.base import EngineRequest
from clawgym_env.errors import EngineError
from clawgym_env.types import Generation, TokenArray

#: (request, how many calls this rollout has made before) -> token ids of the answer.
Script = Callable[[EngineRequest, int], TokenArray]


class ScriptedEngine:
    """Answers by a script.

    A scripted token is certain, so its log-probability is 0. Answers are cut at ``Sampling.max_tokens`` as any
    policy's.
    """

    def __init__(self, script: Script, *, max_context: int = 131_072) -> None:
        self._script = script
        self._max_context = max_context
        self._turns: Counter[str] = Counter()

    @property
    def max_context(self) -> int:
        """Tokens that one call may hold."""
        return self._max_context

    @property
    def policy_version(self) -> int:
        """Always 0: a script does not learn."""
        return 0

    async def generate(self, request: EngineRequest) -> Generation:
        """The script's answer.

        Raises:
            EngineError: the script failed or had nothing to say.
        """
        turn = self._turns[request.rollout_id]
        self._turns[request.rollout_id] += 1
        try:
            ids = np.asarray(self._script(request, turn), dtype=np.int64)
        except Exception as error:
            raise EngineError(f"the script failed at turn {turn}: {type(error).__name__}: {error}") from error
        if len(ids) == 0:
            raise EngineError(f"the script had nothing to say at turn {turn}")
        cut = ids[: request.sampling.max_tokens]
        whole = len(cut) == len(ids) and int(ids[-1]) in request.stop_token_ids
        return Generation(
            cut, np.zeros(len(cut), np.float32), np.zeros(len(cut), np.int64), "stop" if whole else "length"
        )

    async def aclose(self) -> None:
        """Nothing to free."""
