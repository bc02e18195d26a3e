"""Muon equals torch's up to the precision of its Newton-Schulz; states restore exactly."""

from __future__ import annotations

import copy
from typing import Literal

import pytest
import torch
from torch import nn

from clawgym_env.errors import ConfigError
from torchrl_ext.models import PolicyConfig, create_policy
from torchrl_ext.optim import Muon, make_optimizer, orthogonalise

SMALL = PolicyConfig(vocab_size=40, width=32, layers=2, heads=4, kv_heads=2, head_dim=16, ff_width=48)


@pytest.mark.parametrize("shape", [(24, 24), (16, 40), (40, 16)])
def test_orthogonalise_flattens_the_spectrum(shape: tuple[int, int]) -> None:
    generator = torch.Generator().manual_seed(0)
    matrix = torch.randn(shape, generator=generator)
    out = orthogonalise(matrix)
    u, _, vh = torch.linalg.svd(matrix, full_matrices=False)
    assert out.shape == shape
    inner = u.T @ out @ vh.T  # the same singular vectors, values near one
    assert (inner - torch.diag(inner.diagonal())).abs().max() < 1e-3
    assert inner.diagonal().min() > 0.3
    assert inner.diagonal().max() < 1.3


@pytest.mark.parametrize("shape", [(32, 32), (16, 48), (48, 16)])
def test_muon_equals_torch_up_to_bfloat16(shape: tuple[int, int]) -> None:
    generator = torch.Generator().manual_seed(1)
    ours = nn.Parameter(torch.randn(shape, generator=generator))
    theirs = nn.Parameter(ours.detach().clone())
    settings = {"lr": 0.02, "momentum": 0.9, "weight_decay": 0.05}
    a = Muon([ours], **settings)
    b = torch.optim.Muon([theirs], nesterov=True, adjust_lr_fn="match_rms_adamw", **settings)
    for _ in range(6):
        start = theirs.detach().clone()
        ours.data.copy_(start)
        grad = torch.randn(shape, generator=generator)
        ours.grad, theirs.grad = grad.clone(), grad.clone()
        a.step()
        b.step()
        moved = (theirs - start).norm()
        assert (ours - theirs).norm() < 0.03 * moved
    torch.testing.assert_close(a.state[ours]["momentum_buffer"], b.state[theirs]["momentum_buffer"])


def test_muon_takes_matrices_only() -> None:
    with pytest.raises(ConfigError, match="AdamW"):
        Muon([nn.Parameter(torch.zeros(3))])


def test_muon_without_gradient_leaves_the_parameter() -> None:
    p = nn.Parameter(torch.ones(2, 2))
    Muon([p]).step()
    assert torch.equal(p, torch.ones(2, 2))


@pytest.mark.parametrize("tied", [True, False])
def test_every_parameter_is_in_one_group_and_heads_are_adamws(tied: bool) -> None:
    model = create_policy(PolicyConfig(**{f: getattr(SMALL, f) for f in SMALL.__slots__ if f != "tie_embeddings"},
                                       tie_embeddings=tied))  # fmt: skip
    optimizer = make_optimizer(model, "muon", 1e-3, weight_decay=0.1)
    ids = [id(p) for group in optimizer.param_groups for p in group["params"]]
    assert sorted(ids) == sorted(id(p) for p in model.parameters())
    muon = {id(p) for group in optimizer.parts["muon"].param_groups for p in group["params"]}
    names = {name for name, p in model.named_parameters() if id(p) in muon}
    assert names == {n for n, _ in model.named_parameters() if n.endswith("_proj.weight")}
    for group in optimizer.parts["adamw"].param_groups:
        for p in group["params"]:
            assert group["weight_decay"] == (0.1 if p.ndim > 1 else 0.0)


def test_value_heads_are_adamws() -> None:
    critic = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 1))
    optimizer = make_optimizer(critic, "muon", 1e-3)
    (group,) = optimizer.parts["muon"].param_groups
    assert [p is critic[0].weight for p in group["params"]] == [True]


def test_frozen_parameters_are_left_out() -> None:
    model = create_policy(SMALL)
    model.model.layers[0].requires_grad_(False)
    optimizer = make_optimizer(model, "muon")
    ids = {id(p) for group in optimizer.param_groups for p in group["params"]}
    assert ids == {id(p) for p in model.parameters() if p.requires_grad}


def loss_of(model: nn.Module) -> torch.Tensor:
    ids = torch.arange(12)[None]
    return model(input_ids=ids, labels=ids).loss


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_a_restored_state_continues_identically(kind: Literal["adamw", "muon"]) -> None:
    model = create_policy(SMALL)
    optimizer = make_optimizer(model, kind, 3e-3, weight_decay=0.01)

    def train(m: nn.Module, o: object, steps: int) -> float:
        for _ in range(steps):
            o.zero_grad()
            loss = loss_of(m)
            loss.backward()
            o.step()
        return loss.item()

    first = train(model, optimizer, 3)
    twin, state = copy.deepcopy(model), copy.deepcopy(optimizer.state_dict())
    other = make_optimizer(twin, kind, 1.0)
    other.load_state_dict(state)
    assert train(model, optimizer, 5) == train(twin, other, 5) < first
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), twin.parameters(), strict=True))


def test_param_groups_are_live() -> None:
    model = create_policy(SMALL)
    optimizer = make_optimizer(model, "muon", 1e-2)
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    before = [p.detach().clone() for p in model.parameters()]
    loss_of(model).backward()
    optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_what_cannot_be_honoured_is_refused() -> None:
    model = create_policy(SMALL)
    with pytest.raises(ConfigError, match="sgd"):
        make_optimizer(model, "sgd")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="lr"):
        make_optimizer(model, "adamw", 0.0)
    with pytest.raises(ConfigError, match="muon"):
        make_optimizer(model, "muon").load_state_dict(make_optimizer(model, "adamw").state_dict())
