"""The tests of the mathematics notice what goes wrong in it: a flipped sign, a dropped mask, a shift by one.

Each mutant is one edit of a source file, put in the place of the function it changes; the plain (not the hypothesis)
tests of the mathematics run in this process until one fails. A mutant that all of them pass is the failure here.
"""

from __future__ import annotations

import ast
import importlib
import itertools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.golden import test_tree_gae_golden, test_tree_grpo_golden
from tests.property import test_tree_gae
from tests.unit import test_functional, test_objectives, test_tree_losses, test_tree_ppo

BATTERY = (
    test_tree_gae_golden,
    test_tree_grpo_golden,
    test_objectives,
    test_functional,
    test_tree_losses,
    test_tree_ppo,
    test_tree_gae,
)

#: Trains a critic: what it would notice, others notice sooner.
SLOW = {"test_a_new_critic_says_zero_and_learns"}

MUTANTS: dict[str, list[tuple[str, str]]] = {
    "functional.advantages": [
        ("reward_R - mean_R,", "reward_R + mean_R,"),
        ("advantage_R * count_R / (count_R - 1)", "advantage_R * count_R / count_R"),
        ("advantage_R / (std_R + eps)", "advantage_R * (std_R + eps)"),
        ("valid_R & (high > low)[q_R]", "(high > low)[q_R]"),
        ("torch.where(has_variance_R, advantage_R", "torch.where(valid_R, advantage_R"),
        ("within + among", "within - among"),
        ("weight_M / weight_M.sum()", "torch.ones_like(x_M) / len(x_M)"),
        ("(x_M - mean) / (std + eps)", "(x_M + mean) / (std + eps)"),
    ],
    "functional.trees": [
        ("weight_M / total_of_siblings(weight_M, parent_M)", "weight_M + 0"),
        ("terminal_M[parent_M[parent_M >= 0]] = False", "pass"),
        ("above_R[run_N])", "above_R[run_N * 0])"),
        ("mark_N[:-1]])", "mark_N[1:]])"),
        ("torch.where(stop_N, own_N, -1)", "own_N"),
        ("above_R[ask_R])", "ask_R)"),
        ("torch.cat([factor_M[1:], factor_M[:1]])", "factor_M"),
        ("torch.where(last_M, 0,", "torch.where(head_M, 0,"),
        ("children_M[parent_M.clamp_min(0)] > 1", "children_M[parent_M.clamp_min(0)] > 9"),
        ("sum_M + reach_M * below_R[run_M]", "sum_M - reach_M * below_R[run_M]"),
        ("sum_M + reach_M * below_R[run_M]", "sum_M + below_R[run_M]"),
        ("factor.index_put((live,), factor[live] * factor[up])", "factor"),
        ("above.index_put((live,), above[up])", "above.index_put((live,), above[up] * 0 - 1)"),
        ("tree.weight_M[node_P])", "ones_P)"),
        ("alive_N / total_of_siblings", "n_leaves_N / total_of_siblings"),
    ],
    "functional.gae": [
        ("gamma * next_value_M - value_M", "gamma * next_value_M + value_M"),
        ("reward_M + gamma * next_value_M", "reward_M - gamma * next_value_M"),
        ("(weight_M * value_M)[child_M]", "value_M[child_M]"),
        ("* gamma * lmbda_M[", "* lmbda_M["),
        ("lmbda_M[tree.parent_M.clamp_min(0)]", "lmbda_M"),
        ("TreeEstimate(advantage_M, advantage_M + value_M)", "TreeEstimate(advantage_M, advantage_M - value_M)"),
        ("tree, gamma, lmbda_critic) + value_M", "tree, gamma, lmbda) + value_M"),
        ("weight_P * advantage_P.clamp_min(0)", "weight_P * advantage_P"),
        ("weight_P * advantage_P.clamp_max(0)", "advantage_P.clamp_max(0)"),
        ("torch.where(tree.terminal_M, advantage_M", "torch.where(tree.terminal_M | True, advantage_M"),
        ("n_M * first_M", "n_M"),
        ("1 - 1 / (alpha", "1 + 1 / (alpha"),
        ("2 * value_M - root_M - parent_value_M", "2 * value_M - root_M + parent_value_M"),
        ("(2 * value_M - root_M - parent_value_M) / n_M.sqrt()", "2 * value_M - root_M - parent_value_M"),
        ("head_M = head_M[head_M]", "start_M = start_M | True"),
    ],
    "functional.weights": [
        ("n_M / leaves_of_rollout_M.to(dtype).clamp_min(1)", "n_M"),
        (".rsqrt()", ".sqrt()"),
        ("(_count(rollout_M, weight_M) * max(n_rollouts, 1))", "_count(rollout_M, weight_M)"),
        ("(_count(prompt_M, weight_M) * max(n_prompts, 1))", "(_count(rollout_M, weight_M) * max(n_prompts, 1))"),
        ("(max(n_rollouts, 1) * constant)", "constant"),
    ],
    "functional.divergence": [
        ("gap_M.expm1() - gap_M", "gap_M.expm1() + gap_M"),
        ("(ref_log_prob_M - log_prob_M).clamp", "(log_prob_M - ref_log_prob_M).clamp"),
        ("0.5 * (log_prob_M - ref_log_prob_M)", "(log_prob_M - ref_log_prob_M)"),
        ("(log_prob_M - sample_log_prob_M).clamp", "(sample_log_prob_M - log_prob_M).clamp"),
        ("return log_prob_M - ref_log_prob_M", "return ref_log_prob_M - log_prob_M"),
        ("-(log_p.exp() * log_p)", "(log_p.exp() * log_p)"),
        ("(2 * lw_M.logsumexp(0) -", "(lw_M.logsumexp(0) -"),
    ],
    "functional.objectives": [
        ("objective_M = torch.minimum(ratio_M", "objective_M = torch.maximum(ratio_M"),
        ("(log_prob_M - behaviour_log_prob_M)", "(behaviour_log_prob_M - log_prob_M)"),
        ("ratio_M.clamp(1 - clip_low, 1 + clip_high) * adv", "ratio_M.clamp(1 - clip_high, 1 + clip_low) * adv"),
        ("torch.maximum(objective_M, dual_clip * advantage_M)", "torch.minimum(objective_M, dual_clip * advantage_M)"),
        ("below_M = advantage_M < 0", "below_M = advantage_M > 0"),
        ("plus.objective_M + minus.objective_M", "plus.objective_M - minus.objective_M"),
        ("weight_M * advantage_M * log_prob_M", "ratio_M * advantage_M * log_prob_M"),
        ("+ log_prob_M - log_prob_M.detach()", "+ 0 * log_prob_M"),
        ("torch.maximum(plain_M, held_M)", "torch.minimum(plain_M, held_M)"),
        ("moved_M.clamp(-clip, clip)", "moved_M"),
        ("old_value_M + moved_M", "old_value_M - moved_M"),
        ("1 - left / total", "left / total"),
    ],
    "functional.corrections": [
        (".clamp_max(cap)", ".clamp_min(cap)"),
        ("kl_k3(log_prob_mu_M, log_prob_old_M)", "kl_k3(log_prob_old_M, log_prob_mu_M)"),
        ("(mean_M < low) | (mean_M > high)", "mean_M > high"),
        ("(weight_M < low) | (weight_M > high)", "weight_M > high"),
        ("(weight_M < low) | (weight_M > high)", "weight_M < low"),
        ("_exp(mean_of_rollout(gap_M, rollout_M))", "_exp(gap_M)"),
        ("index_add(0, rollout_M, gap_M)[rollout_M]", "index_add(0, rollout_M, gap_M)[rollout_M * 0]"),
        ("torch.where(far_M, torch.zeros_like(weight_M), weight_M)", "weight_M"),
        ("(log_prob_old_M - log_prob_mu_M).detach()\n    if", "(log_prob_mu_M - log_prob_old_M).detach()\n    if"),
    ],
    "losses.grpo": [
        ("-objective_M * share_M", "objective_M * share_M"),
        ("objective_M = objective_M * weight_M", "pass"),
        ("and not bypass", ""),
        ('"kl_approx": -log_ratio_M.mean()', '"kl_approx": log_ratio_M.mean()'),
    ],
    "losses.value": [
        ('value_M.dtype, "once")', 'value_M.dtype, "per_leaf")'),
        ("self.critic_coeff * loss_M * share_M", "loss_M * share_M"),
        ("self._read(tensordict, self.tensor_keys.value, index_M)", "value_M.detach()"),
    ],
    "estimators": [
        ("advantage_M * credit_M", "advantage_M + 0 * credit_M"),
        ("(found.advantage_M - mean) / std", "found.advantage_M / std"),
        ("lmbda_critic=self.lmbda_critic", "lmbda_critic=None"),
        ("gamma = float(self.gamma)", "gamma = 1.0"),
    ],
    "data": [
        ("below[merged.subtree_end] == below[1:]", "below[merged.subtree_end] == below[:-1]"),
    ],
}  # fmt: skip


def cases() -> Iterator[object]:
    for module, edits in MUTANTS.items():
        for old, new in edits:
            yield pytest.param(f"torchrl_ext.{module}", old, new, id=f"{module}: {old[:40]} > {new[:40]}")


def functions(tree: ast.Module) -> Iterator[tuple[str | None, ast.FunctionDef]]:
    """(class or nothing, function) of a module, nested ones with what holds them."""
    for node in tree.body:
        if isinstance(node, ast.FunctionDef):
            yield None, node
        elif isinstance(node, ast.ClassDef):
            yield from ((node.name, inner) for inner in node.body if isinstance(inner, ast.FunctionDef))


@contextmanager
def mutated(module: ModuleType, old: str, new: str) -> Iterator[None]:
    """The module, and all that imported from it, with the functions that an edit changes; and back."""
    assert module.__file__ is not None
    source = Path(module.__file__).read_text()
    assert old in source, f"{module.__name__} no longer holds {old!r}: move the mutant along"
    before = {(c, f.name): ast.dump(f) for c, f in functions(ast.parse(source))}
    changed = [
        (c, f)
        for c, f in functions(ast.parse(source.replace(old, new)))
        if ast.dump(f) != before[c, f.name]
    ]  # fmt: skip
    assert changed, "the edit changes no function"
    undo: list[tuple[Any, str, Any]] = []
    for class_name, node in changed:
        space = dict(vars(module))
        code = "from __future__ import annotations\n" + ast.unparse(node)
        exec(compile(code, module.__file__, "exec"), space)
        made = space[node.name]
        holders: list[Any] = [getattr(module, class_name)] if class_name else _holders(getattr(module, node.name))
        for holder in holders:
            undo.append((holder, node.name, vars(holder)[node.name]))
            setattr(holder, node.name, made)
    try:
        yield
    finally:
        for holder, name, original in reversed(undo):
            setattr(holder, name, original)


def _holders(function: Callable[..., Any]) -> list[ModuleType]:
    ours = [m for name, m in list(sys.modules.items()) if name.startswith("torchrl_ext") and m is not None]
    return [m for m in ours if vars(m).get(function.__name__) is function]


def plain_tests() -> Iterator[Callable[[], None]]:
    """The battery's tests that need neither hypothesis nor fixtures, one for each of their parameters."""
    for module in BATTERY:
        for name, value in vars(module).items():
            if name.startswith("test") and callable(value):
                yield from _expanded(value)
            elif name.startswith("Test"):
                one = value()
                for method in dir(one):
                    if method.startswith("test"):
                        yield from _expanded(getattr(one, method))


def _expanded(test: Callable[..., None]) -> Iterator[Callable[[], None]]:
    marks = [m for m in getattr(test, "pytestmark", []) if m.name == "parametrize"]
    names = [m.args[0] if isinstance(m.args[0], tuple) else (m.args[0],) for m in marks]
    wanted = test.__code__.co_varnames[: test.__code__.co_argcount] if hasattr(test, "__code__") else ()
    given = {n for group in names for n in group} | {"self"}
    if hasattr(test, "hypothesis") or not set(wanted) <= given or test.__name__ in SLOW:
        return
    for picked in itertools.product(*(m.args[1] for m in marks)):
        values: dict[str, Any] = {}
        for group, value in zip(names, picked, strict=True):
            values |= dict(zip(group, value if len(group) > 1 else (value,), strict=True))
        yield lambda values=values: test(**values)  # type: ignore[misc]


def first_failure() -> BaseException | None:
    for test in plain_tests():
        try:
            test()
        except Exception as error:
            return error
        except pytest.fail.Exception as error:  # pytest.raises that saw nothing
            return error
    return None


def test_the_battery_passes_on_the_sources() -> None:
    assert len(list(plain_tests())) > 100
    error = first_failure()
    assert error is None, error


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("module", "old", "new"), cases())
def test_some_test_notices(module: str, old: str, new: str) -> None:
    with mutated(importlib.import_module(module), old, new):
        assert first_failure() is not None, "no test notices this mutant"
