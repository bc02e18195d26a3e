"""Optimisers for small policies on CPU: Muon for hidden matrices, AdamW for everything else, behind one object.

Invariant: every trainable parameter is in exactly one group; a restored state continues bit for bit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from clawgym_env.errors import ConfigError

NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
"""Quintic coefficients of Keller Jordan's Muon: steepest at zero, converging to singular values of about 0.7..1.2."""
ADAM_BETAS = (0.9, 0.98)
"""beta2 as in ClawGym I's recipe: short runs need a shorter memory than 0.999."""


def orthogonalise(matrix: Tensor, steps: int = 5, eps: float = 1e-7) -> Tensor:
    """Approximates U·Vᵀ of matrix = U·S·Vᵀ by Newton-Schulz iterations, in the matrix's own precision.

    Per step, X ← a·X + (b·A + c·A²)·X with A = X·Xᵀ.

    Args:
        matrix: [m, n] float32.

    Source: Jordan et al., "Muon: An optimizer for hidden layers in neural networks" (2024).
    """
    a, b, c = NEWTON_SCHULZ
    x = matrix.T if matrix.shape[0] > matrix.shape[1] else matrix
    x = x / x.norm().clamp(min=eps)
    for _ in range(steps):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if matrix.shape[0] > matrix.shape[1] else x


class Muon(Optimizer):  # type: ignore[misc]
    """Momentum orthogonalised by Newton-Schulz, for 2-D hidden matrices.

    Equal to ``torch.optim.Muon(..., nesterov=True, adjust_lr_fn="match_rms_adamw")`` except that Newton-Schulz runs in
    float32: torch runs it in bfloat16, which is several times slower on CPUs without bfloat16 units, and noisier.

        Bₜ = μ·Bₜ₋₁ + (1-μ)·gₜ,   Oₜ = NS((1-μ)·gₜ + μ·Bₜ),   θₜ = (1-γλ)·θₜ₋₁ - γ·0.2·√max(m, n)·Oₜ

    so that an update has AdamW's usual root mean square, and learning rates carry over.

    Args:
        lr: γ. momentum: μ. weight_decay: λ, decoupled.

    Raises:
        ConfigError: a parameter that is not 2-D.

    Source: Liu et al., "Muon is Scalable for LLM Training" (arXiv:2502.16982), section 2.2.
    """

    def __init__(self, params: Iterable[Any], lr: float = 1e-3, *, momentum: float = 0.95, weight_decay: float = 0.1):
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})
        for group in self.param_groups:
            for p in group["params"]:
                if p.ndim != 2:
                    raise ConfigError(f"Muon takes 2-D matrices, got shape {tuple(p.shape)}: use AdamW for it")

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Updates every parameter that has a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self._update(p, group)
        return loss

    def _update(self, p: Tensor, group: dict[str, Any]) -> None:
        grad, mu = p.grad, group["momentum"]
        assert grad is not None
        state = self.state[p]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(grad)
        buffer = state["momentum_buffer"].lerp_(grad, 1 - mu)
        direction = orthogonalise(grad.lerp(buffer, mu).float())
        p.mul_(1 - group["lr"] * group["weight_decay"])
        p.add_(direction.to(p.dtype), alpha=-group["lr"] * 0.2 * math.sqrt(max(p.shape)))


class PolicyOptimizer:
    """Several optimisers with one interface.

    ``param_groups`` lists the live groups of all: a schedule that sets each one's ``lr`` reaches every parameter.
    """

    def __init__(self, parts: dict[str, Optimizer]):
        self.parts = parts

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The live groups of all parts."""
        return [group for part in self.parts.values() for group in part.param_groups]

    def step(self) -> None:
        """Updates every parameter that has a gradient."""
        for part in self.parts.values():
            part.step()

    def clipped_step(self, max_grad_norm: float) -> float:
        """Scales the gradient down to a norm, then updates; returns the norm that it had."""
        parameters = [p for group in self.param_groups for p in group["params"]]
        norm = torch.nn.utils.clip_grad_norm_(parameters, max_grad_norm)
        self.step()
        return float(norm)

    def set_lr(self, lr: float) -> None:
        """Sets the learning rate of every group."""
        for group in self.param_groups:
            group["lr"] = lr

    def zero_grad(self) -> None:
        """Drops all gradients."""
        for part in self.parts.values():
            part.zero_grad(set_to_none=True)

    def state_dict(self) -> dict[str, Any]:
        """State of each part by name."""
        return {name: part.state_dict() for name, part in self.parts.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores what ``state_dict`` gave.

        Raises:
            ConfigError: the state is of another kind of optimiser.
        """
        if set(state) != set(self.parts):
            raise ConfigError(f"optimiser state holds {sorted(state)}, this optimiser has {sorted(self.parts)}")
        for name, part in self.parts.items():
            part.load_state_dict(state[name])


def descend(optimiser: PolicyOptimizer, losses: Iterable[Tensor], max_grad_norm: float) -> tuple[float, float]:
    """One step on a sum of losses, a graph at a time; returns it and the gradient's norm before clipping."""
    optimiser.zero_grad()
    total = 0.0
    for loss in losses:
        loss.backward()
        total += float(loss.detach())
    return total, optimiser.clipped_step(max_grad_norm)


def make_optimizer(
    model: nn.Module,
    kind: Literal["adamw", "muon"] = "adamw",
    lr: float = 1e-4,
    *,
    weight_decay: float = 0.0,
    betas: tuple[float, float] = ADAM_BETAS,
) -> PolicyOptimizer:
    """Makes the optimiser of a policy or critic.

    Args:
        kind: ``muon`` uses Muon on the hidden 2-D matrices and AdamW on embeddings, heads, norms and biases.
        lr: Learning rate of every group; Muon's updates have AdamW's root mean square, so one rate suits both.
        weight_decay: Decoupled; never applied to vectors (norms, biases).
        betas: AdamW's.

    Raises:
        ConfigError: an unknown kind or a rate out of range.
    """
    if kind not in ("adamw", "muon"):
        raise ConfigError(f"optimiser kind is 'adamw' or 'muon', got {kind!r}")
    if lr <= 0 or weight_decay < 0:
        raise ConfigError(f"lr must be > 0 and weight_decay >= 0, got {lr} and {weight_decay}")
    trainable = [p for p in model.parameters() if p.requires_grad]
    hidden = _hidden_matrices(model) if kind == "muon" else []
    taken = {id(p) for p in hidden}
    rest = [p for p in trainable if id(p) not in taken]
    groups = [
        {"params": [p for p in rest if p.ndim > 1], "weight_decay": weight_decay},
        {"params": [p for p in rest if p.ndim <= 1], "weight_decay": 0.0},
    ]
    parts: dict[str, Optimizer] = {}
    if hidden:
        parts["muon"] = Muon(hidden, lr, weight_decay=weight_decay)
    if rest:
        parts["adamw"] = AdamW([g for g in groups if g["params"]], lr=lr, betas=betas)
    return PolicyOptimizer(parts)


def _hidden_matrices(model: nn.Module) -> list[nn.Parameter]:
    """2-D weights of linear layers, except heads: what maps to the vocabulary or to a scalar value."""
    embedded = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    vocab = {m.num_embeddings for m in model.modules() if isinstance(m, nn.Embedding)}
    out = []
    for m in model.modules():
        is_hidden = isinstance(m, nn.Linear) and m.out_features > 1 and m.out_features not in vocab
        if is_hidden and m.weight.requires_grad and id(m.weight) not in embedded:
            out.append(m.weight)
    return out
