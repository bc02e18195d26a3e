"""A radix tree of token lists, after the idea of SGLang's RadixAttention (arXiv:2312.07104, section 3).

An edge holds a run of tokens; children are found by their first token; a node is split where a sequence leaves it;
every visit renews the access time that an engine's eviction goes by. Two equal samples share their nodes, as they would
share their KV cache. Runs are compared as whole lists first, and token by token only where they differ: the fast way to
do it in Python.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field


@dataclass(slots=True, eq=False)
class Node:
    """A run of tokens without a fork."""

    key: list[int]
    parent: Node | None
    children: dict[int, Node] = field(default_factory=dict)
    last_access: float = 0.0


class RadixTree:
    """Histories as runs of tokens."""

    def __init__(self) -> None:
        self.root = Node([], None)
        self.unique_tokens = 0

    def attach(self, prompt: list[int], response: list[int]) -> int:
        """Adds a call; returns how many tokens of its prompt were there already."""
        node, matched = self._walk(self.root, prompt)
        node = self._insert(node, prompt[matched:])
        below, shared = self._walk(node, response)
        self._insert(below, response[shared:])
        return matched

    def _walk(self, node: Node, ids: list[int]) -> tuple[Node, int]:
        """Follows ids down from a node as far as they go; splits the last node where they end inside it."""
        now, at = time.monotonic(), 0
        node.last_access = now
        while at < len(ids) and (child := node.children.get(ids[at])) is not None:
            child.last_access = now
            shared = _shared(child.key, ids, at)
            at += shared
            if shared < len(child.key):
                return self._split(child, shared), at
            node = child
        return node, at

    def _insert(self, parent: Node, ids: list[int]) -> Node:
        if not ids:
            return parent
        child = Node(ids, parent, last_access=time.monotonic())
        parent.children[ids[0]] = child
        self.unique_tokens += len(ids)
        return child

    def _split(self, low: Node, size: int) -> Node:
        assert low.parent is not None
        upper = Node(low.key[:size], low.parent, {low.key[size]: low}, low.last_access)
        low.parent.children[low.key[0]] = upper
        low.key, low.parent = low.key[size:], upper
        return upper


def _shared(key: list[int], ids: list[int], at: int) -> int:
    """How many tokens a key shares with ids from a position on."""
    size = min(len(key), len(ids) - at)
    part = ids[at : at + size]
    if size == len(key) and part == key:
        return size
    for k, (a, b) in enumerate(zip(key, part, strict=False)):
        if a != b:
            return k
    return size
