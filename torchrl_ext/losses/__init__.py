"""Losses over packed trees: thin LossModule shells around ``torchrl_ext.functional``."""

from torchrl_ext.losses.base import Reduction, TreeActor
from torchrl_ext.losses.grpo import TreeGRPOLoss, TreeGRPOLossOutput
from torchrl_ext.losses.ppo import TreePPOLoss, TreePPOLossOutput
from torchrl_ext.losses.sft import TreeSFTLoss
from torchrl_ext.losses.value import TreeValueLoss, TreeValueLossOutput

__all__ = [
    "Reduction",
    "TreeActor",
    "TreeGRPOLoss",
    "TreeGRPOLossOutput",
    "TreePPOLoss",
    "TreePPOLossOutput",
    "TreeSFTLoss",
    "TreeValueLoss",
    "TreeValueLossOutput",
]
