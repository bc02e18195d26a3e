"""TorchRL sees ClawGym's spaces and environments as they are: ragged ids, any text, one call a step."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from tensordict import TensorDictBase
from torchrl.envs import GymWrapper, check_env_specs

from clawgym_env.errors import ConfigError
from clawgym_env.spaces import TokenSequence, UnicodeText
from torchrl_ext.env import ClawGymEnv

VOCAB = 32


class EchoEnv(gymnasium.Env[dict[str, Any], Any]):
    """Three calls an episode; each prompt is the one before plus the answer. The reward counts the answers' tokens."""

    def __init__(self) -> None:
        self.observation_space = spaces.Dict(
            {
                "prompt_ids": TokenSequence(VOCAB, 1000),
                "messages": UnicodeText(10_000),
                "call_id": spaces.Box(0, 1000, (), np.int64),
            }
        )
        self.action_space = TokenSequence(VOCAB, 1000, min_length=1)
        self.seen: list[np.ndarray] = []

    def _observation(self) -> dict[str, Any]:
        return {"prompt_ids": self.prompt.copy(), "messages": '["ü 你"]', "call_id": np.array(len(self.seen))}

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        self.task = (options or {}).get("task_id") or f"task{self.np_random.integers(10_000)}"
        self.seen, self.prompt = [], np.arange(1, 5)
        return self._observation(), {"task_id": self.task}

    def step(self, action: Any) -> Any:
        assert self.action_space.contains(action), action
        self.seen.append(action)
        self.prompt = np.concatenate([self.prompt, action])
        done = len(self.seen) == 3
        reward = float(sum(map(len, self.seen))) if done else 0.0
        return self._observation(), reward, done, False, {"task_id": self.task}


gymnasium.register("ClawGymTest/Echo-v0", entry_point=EchoEnv)


def answers(*lengths: int) -> Any:
    """A policy whose k-th answer is k + 1, repeated."""
    count = iter(lengths)

    def policy(td: TensorDictBase) -> TensorDictBase:
        k = int(td["call_id"][0])
        td["tokens", "response"] = torch.full((1, next(count)), k + 1)
        return td

    return policy


def test_gym_wrapper_passes_every_token() -> None:
    inner = EchoEnv()
    env = GymWrapper(inner)
    assert env.action_spec.shape == (-1,)
    td = env.reset()
    td["action"] = torch.tensor([7, 2, 9])
    out = env.step(td)
    np.testing.assert_array_equal(inner.seen[0], [7, 2, 9])
    assert out["next", "prompt_ids"].tolist() == [1, 2, 3, 4, 7, 2, 9]
    assert out["next", "messages"] == '["ü 你"]'


def test_env_passes_every_token_and_the_reward() -> None:
    env = ClawGymEnv("ClawGymTest/Echo-v0")
    out = env.rollout(10, answers(3, 1, 2), return_contiguous=False)
    assert out.batch_size == (1, 3)
    prompts = [step["tokens", "prompt"].tolist() for step in out[0].unbind(0)]
    assert prompts == [[1, 2, 3, 4], [1, 2, 3, 4, 1, 1, 1], [1, 2, 3, 4, 1, 1, 1, 2]]
    assert [step["next", "reward"].item() for step in out[0].unbind(0)] == [0.0, 0.0, 6.0]
    assert [step["next", "done"].item() for step in out[0].unbind(0)] == [False, False, True]
    masks = [step["masks", "all_attention_mask"] for step in out[0].unbind(0)]
    assert [len(m) for m in masks] == [4, 7, 8] and all(bool(m.all()) for m in masks)
    env.close()
    assert env.is_closed


def test_specs_hold() -> None:
    env = ClawGymEnv("ClawGymTest/Echo-v0")
    check_env_specs(env, return_contiguous=False, seed=0)


def test_group_size_repeats_tasks() -> None:
    env = ClawGymEnv("ClawGymTest/Echo-v0", group_size=2)
    env.set_seed(3)
    queries = [env.reset()[0]["query"] for _ in range(6)]
    assert queries[0::2] == queries[1::2]
    assert len(set(queries)) == 3


def test_other_environments_are_refused() -> None:
    with pytest.raises(ConfigError, match="CartPole"):
        ClawGymEnv("CartPole-v1")


def test_scripted_harness_holds_its_specs() -> None:
    env = ClawGymEnv("ClawGym/Scripted-v0")
    try:
        check_env_specs(env, return_contiguous=False, seed=0)
    finally:
        env.close()
