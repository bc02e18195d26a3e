"""What the loss modules promise around the mathematics: keys, reductions, gradients, refusals."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torch.testing import assert_close
from torchrl.objectives.llm import LLMLossOutput

from clawgym_env.types import Status
from tests.trees import Call, TableActor, packed_of_calls, tiny_qwen3
from torchrl_ext.data import to_training_batch, tree_td
from torchrl_ext.losses import TreeGRPOLoss, TreeSFTLoss

TREE = packed_of_calls([Call([0, 1], [2, 3]), Call([0, 1, 2, 3, 4], [1]), Call([0, 1, 2, 3, 4], [2, 2])])
OTHER = packed_of_calls([Call([0, 1, 1], [4])])


def batch() -> TensorDict:
    return to_training_batch(
        [tree_td(TREE, reward=1, query="q", advantage=0.5), tree_td(OTHER, reward=0, query="q", advantage=-0.5)]
    )


def test_reads_and_writes_the_keys_it_names() -> None:
    loss_fn = TreeGRPOLoss(TableActor(), kl_to_ref_coeff=0.1)
    td = batch()
    td["ref_log_prob"] = torch.zeros(len(td))
    out = loss_fn(td.select(*loss_fn.in_keys))
    assert isinstance(out, LLMLossOutput)
    assert {k for k, v in out.items() if v is not None} == set(loss_fn.out_keys)
    assert set(TreeSFTLoss(TableActor()).out_keys) <= set(TreeSFTLoss(TableActor())(td).keys())


def test_only_losses_carry_a_gradient() -> None:
    td = batch()
    td["ref_log_prob"] = torch.zeros(len(td))
    out = TreeGRPOLoss(TableActor(), kl_to_ref_coeff=0.1)(td)
    carrying = {k for k, v in out.items() if v is not None and v.requires_grad}
    assert carrying == {"loss_objective", "loss_kl_to_ref"}


def test_input_is_only_read() -> None:
    td = batch()
    before = td.clone()
    TreeGRPOLoss(TableActor())(td)
    assert set(td.keys(True, True)) == set(before.keys(True, True))


def test_every_key_can_be_renamed() -> None:
    td = batch()
    td["old_log_prob"] = td["token_log_prob"] + 0.25
    td["ref_log_prob"] = td["token_log_prob"] - 0.25
    loss_fn = TreeGRPOLoss(TableActor(), kl_to_ref_coeff=0.1)
    plain = loss_fn(td)
    fields = TreeGRPOLoss._AcceptedKeys.__dataclass_fields__
    renamed = td.clone()
    for name in fields:
        renamed.rename_key_(getattr(loss_fn.tensor_keys, name), ("moved", name))
    loss_fn.set_keys(**{name: ("moved", name) for name in fields})
    assert ("moved", "advantage") in loss_fn.in_keys
    out = loss_fn(renamed)
    assert_close(out.loss_objective, plain.loss_objective)
    assert_close(out.loss_kl_to_ref, plain.loss_kl_to_ref)
    assert_close(out.tis_clipped, plain.tis_clipped)
    with pytest.raises(ValueError, match="not an accepted"):
        loss_fn.set_keys(reward="r")


def test_reductions_agree() -> None:
    td = batch()
    none = TreeGRPOLoss(TableActor(), node_weight="per_leaf", reduction="none")(td).loss_objective
    assert none.shape == (len(td),)
    assert (none[~td["masks", "all_assistant_mask"]] == 0).all()
    total = TreeGRPOLoss(TableActor(), node_weight="per_leaf", reduction="sum")(td).loss_objective
    assert_close(total, none.sum())
    mean = TreeGRPOLoss(TableActor(), node_weight="per_leaf", normalisation="token_mean")(td).loss_objective
    assert_close(mean, none.sum() / int(td["batch", "n_tokens"][0]))
    constant = TreeGRPOLoss(TableActor(), node_weight="per_leaf", normalisation="constant", constant=8.0)(td)
    assert_close(constant.loss_objective, none.sum() / (2 * 8))


def test_bypass_is_old_policy_equal_to_behaviour() -> None:
    td = batch()
    bypass = TreeGRPOLoss(TableActor())(td)
    assert_close(TreeGRPOLoss(TableActor(), tis_cap=0.5)(td).loss_objective, bypass.loss_objective)  # no weight on top
    td["old_log_prob"] = td["token_log_prob"].clone()
    explicit = TreeGRPOLoss(TableActor())(td)
    assert_close(bypass.loss_objective, explicit.loss_objective)
    assert bypass.log_prob_gap_max.item() > 0  # the sampler against the policy itself
    assert explicit.log_prob_gap_max.item() == 0


def test_log_prob_is_nan_where_nothing_trains() -> None:
    td = batch()
    log_prob = TreeGRPOLoss(TableActor()).log_prob(td)
    assert torch.equal(log_prob.isfinite(), td["masks", "all_assistant_mask"])


def test_temperature_is_that_of_sampling() -> None:
    td = batch()
    actor = TableActor()
    cold = TreeSFTLoss(actor, temperature=0.5)(td).loss_sft
    with torch.no_grad():
        actor.table *= 2
    assert_close(cold, TreeSFTLoss(actor)(td).loss_sft)


def test_actor_is_a_plain_submodule() -> None:
    model = tiny_qwen3()
    loss_fn = TreeGRPOLoss(model)
    assert loss_fn.actor_network is model
    assert {id(p) for p in loss_fn.parameters()} == {id(p) for p in model.parameters()}


def test_refusals() -> None:
    actor = TableActor()
    bad: list[tuple[str, dict[str, Any]]] = [
        ("clip_epsilon", {"clip_epsilon": (1.5, 0.2)}),
        ("tis_cap", {"tis_cap": 0.0}),
        ("node_weight", {"node_weight": "all"}),
        ("normalisation", {"normalisation": "mean"}),
        ("constant", {"normalisation": "constant"}),
        ("temperature", {"temperature": 0.0}),
        ("reduction", {"reduction": "max"}),
    ]
    for match, options in bad:
        with pytest.raises(ValueError, match=match):
            TreeGRPOLoss(actor, **options)


def test_unusable_batches_are_refused() -> None:
    loss_fn = TreeGRPOLoss(TableActor())
    with pytest.raises(KeyError, match="advantage"):
        loss_fn(batch().exclude("advantage"))
    with pytest.raises(KeyError, match="ref_log_prob"):
        TreeGRPOLoss(TableActor(), kl_to_ref_coeff=0.1)(batch())
    stale = batch()
    stale["old_log_prob"] = torch.full((len(stale),), torch.nan)
    with pytest.raises(ValueError, match="old_log_prob"):
        loss_fn(stale)
    failed = to_training_batch([tree_td(TREE, reward=None, query="q", status=Status.SANDBOX_ERROR)])
    assert len(failed) == 0
    with pytest.raises(ValueError, match="no trainable token"):
        loss_fn(failed)
