"""Generated shell tasks with oracles and verifiers, and an imperfect demonstrator for them."""

from clawgym_env.tasks.builtin.demonstrator import Demonstration, demonstrate
from clawgym_env.tasks.builtin.suite import BuiltinSuite

__all__ = ["BuiltinSuite", "Demonstration", "demonstrate"]
