"""A critic for language models: the value of the state before each token of a packed tree.

V(s_t) is read where the token is predicted, at the final hidden state of ``parent[t]``: it knows all that the policy
knew when it sampled t, and not t itself.

Invariant: one forward over the unique tokens gives the values that a forward over each trajectory would give.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol, cast, runtime_checkable

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from clawgym_env.errors import ConfigError
from torchrl_ext.attention import make_plan
from torchrl_ext.models import tree_hidden_states

CRITIC_FILE = "critic.safetensors"


@runtime_checkable
class TreeValues(Protocol):
    """A module that values the states of a packed tree."""

    def tree_values(
        self, tokens: Tensor, parent: Tensor, depth: Tensor, subtree_end: Tensor, targets: Tensor
    ) -> Tensor:
        """[M]: value of the state before each of ``tokens[targets]``."""
        ...


class ValueHead(nn.Module):  # type: ignore[misc]
    """One linear map to a number, in float32 whatever the trunk's type; at first it says 0 everywhere."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.out = nn.Linear(width, 1, dtype=torch.float32)
        nn.init.zeros_(self.out.weight)
        nn.init.zeros_(self.out.bias)

    def forward(self, hidden: Tensor) -> Tensor:
        """[..., E] -> [...]."""
        return cast(Tensor, self.out(hidden.to(self.out.weight.dtype))).squeeze(-1)


class TreeCritic(nn.Module):  # type: ignore[misc]
    """A value head on a trunk of its own, or on the policy's.

    Args:
        trunk: A Hugging Face model that trees can be run through (``models.check_tree_support``). Of a causal LM its LM
            head is not used.
        shared: The trunk is the policy's. It is then no submodule: ``parameters()`` and ``state_dict()`` are the
            head's. ``TreePPOLoss`` runs such a trunk once for both.
        detach: Values send no gradient into the trunk.
    """

    trunk: PreTrainedModel

    def __init__(self, trunk: PreTrainedModel, *, shared: bool = False, detach: bool = False) -> None:
        super().__init__()
        if shared:
            self.__dict__["trunk"] = trunk
        else:
            self.trunk = trunk
        self.shared = shared
        self.detach = detach
        self.head = ValueHead(int(trunk.config.hidden_size)).to(trunk.device)

    @classmethod
    def of_policy(cls, policy: PreTrainedModel, *, shared: bool = False, detach: bool = False) -> TreeCritic:
        """On the policy's trunk, or on a copy of it that goes its own way."""
        trunk = policy if shared else copy.deepcopy(policy.base_model)
        return cls(trunk, shared=shared, detach=detach)

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Within, a shared trunk gets no gradient from the values: the critic moves and the policy does not."""
        before = self.detach
        self.detach = before or self.shared
        try:
            yield
        finally:
            self.detach = before

    def values_of(self, hidden: Tensor) -> Tensor:
        """[M, E] hidden states -> [M]."""
        return cast(Tensor, self.head(hidden.detach() if self.detach else hidden))

    def tree_values(
        self, tokens: Tensor, parent: Tensor, depth: Tensor, subtree_end: Tensor, targets: Tensor
    ) -> Tensor:
        """Value of the state before each target.

        Args:
            tokens, parent, depth, subtree_end: [N] int64, a packed forest.
            targets: [M] int64; each has a parent.

        Raises:
            ConfigError: a target opens its tree, or the trunk cannot take trees.
        """
        rows = parent[targets]
        if bool((rows < 0).any()):
            raise ConfigError("a root token has no state before it: leave it out of targets")
        plan = make_plan(parent.cpu().numpy(), subtree_end.cpu().numpy(), device=tokens.device)
        with torch.set_grad_enabled(torch.is_grad_enabled() and not self.detach):
            hidden = tree_hidden_states(self.trunk, tokens, depth, plan)
        return self.values_of(hidden.index_select(0, rows))

    def save(self, folder: str | Path) -> Path:
        """Writes the head, and the trunk where it is the critic's own."""
        path = Path(folder)
        path.mkdir(parents=True, exist_ok=True)
        save_file({name: tensor.contiguous() for name, tensor in self.state_dict().items()}, path / CRITIC_FILE)
        return path

    def load(self, folder: str | Path) -> None:
        """Reads what ``save`` wrote of a critic of this shape.

        Raises:
            ConfigError: there is none, or it has another shape.
        """
        file = Path(folder) / CRITIC_FILE
        if not file.is_file():
            raise ConfigError(f"no critic at {file}")
        try:
            self.load_state_dict(load_file(file, device=str(self.head.out.weight.device)))
        except RuntimeError as error:
            raise ConfigError(f"{file} does not fit this critic: {error}") from error
