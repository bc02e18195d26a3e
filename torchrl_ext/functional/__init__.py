"""The mathematics of tree RL: plain tensors in, plain tensors out.

Invariant: every function is vectorised (no Python loop over tokens), has no side effect, and keeps the dtype it is
given (float64 in, float64 out).

| module | what |
|---|---|
| ``advantages`` | comparisons between rollouts or leaves; whitening |
| ``gae`` | generalised advantage estimation over a tree; credit of leaves |
| ``objectives`` | what a policy maximises and a critic minimises |
| ``corrections`` | weights for tokens that another distribution drew |
| ``divergence`` | KL estimates, entropy, effective sample size |
| ``weights`` | node weights and denominators |
| ``trees`` | sums and products along a tree |

Shape suffixes: ``R`` rollouts, ``L`` leaves, ``N`` token-nodes, ``M`` trainable ones (each unique token of a rollout's
tree once), ``P`` pairs of a trainable token and a leaf below it. Log-probabilities are natural logarithms: ``mu`` is
the distribution that sampled the token, ``old`` the trainer's own recomputation before the first update, no suffix the
policy being trained.
"""

from torchrl_ext.functional.advantages import (
    Baseline,
    GroupAdvantage,
    Moments,
    Scale,
    group_advantage,
    leaf_group_advantage,
    moments,
    whiten,
)
from torchrl_ext.functional.corrections import (
    Correction,
    CorrectionKind,
    CorrectionWeight,
    correction_weight,
    token_tis,
)
from torchrl_ext.functional.divergence import (
    LOG_RATIO_BOUND,
    KLEstimator,
    LogProbGap,
    effective_sample_size,
    entropy,
    kl_estimate,
    kl_k3,
    log_prob_gap,
)
from torchrl_ext.functional.gae import (
    BranchAdvantage,
    TreeEstimate,
    branch_gae,
    leaf_advantage,
    leaf_values,
    length_adaptive_lambda,
    split_advantage,
    tree_gae,
    treerl_advantage,
)
from torchrl_ext.functional.objectives import (
    Objective,
    PolicyObjective,
    cispo_objective,
    explained_variance,
    grpo_objective,
    mean_of_rollout,
    policy_objective,
    sequence_log_ratio,
    value_loss,
)
from torchrl_ext.functional.trees import (
    BranchBackup,
    TrainableTree,
    leaves_below,
    nearest,
    total_of_siblings,
    trainable_tree,
    tree_sum,
    unroll,
)
from torchrl_ext.functional.weights import (
    NodeWeight,
    Normalisation,
    node_weight,
    token_share,
)

__all__ = [
    "LOG_RATIO_BOUND",
    "Baseline",
    "BranchAdvantage",
    "BranchBackup",
    "Correction",
    "CorrectionKind",
    "CorrectionWeight",
    "GroupAdvantage",
    "KLEstimator",
    "LogProbGap",
    "Moments",
    "NodeWeight",
    "Normalisation",
    "Objective",
    "PolicyObjective",
    "Scale",
    "TrainableTree",
    "TreeEstimate",
    "branch_gae",
    "cispo_objective",
    "correction_weight",
    "effective_sample_size",
    "entropy",
    "explained_variance",
    "group_advantage",
    "grpo_objective",
    "kl_estimate",
    "kl_k3",
    "leaf_advantage",
    "leaf_group_advantage",
    "leaf_values",
    "leaves_below",
    "length_adaptive_lambda",
    "log_prob_gap",
    "mean_of_rollout",
    "moments",
    "nearest",
    "node_weight",
    "policy_objective",
    "sequence_log_ratio",
    "split_advantage",
    "token_share",
    "token_tis",
    "total_of_siblings",
    "trainable_tree",
    "tree_gae",
    "tree_sum",
    "treerl_advantage",
    "unroll",
    "value_loss",
    "whiten",
]
