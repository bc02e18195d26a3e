"""How much memory an object keeps alive."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterable
from types import FunctionType, ModuleType

import numpy as np


def reachable(root: object, *, without: Iterable[object] = ()) -> int:
    """Bytes of an object and of all that it keeps alive, code and what is shared with others left out."""
    seen = {id(item) for item in without}
    stack, size = [root], 0
    while stack:
        item = stack.pop()
        if id(item) in seen or isinstance(item, type | ModuleType | FunctionType):
            continue
        seen.add(id(item))
        size += sys.getsizeof(item)
        stack += gc.get_referents(item)
        if isinstance(item, np.ndarray) and item.base is not None:
            stack.append(item.base)
    return size
