"""The environments as a Gymnasium user meets them."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import gymnasium
import numpy as np
import orjson
import pytest
from gymnasium.utils.env_checker import check_env

import clawgym_env  # noqa: F401 - registers the environments
from clawgym_env.env import HarnessEnv
from clawgym_env.errors import ClawGymError, ConfigError, TaskError
from clawgym_env.harnesses import install
from clawgym_env.types import ToolCall


@pytest.fixture
def scripted() -> Iterator[HarnessEnv]:
    env = gymnasium.make("ClawGym/Scripted-v0", disable_env_checker=True).unwrapped
    assert isinstance(env, HarnessEnv)
    yield env
    env.close()


@pytest.fixture(scope="module")
def pi() -> Iterator[HarnessEnv]:
    install.ensure("pi", print)
    env = gymnasium.make("ClawGym/Pi-v0", disable_env_checker=True).unwrapped
    assert isinstance(env, HarnessEnv)
    yield env
    env.close()


def checked(env: HarnessEnv) -> None:
    """Gymnasium's own check, its warnings errors."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_env(env, skip_render_check=False)


def test_scripted_passes_the_whole_check(scripted: HarnessEnv) -> None:
    assert scripted.spec is not None and not scripted.spec.nondeterministic
    checked(scripted)


def test_pi_passes_what_a_non_deterministic_environment_can(pi: HarnessEnv) -> None:
    assert gymnasium.spec("ClawGym/Pi-Builtin-v0").nondeterministic
    assert pi.spec is not None and pi.spec.nondeterministic
    checked(pi)


def test_the_same_seed_draws_the_same_task_and_prompt(pi: HarnessEnv) -> None:
    observation, info = pi.reset(seed=1)
    assert pi.observation_space.contains(observation)
    step = pi.step(pi.encode("Done."))
    assert step[2] and not step[3]
    assert pi.observation_space.contains(step[0])
    again, info_again = pi.reset(seed=1)
    assert info == info_again, "the same seed draws the same task"
    np.testing.assert_array_equal(observation["prompt_ids"], again["prompt_ids"])


def test_pi_solves_a_task_by_hand(pi: HarnessEnv) -> None:
    observation, info = pi.reset(options={"task_id": "builtin/folder/1/train/00003"})
    chat = orjson.loads(observation["messages"])
    assert [t["function"]["name"] for t in chat["tools"]] == ["read", "bash", "edit", "write"]
    assert info["instruction"] in chat["messages"][-1]["content"]
    task = pi._world.suite.get(info["task_id"])
    call = ToolCall("bash", {"command": task.oracle[0]})
    observation, reward, terminated, truncated, _ = pi.step(pi.encode("", call))
    assert (reward, terminated, truncated) == (0.0, False, False)
    assert int(observation["call_id"]) == 1
    assert orjson.loads(observation["messages"])["messages"][-1]["role"] == "tool"
    _, reward, terminated, truncated, info = pi.step(pi.encode("Done."))
    assert (reward, terminated, truncated) == (1.0, True, False)
    assert info["status"] == "completed" and info["passed"]
    assert info["ledger"]["captured"] == info["ledger"]["trained"]


def test_rollouts_of_a_group_share_their_first_prompt(pi: HarnessEnv) -> None:
    first, _ = pi.reset(options={"task_id": "builtin/config/1/train/00005"})
    second, _ = pi.reset(options={"task_id": "builtin/config/1/train/00005"})
    np.testing.assert_array_equal(first["prompt_ids"], second["prompt_ids"])


def test_a_budget_truncates() -> None:
    env = HarnessEnv("scripted", sandbox="process", max_calls=1)
    env.reset(seed=0)
    call = ToolCall("write_file", {"path": "a.txt", "content": "x"})
    _, reward, terminated, truncated, info = env.step(env.encode("", call))
    assert (reward, terminated, truncated) == (0.0, False, True)
    assert info["status"] == "budget_exhausted"
    env.close()


def test_steps_out_of_turn_are_refused(scripted: HarnessEnv) -> None:
    with pytest.raises(ClawGymError, match="reset"):
        scripted.step(np.array([5]))
    scripted.reset(seed=0)
    with pytest.raises(ClawGymError, match="token ids"):
        scripted.step(np.array([10**9]))
    scripted.step(scripted.encode("Done."))
    with pytest.raises(ClawGymError, match="reset"):
        scripted.step(np.array([5]))


def test_reset_and_close_end_a_live_episode(scripted: HarnessEnv) -> None:
    scripted.reset(seed=0)
    scripted.reset(seed=1)
    assert "agent that works in a folder" in scripted.render()
    scripted.close()
    scripted.close()
    assert scripted.render() == "no call is pending"


def test_bad_arguments_are_refused(scripted: HarnessEnv) -> None:
    with pytest.raises(ConfigError, match=r"unknown harness 'nope'\. There are .*\bpi, "):
        HarnessEnv("nope")
    with pytest.raises(ConfigError, match="builtin"):
        HarnessEnv("scripted", "nope", sandbox="process")
    with pytest.raises(ConfigError, match="bubblewrap"):
        HarnessEnv("scripted", sandbox="nope")
    with pytest.raises(ConfigError, match="ansi"):
        HarnessEnv("scripted", sandbox="process", render_mode="human")
    with pytest.raises(ConfigError, match="task_id"):
        scripted.reset(options={"tasks": 1})
    with pytest.raises(TaskError):
        scripted.reset(options={"task_id": "builtin/nope"})


def test_vector_environments_work() -> None:
    kwargs = {"disable_env_checker": True}
    envs = gymnasium.vector.SyncVectorEnv([lambda: gymnasium.make("ClawGym/Scripted-v0", **kwargs) for _ in range(2)])
    observation, _ = envs.reset(seed=[0, 1])
    assert len(observation["prompt_ids"]) == 2
    envs.close()
