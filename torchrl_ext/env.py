"""ClawGym's Gymnasium environments in TorchRL: spec conversions for ragged token ids and text, and an ``EnvBase``.

Invariant: token ids pass through unchanged, at their own length. TorchRL's stock conversion of a ``Sequence`` of
``Discrete`` is a one-hot that hands on one id of several; importing this module replaces it for our spaces.

Step mode serves one model call at a time and is for policies that are stepped from outside; training throughput comes
from rollouts that ask the engine directly.
"""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase, lazy_stack
from torchrl.data import Binary, Bounded, Composite, NonTensor, Unbounded
from torchrl.envs import EnvBase
from torchrl.envs.libs.gym import register_gym_spec_conversion
from torchrl.modules.llm import Masks, Tokens

import clawgym_env  # noqa: F401 - registers the environments' ids
from clawgym_env.errors import ConfigError
from clawgym_env.spaces import TokenSequence, UnicodeText


def token_spec(space: TokenSequence, *, batch: tuple[int, ...] = (), device: torch.device | None = None) -> Bounded:
    """Spec of ragged ids: shape (*batch, -1), int64, in [0, vocab_size)."""
    spec = Bounded(0, space.vocab_size - 1, shape=(*batch, 1), dtype=torch.int64, device=device)
    spec.make_neg_dim(len(batch))
    return spec


@register_gym_spec_conversion(TokenSequence)  # type: ignore[untyped-decorator]
def _convert_tokens(spec: TokenSequence, device: torch.device | None = None, **_: Any) -> Bounded:
    return token_spec(spec, device=device)


@register_gym_spec_conversion(UnicodeText)  # type: ignore[untyped-decorator]
def _convert_text(spec: UnicodeText, device: torch.device | None = None, **_: Any) -> NonTensor:
    return NonTensor((), device=device, example_data="")


class ClawGymEnv(EnvBase):  # type: ignore[misc]
    """A registered ClawGym environment with batch size (1,), in the keys that TorchRL's LLM wrappers read and write.

    | key | value |
    |---|---|
    | ``("tokens", "prompt")`` | [1, P] int64, what the policy is to continue; P = 0 after the end |
    | ``("masks", "all_attention_mask")`` | [1, P] bool, all True |
    | ``("tokens", "response")`` | [1, T] int64, the action |
    | ``"messages"``, ``"query"`` | the conversation as JSON; the task's id, which groups rollouts |
    | ``"call_id"`` | [1] int64, number of the call within the episode |
    | ``"reward"`` | [1, 1, 1] float32; NaN at the end of a rollout that must not be learnt from |
    | ``"done"``, ``"terminated"``, ``"truncated"`` | [1, 1] bool |

    Args:
        env_id: A registered id, such as ``ClawGym/OpenClaw-v0``.
        group_size: Episodes in a row on one task before the next task is drawn.
        device: Of the specs and tensors.
        **make_kwargs: Handed to ``gymnasium.make``.

    Raises:
        ConfigError: the environment's spaces are not those of a model boundary.
    """

    def __init__(
        self, env_id: str, *, group_size: int = 1, device: torch.device | str | None = None, **make_kwargs: Any
    ) -> None:
        super().__init__(batch_size=torch.Size((1,)), device=device)
        if group_size < 1:
            raise ConfigError(f"group_size must be at least 1, got {group_size}")
        self._env = gymnasium.make(env_id, disable_env_checker=True, **make_kwargs)
        self._group_size = group_size
        self._task_id = ""
        self._left = 0
        self._seed_next: int | None = None
        self._make_specs(env_id)

    def _make_specs(self, env_id: str) -> None:
        observation, action = self._env.observation_space, self._env.action_space
        prompt = observation.get("prompt_ids") if isinstance(observation, gymnasium.spaces.Dict) else None
        if not isinstance(prompt, TokenSequence) or not isinstance(action, TokenSequence):
            raise ConfigError(f"{env_id} has no token observations and actions: use torchrl.envs.GymEnv for it")
        one, device = (1,), self.device
        mask = Unbounded(shape=(1, 1), dtype=torch.bool, device=device)
        mask.make_neg_dim(1)
        self.observation_spec = Composite(
            tokens=Composite(prompt=token_spec(prompt, batch=one, device=device), shape=one, data_cls=Tokens),
            masks=Composite(all_attention_mask=mask, shape=one, data_cls=Masks),
            messages=NonTensor(shape=one, example_data="", device=device),
            query=NonTensor(shape=one, example_data="", device=device),
            call_id=Unbounded(shape=one, dtype=torch.int64, device=device),
            shape=one,
        )
        self.action_spec = Composite(
            tokens=Composite(response=token_spec(action, batch=one, device=device), shape=one, data_cls=Tokens),
            shape=one,
        )
        self.reward_spec = Composite(reward=Unbounded(shape=(1, 1, 1), device=device), shape=one)
        self.done_spec = Composite(
            {
                name: Binary(1, shape=(1, 1), dtype=torch.bool, device=device)
                for name in ("done", "terminated", "truncated")
            },
            shape=one,
        )

    def _reset(self, tensordict: TensorDictBase | None = None, **kwargs: Any) -> TensorDictBase:
        options = {"task_id": self._task_id} if self._left else None
        observation, info = self._env.reset(seed=self._seed_next, options=options)
        self._seed_next = None
        self._task_id = info["task_id"]
        self._left = (self._left or self._group_size) - 1
        return self._row(observation, terminated=False, truncated=False)

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        response = tensordict[0]["tokens", "response"]
        observation, reward, terminated, truncated, _ = self._env.step(response.cpu().numpy().astype(np.int64))
        reward_td = {"reward": torch.tensor([[float(reward)]], dtype=torch.float32, device=self.device)}
        return self._row(observation, terminated=terminated, truncated=truncated, **reward_td)

    def _row(
        self, observation: dict[str, Any], *, terminated: bool, truncated: bool, **extra: torch.Tensor
    ) -> TensorDictBase:
        prompt = torch.as_tensor(observation["prompt_ids"], dtype=torch.int64, device=self.device)
        flags = {"done": terminated or truncated, "terminated": terminated, "truncated": truncated}
        row = TensorDict(
            {
                "tokens": Tokens(prompt=prompt),
                "masks": Masks(all_attention_mask=torch.ones_like(prompt, dtype=torch.bool)),
                "messages": observation["messages"],
                "query": self._task_id,
                "call_id": torch.as_tensor(observation["call_id"], device=self.device),
                **{name: torch.tensor([flag], device=self.device) for name, flag in flags.items()},
                **extra,
            },
            device=self.device,
        )
        return lazy_stack([row])

    def _set_seed(self, seed: int | None) -> None:
        self._seed_next = seed
        self._left = 0

    def close(self, *, raise_if_closed: bool = True) -> None:
        """Ends the live rollout and frees what the environment holds."""
        super().close(raise_if_closed=raise_if_closed)
        self._env.close()
