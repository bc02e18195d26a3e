"""The training loop: stages that read and write one run folder.

Invariant: every stage can be killed at any time and goes on from its last save to the same result, to within rounding:
tasks, batches and sampling seeds follow from (seed, stage, step) alone.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tensordict import TensorDictBase, lazy_stack
from transformers import PreTrainedModel

from clawgym_env.engines.base import Engine
from clawgym_env.engines.scripted import ScriptedEngine
from clawgym_env.evaluation import Evaluation, evaluate
from clawgym_env.harnesses.base import Harness
from clawgym_env.proxy.session import Budget
from clawgym_env.rendering import ChatRenderer
from clawgym_env.rollout import Rollout, RolloutSettings, RolloutSpec
from clawgym_env.sandboxes.base import Backend
from clawgym_env.store import RunFolder
from clawgym_env.tasks.base import Split, Suite, Task
from clawgym_env.tasks.builtin.demonstrator import demonstrate
from clawgym_env.tree.ledger import total
from clawgym_env.types import Sampling, ToolCall
from torchrl_ext.collector import TreeCollector, rollout_td
from torchrl_ext.data import to_training_batch, tree_td
from torchrl_ext.engine import TorchEngine
from torchrl_ext.estimators import TreeGroupAdvantage
from torchrl_ext.losses import TreeGRPOLoss, TreeSFTLoss
from torchrl_ext.models import save_policy
from torchrl_ext.optim import make_optimizer
from torchrl_ext.progress import RunProgress
from torchrl_ext.recipes.config import DemosStage, EvalStage, GRPOStage, RunSettings, SFTStage
from torchrl_ext.sft import prompt_length, shorten_prompt


@dataclass(slots=True)
class Workbench:
    """What the stages of a run share.

    Attributes:
        model: The policy; engine and trainer hold the same parameters.
        tokenizer_dir: Folder whose tokenizer files go with the saved policy.
    """

    folder: RunFolder
    settings: RunSettings
    model: PreTrainedModel
    tokenizer_dir: Path
    renderer: ChatRenderer
    backend: Backend
    harness: Harness
    suite: Suite
    progress: RunProgress
    started: float = field(default_factory=time.monotonic)

    def collector(self, engine: Engine, plan: Callable[[int], Sequence[RolloutSpec]], batches: int) -> TreeCollector:
        """A collector of this run."""
        s = self.settings
        rollout = RolloutSettings(
            sampling=Sampling(temperature=s.temperature, max_tokens=s.max_tokens),
            budget=Budget(max_calls=s.max_calls),
            timeout_s=s.timeout_s,
        )
        return TreeCollector(
            engine, self.renderer, self.backend, plan, settings=rollout, total_batches=batches,
            concurrency=s.concurrency, on_rollout=lambda rollout, left: self.progress.advance(),
        )  # fmt: skip

    def engine(self) -> TorchEngine:
        """The embedded engine on this run's parameters."""
        return TorchEngine(self.model, max_context=self.settings.max_context)

    def specs(self, tasks: Sequence[Task], name: str, *, group: int = 1) -> list[RolloutSpec]:
        """Rollouts of tasks: ``group`` of each, ids and seeds by name and place."""
        return [
            RolloutSpec(
                id=f"{name}-{t:03d}-{k}",
                task=task,
                harness=self.harness,
                group=f"{task.id}@{self.settings.harness}",
                seed=derive_seed(self.settings.seed, name, t, k),
            )
            for t, task in enumerate(tasks)
            for k in range(group)
        ]

    def tasks(self, split: Split, n: int, *key: object) -> list[Task]:
        """Tasks drawn by the run's seed and a key."""
        return self.suite.sample(split, n, seed=derive_seed(self.settings.seed, split, *key) % (1 << 31))

    def log(self, stage: str, row: dict[str, Any]) -> None:
        """One line of ``metrics.jsonl``."""
        self.folder.append_metrics({"stage": stage, "elapsed_s": round(time.monotonic() - self.started, 2), **row})


def derive_seed(seed: int, *key: object) -> int:
    """A 63-bit seed from the run's seed and a key."""
    data = "/".join(map(str, (seed, *key))).encode()
    return int.from_bytes(blake2b(data, digest_size=8).digest(), "little") >> 1


# --------------------------------------------------------------------------------------------------- demonstrations


def capture_demonstrations(bench: Workbench, stage: DemosStage) -> None:
    """Runs the imperfect demonstrator through the harness; batches already stored are not run again."""
    tasks = bench.tasks("train", stage.rollouts, "demos")
    specs = bench.specs(tasks, "demos")
    replies = {spec.id: _demonstration(bench, spec, stage.skill) for spec in specs}
    engine = ScriptedEngine(lambda request, turn: replies[request.rollout_id][turn])
    chunks = [specs[i : i + stage.batch] for i in range(0, len(specs), stage.batch)]
    done = set(bench.folder.batches())
    missing = [k for k in range(len(chunks)) if f"demos-{k:04d}" not in done]
    if not missing:
        return
    collector = bench.collector(engine, lambda k: chunks[missing[k]], len(missing))
    bench.progress.begin("demonstrations", sum(len(chunks[k]) for k in missing))
    try:
        for k, _ in zip(missing, collector, strict=False):
            bench.folder.write_rollouts(f"demos-{k:04d}", collector.rollouts)
            bench.log("demos", {"step": k, **_rollout_metrics(collector.rollouts)})
    finally:
        collector.shutdown()
        bench.progress.end()
    stored = [r for k in range(len(chunks)) for r in bench.folder.rollouts(f"demos-{k:04d}")]
    right = sum(r.reward.passed for r in stored if r.reward is not None)
    bench.progress.line(f"demonstrations: {len(stored)} rollouts captured under {bench.settings.harness}, {right} right")


def _demonstration(bench: Workbench, spec: RolloutSpec, skill: float) -> list[np.ndarray]:
    shown = demonstrate(spec.task, derive_seed(bench.settings.seed, "demonstrator"), skill)
    encode = bench.renderer.encode_reply
    calls = [encode("", ToolCall("bash", {"command": command})) for command in shown.tool_commands]
    return [*calls, encode(shown.final_text)]


# ---------------------------------------------------------------------------------------------- supervised fine-tuning


def fine_tune(bench: Workbench, stage: SFTStage, source: RunFolder, prefix: str = "") -> None:
    """Fits the policy to the captured rollouts of ``source`` whose batch names begin with ``prefix``."""
    rows = _training_rows(source, prefix, stage.min_score)
    loss_module = TreeSFTLoss(bench.model, normalisation="token_mean")
    optimiser = make_optimizer(bench.model, kind=stage.optimiser, lr=stage.lr, weight_decay=stage.weight_decay)
    first = _restore(bench, "sft", optimiser)
    if first >= stage.steps:
        return
    bench.progress.begin("fine-tuning", stage.steps - first)
    began, losses = time.monotonic(), []
    for step in range(first, stage.steps):
        rng = np.random.default_rng([bench.settings.seed, 1, step])
        picked = [rows[i] for i in rng.choice(len(rows), size=min(stage.batch, len(rows)), replace=False)]
        batch: TensorDictBase = to_training_batch(picked)
        keep = prompt_length(step / stage.steps, stage.curriculum)
        if keep is not None:
            batch = shorten_prompt(batch, keep)
        set_lr(optimiser, stage.lr * min(1.0, (step + 1) / max(1, stage.warmup)) * (1.0 - 0.95 * step / stage.steps))
        losses.append(update(bench.model, optimiser, loss_module(batch).loss_sft, stage.max_grad_norm)[0])
        bench.progress.advance()
        if (step + 1) % stage.save_every == 0 or step + 1 == stage.steps:
            recent = float(np.mean(losses[-stage.save_every :]))
            seconds = time.monotonic() - began
            bench.log("sft", {"step": step + 1, "loss": recent, "seconds": seconds, "prompt": keep})
            _save(bench, "sft", step + 1, optimiser)
            bench.progress.line(f"fine-tuning {step + 1}/{stage.steps}: loss {recent:.3f}, {seconds:.0f} s")
    bench.progress.end()


def _training_rows(source: RunFolder, prefix: str, min_score: float | None) -> list[TensorDictBase]:
    rows: list[TensorDictBase] = []
    for name in source.batches():
        if not name.startswith(prefix):
            continue
        for r in source.rollouts(name):
            if r.reward is not None and (min_score is None or r.reward.score >= min_score):
                rows.append(tree_td(r.packed, reward=r.reward.score, query=r.group, status=r.status))
    if not rows:
        raise ValueError(f"{source.path} holds no scored rollouts named {prefix}* with score >= {min_score}")
    return rows


# ------------------------------------------------------------------------------------------------------------ tree GRPO


def reinforce(bench: Workbench, stage: GRPOStage, eval_stage: EvalStage) -> None:
    """Improves the policy by tree GRPO; the checkpoint with the best validation Pass@1 becomes the policy."""
    bench.model.eval()  # no dropout: the ratio of the first update is 1
    loss_module = TreeGRPOLoss(
        bench.model, clip_epsilon=(stage.clip_low, stage.clip_high), tis_cap=stage.tis_cap,
        node_weight=stage.node_weight, normalisation=stage.normalisation, constant=stage.constant,
        temperature=bench.settings.temperature,
    )  # fmt: skip
    advantage = TreeGroupAdvantage(scale=stage.scale, baseline=stage.baseline)
    optimiser = make_optimizer(
        bench.model, kind=stage.optimiser, lr=stage.lr, weight_decay=stage.weight_decay, betas=stage.betas
    )
    first = _restore(bench, "grpo", optimiser)
    engine = bench.engine()
    engine.update_weights(first + 1)
    collector = bench.collector(
        engine,
        lambda k: bench.specs(bench.tasks("train", stage.tasks, "grpo", k), f"grpo-{k:04d}", group=stage.group),
        stage.steps,
    )
    collector.batch = first
    try:
        for step in range(first, stage.steps):
            bench.progress.begin(f"step {step + 1}/{stage.steps}", stage.tasks * stage.group)
            began = time.monotonic()
            batch = advantage.inv(next(iter(collector)))
            collected = time.monotonic()
            set_lr(optimiser, stage.lr * _schedule(step, stage))
            figures = _grpo_update(bench.model, loss_module, optimiser, batch, collector.rollouts, stage)
            collector.increment_version()
            trained = time.monotonic()
            name = f"grpo-{step:04d}"
            bench.folder.write_rollouts(name, collector.rollouts)
            seconds = {"rollouts": collected - began, "update": trained - collected}
            row = {"step": step + 1, **_rollout_metrics(collector.rollouts), **figures, "seconds": seconds}
            if (step + 1) % stage.validate_every == 0 or step + 1 == stage.steps:
                row["validation"] = _validate(bench, collector, eval_stage, step)
            bench.log("grpo", row)
            _save(bench, "grpo", step + 1, optimiser)
            bench.progress.end()
            bench.progress.line(describe_step(row, stage.steps))
    finally:
        collector.shutdown()
        bench.progress.end()
        _close(engine)
    best = bench.folder.path / "checkpoints" / "best"
    if best.is_dir():
        _load_weights(bench.model, best)


def _grpo_update(
    model: PreTrainedModel,
    loss_module: TreeGRPOLoss,
    optimiser: Any,
    batch: TensorDictBase,
    rollouts: Sequence[Rollout],
    stage: GRPOStage,
) -> dict[str, float]:
    """One batch's updates; rollouts whose advantage is 0 are booked as dropped and cost no forward."""
    scored = [bool(td["next", "scored"]) for td in batch.unbind(0)]
    useful = []
    for td, ok, rollout in zip(batch.unbind(0), scored, rollouts, strict=True):
        if ok and float(td["advantage"].abs().max()) > 0:
            useful.append(td)
        elif ok:
            rollout.ledger.drop("group without variance", rollout.ledger.trained)
    if not useful:
        return {"trained_rollouts": 0}
    data = to_training_batch(lazy_stack(useful), n_rollouts=sum(scored))
    with torch.no_grad():
        data["old_log_prob"] = loss_module.log_prob(data)
    for _ in range(stage.epochs):
        out = loss_module(data)
        loss, norm = update(model, optimiser, out.loss_objective, stage.max_grad_norm)
    return {
        "trained_rollouts": len(useful),
        "loss": loss,
        "grad_norm": norm,
        "lr": float(optimiser.param_groups[0]["lr"]),
        "clip_fraction": float(out.clip_fraction),
        "log_prob_gap_mean": float(out.log_prob_gap_mean),
        "log_prob_gap_max": float(out.log_prob_gap_max),
        "tis_clipped": float(out.tis_clipped),
        "computed_tokens": int(data.shape[0]),
    }


def _schedule(step: int, stage: GRPOStage) -> float:
    """Linear warm-up, then constant for the first third and down to 15%."""
    return min(1.0, (step + 1) / max(1, stage.warmup)) * min(1.0, max(0.15, 1.5 * (1 - step / stage.steps)))


def _validate(bench: Workbench, collector: TreeCollector, stage: EvalStage, step: int) -> float | None:
    """Pass@1 on the validation split; the best checkpoint so far is kept."""
    if stage.validation == 0:
        return None
    tasks = bench.tasks("validation", stage.validation, "validation")
    rate = evaluate(collector.run(bench.specs(tasks, f"validation-{step:04d}"))).overall.rate
    seen = [row["validation"] for row in bench.folder.metrics() if row.get("validation") is not None]
    if not seen or rate >= max(seen):
        save_policy(bench.model, bench.tokenizer_dir, bench.folder.path / "checkpoints" / "best")
    return rate


def describe_step(row: dict[str, Any], steps: int) -> str:
    """One line for a person."""
    gap = row.get("log_prob_gap_max")
    validation = row.get("validation")
    parts = [
        f"step {row['step']}/{steps}: reward {row['reward']:.3f}",
        f"Pass@1 {100 * row['pass_at_1']:.0f}%",
        f"tokens {row['captured']} captured, {row['trained']} trained",
        f"unique/total {row['unique_tokens'] / max(1, row['total_tokens']):.2f}",
        f"log-prob gap {gap:.1e}" if gap is not None else "no update",
        f"{row['seconds']['rollouts']:.1f} + {row['seconds']['update']:.1f} s",
        f"validation {100 * validation:.0f}%" if validation is not None else "",
    ]
    return ", ".join(p for p in parts if p)


# ----------------------------------------------------------------------------------------------------------- evaluation


def measure(bench: Workbench, stage: EvalStage, when: str) -> None:
    """Held-out Pass@1, at temperature 1 and greedy, once a run and ``when``."""
    if stage.test == 0 or any(r["stage"] == "eval" and r["when"] == when for r in bench.folder.metrics()):
        return
    engine = bench.engine()
    collector = bench.collector(engine, lambda k: [], 0)
    tasks = bench.tasks("test", max(stage.test, stage.greedy), "test")
    began = time.monotonic()
    results: dict[str, Evaluation] = {}
    try:
        for mode, temperature, n in (("sampled", 1.0, stage.test), ("greedy", 0.0, stage.greedy)):
            if n == 0:
                continue
            bench.progress.begin(f"held-out tasks {when}, {mode}", n)
            sampling = Sampling(temperature=temperature, max_tokens=bench.settings.max_tokens)
            rollouts = collector.run(bench.specs(tasks[:n], f"eval-{when}-{mode}"), sampling)
            bench.folder.write_rollouts(f"eval-{when}-{mode}", rollouts)
            results[mode] = evaluate(rollouts)
    finally:
        collector.shutdown()
        bench.progress.end()
        _close(engine)
    row = {"when": when, "seconds": time.monotonic() - began, **{m: e.as_dict() for m, e in results.items()}}
    bench.log("eval", row)
    said = "; ".join(f"{mode} {e.overall}" for mode, e in results.items())
    bench.progress.line(f"[bold]held-out Pass@1 {when}: {said}[/bold]")


def _rollout_metrics(rollouts: Sequence[Rollout]) -> dict[str, Any]:
    summary = evaluate(rollouts)
    ledger = total([r.ledger for r in rollouts])
    rewards = [r.reward.score for r in rollouts if r.reward is not None]
    return {
        "rollouts": len(rollouts),
        "reward": float(np.mean(rewards)) if rewards else float("nan"),
        "pass_at_1": summary.overall.rate,
        "by_family": {k: v.rate for k, v in summary.by_family.items()},
        "unscored": summary.unscored,
        "calls": summary.calls,
        **ledger.as_dict(),
        "unique_tokens": sum(r.tree.unique_tokens for r in rollouts),
        "total_tokens": sum(r.tree.total_tokens for r in rollouts),
        "cached_tokens": sum(c.call.cached_tokens for r in rollouts for c in r.records),
    }


# ---------------------------------------------------------------------------------------------- steps, saves and restores


def update(model: PreTrainedModel, optimiser: Any, loss: torch.Tensor, max_grad_norm: float) -> tuple[float, float]:
    """One optimiser step; returns the loss and the gradient's norm before clipping."""
    optimiser.zero_grad()
    loss.backward()  # type: ignore[no-untyped-call]
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), max_grad_norm)
    optimiser.step()
    return float(loss), float(norm)


def set_lr(optimiser: Any, lr: float) -> None:
    """Sets the learning rate of every group."""
    for group in optimiser.param_groups:
        group["lr"] = lr


def _save(bench: Workbench, stage: str, step: int, optimiser: Any) -> None:
    folder = bench.folder.path / "checkpoints"
    folder.mkdir(exist_ok=True)
    state = {
        "stage": stage,
        "step": step,
        "model": bench.model.state_dict(),
        "optimiser": optimiser.state_dict(),
        "elapsed_s": time.monotonic() - bench.started,
    }
    beside = folder / ".state.pt"
    torch.save(state, beside)
    beside.replace(folder / "state.pt")


def _restore(bench: Workbench, stage: str, optimiser: Any) -> int:
    """Steps of ``stage`` that are done; model and optimiser are put where they were."""
    path = bench.folder.path / "checkpoints" / "state.pt"
    if not path.is_file():
        return 0
    state = torch.load(path, weights_only=True)
    order = ["sft", "grpo"]
    if order.index(state["stage"]) < order.index(stage):
        bench.model.load_state_dict(state["model"])
        return 0
    bench.model.load_state_dict(state["model"])
    if state["stage"] != stage:
        return 1 << 62  # a later stage has begun: this one is done
    optimiser.load_state_dict(state["optimiser"])
    kept = [r for r in bench.folder.metrics() if r["stage"] != stage or r["step"] <= state["step"]]
    bench.folder.keep_metrics(kept)
    return int(state["step"])


def _load_weights(model: PreTrainedModel, path: Path) -> None:
    model.load_state_dict(type(model).from_pretrained(path, dtype=model.dtype, local_files_only=True).state_dict())


def _close(engine: TorchEngine) -> None:
    import asyncio

    asyncio.run(engine.aclose())
