"""A trie with one node a token: the simplest structure that finds a longest prefix.

A node is a ``dict`` from token to child, which is the fastest walk that Python has.
"""

from __future__ import annotations

from typing import Any

Node = dict[int, Any]


class TokenTrie:
    """Histories, a node a token."""

    def __init__(self) -> None:
        self.root: Node = {}
        self.unique_tokens = 0

    def attach(self, prompt: list[int], response: list[int]) -> int:
        """Adds a call; returns how many tokens of its prompt were there already."""
        node, matched = self.root, 0
        for token in prompt:
            child = node.get(token)
            if child is None:
                break
            node = child
            matched += 1
        for token in (*prompt[matched:], *response):
            child = node.get(token)
            if child is None:
                child = node[token] = {}
                self.unique_tokens += 1
            node = child
        return matched
