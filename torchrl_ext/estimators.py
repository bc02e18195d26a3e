"""Advantage estimators over rollouts.

Invariant: an estimator reads scores and writes advantages; it drops nothing. Rollouts without a score stay in the
batch, out of every baseline, with advantage 0.
"""

from __future__ import annotations

import torch
from tensordict import NestedKey, TensorDictBase
from torchrl.envs.transforms import Transform

from torchrl_ext import functional as F


class TreeGroupAdvantage(Transform):  # type: ignore[misc]
    """Group-relative advantages of rollout TensorDicts (Eq 7, arXiv:2608.16798), as a replay-buffer transform.

    It stands beside TorchRL's ``MCAdvantage``: it acts when the buffer is extended, with a lazy stack of whole groups.
    Unlike there, the unit is a rollout whatever its number of branches, σ is the population's, and unscored rollouts
    are left out of the baseline. Without a buffer, ``inv(batch)`` returns the batch with advantages.

    Args:
        scale: ``std`` or ``none`` (Dr.GRPO); see ``functional.group_advantage``.
        baseline: ``mean`` or ``leave_one_out``.
        eps: Added to σ.
        negative_weight: Factor in [0, 1] on advantages below 0; 1 leaves them as they are. Below 1 the advantages of a
            group no longer sum to 0.
        group_key: str a rollout; rollouts of equal value form a group.
        reward_key: One number a rollout; not read where the rollout is not scored.
        scored_key: [1] bool a rollout.
        advantage_key: Written, in the reward's shape.
    """

    def __init__(
        self,
        *,
        scale: F.Scale = "std",
        baseline: F.Baseline = "mean",
        eps: float = 1e-6,
        negative_weight: float = 1.0,
        group_key: NestedKey = "query",
        reward_key: NestedKey = ("next", "reward"),
        scored_key: NestedKey = ("next", "scored"),
        advantage_key: NestedKey = "advantage",
    ) -> None:
        super().__init__()
        empty = torch.zeros(0)  # refuses unknown options here, not at the first batch
        F.group_advantage(empty, empty.long(), valid_R=empty.bool(), scale=scale, baseline=baseline, eps=eps)
        self.in_keys = [group_key, reward_key, scored_key]
        self.out_keys = [advantage_key]
        if not 0.0 <= negative_weight <= 1.0:
            raise ValueError(f"negative_weight must lie in [0, 1], got {negative_weight}")
        self.scale, self.baseline, self.eps = scale, baseline, eps
        self.negative_weight = negative_weight
        self.group_key, self.reward_key, self.scored_key = group_key, reward_key, scored_key
        self.advantage_key = advantage_key

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Sampling from the buffer leaves the advantages as they are."""
        return tensordict

    def _inv_call(self, tensordict: TensorDictBase) -> TensorDictBase:
        tds = list(tensordict.unbind(0))
        names: dict[str, int] = {}
        group_R = torch.tensor([names.setdefault(td[self.group_key], len(names)) for td in tds], dtype=torch.int64)
        reward_R = torch.cat([td[self.reward_key].reshape(1) for td in tds])
        scored_R = torch.cat([td[self.scored_key].reshape(1) for td in tds])
        found = F.group_advantage(
            reward_R,
            group_R.to(reward_R.device),
            valid_R=scored_R,
            scale=self.scale,
            baseline=self.baseline,
            eps=self.eps,
        )
        advantage_R = torch.where(found.advantage_R < 0, self.negative_weight * found.advantage_R, found.advantage_R)
        for td, advantage in zip(tds, advantage_R, strict=True):
            td[self.advantage_key] = advantage.expand_as(td[self.reward_key]).clone()
        return tensordict
