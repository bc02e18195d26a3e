"""The prefix tree of one rollout: what the policy saw and said, each token once.

Invariants:
    1. Concatenating the nodes from the root to a call's end gives exactly the ids the engine saw and sampled.
    2. A response is always a new node: two samples are never merged, even when equal. A prompt shares whatever nodes
       hold its tokens already, and forks where it diverges, in mid-node if need be (the node is split).
    3. The shape does not depend on how calls that extend different histories were interleaved (``prefer`` only chooses
       between paths that hold the same tokens).

Source: ClawGym II (arXiv:2608.16798), section on prefix-tree construction; ``docs/method.md`` section 2.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from clawgym_env.types import FloatArray, Generation, TokenArray

ROOT = 0
_NO_TOKENS: TokenArray = np.empty(0, dtype=np.int64)
_NO_LOG_PROBS: FloatArray = np.empty(0, dtype=np.float32)


@dataclass(slots=True, eq=False)
class Node:
    """A run of tokens without a fork.

    Attributes:
        start: Tokens before this node on its path.
        call: The call that sampled these tokens; ``None`` for prompt and tool output.
        log_probs: Of the sampled tokens; empty otherwise.
        versions: Policy version of each sampled token; empty otherwise.
    """

    parent: int | None
    start: int
    tokens: TokenArray
    call: int | None = None
    log_probs: FloatArray = field(default_factory=lambda: _NO_LOG_PROBS)
    versions: TokenArray = field(default_factory=lambda: _NO_TOKENS)
    children: list[int] = field(default_factory=list)

    @property
    def end(self) -> int:
        """Tokens up to and including this node on its path."""
        return self.start + len(self.tokens)


class PrefixTree:
    """Grows by one call at a time; see the module's invariants."""

    def __init__(self) -> None:
        self.nodes: list[Node] = [Node(None, 0, _NO_TOKENS)]
        self.call_end: dict[int, int] = {}
        self.total_tokens = 0

    @property
    def unique_tokens(self) -> int:
        """Tokens stored, each once."""
        return sum(len(n.tokens) for n in self.nodes)

    def attach(self, call_id: int, prompt_ids: TokenArray, generation: Generation, *, prefer: int | None = None) -> int:
        """Adds one call.

        Args:
            call_id: Unique within the rollout.
            prompt_ids: [P] int64, exactly what the engine was given.
            generation: What it sampled, at least one token.
            prefer: A call whose path is taken where the prompt begins with its history; it saves the walk from the root
                and decides between equal samples.

        Returns:
            The node that holds the response.

        Raises:
            ValueError: an empty prompt or response, or a call id that is in the tree already.
        """
        if len(prompt_ids) == 0 or len(generation.token_ids) == 0:
            raise ValueError("a call needs at least one prompt token and one sampled token")
        if call_id in self.call_end:
            raise ValueError(f"call {call_id} is in the tree already")
        prompt = np.asarray(prompt_ids, dtype=np.int64)
        at, matched = self._longest_prefix(prompt, self._start(prompt, prefer))
        if matched < self.nodes[at].end:
            at = self._split(at, matched)
        if matched < len(prompt):
            at = self._add(Node(at, matched, prompt[matched:].copy()))
        node = Node(
            at,
            len(prompt),
            generation.token_ids.astype(np.int64),
            call_id,
            generation.log_probs.astype(np.float32),
            generation.versions.astype(np.int64),
        )
        end = self._add(node)
        self.call_end[call_id] = end
        self.total_tokens += len(prompt) + len(node.tokens)
        return end

    def path(self, node: int) -> list[int]:
        """Node ids from the first below the root down to ``node``."""
        out = []
        at: int | None = node
        while at is not None and at != ROOT:
            out.append(at)
            at = self.nodes[at].parent
        return out[::-1]

    def path_ids(self, call_id: int) -> TokenArray:
        """Prompt and response of a call, as the engine saw them."""
        parts = [self.nodes[n].tokens for n in self.path(self.call_end[call_id])]
        return np.concatenate(parts)

    def parent_call(self, call_id: int) -> int | None:
        """The latest call whose whole history, response included, this one extends; ``None`` where there is none."""
        at = self.nodes[self.call_end[call_id]].parent
        while at is not None:
            other = self.nodes[at].call
            if other is not None and other != call_id and self.call_end[other] == at:
                return other
            at = self.nodes[at].parent
        return None

    def leaf_calls(self) -> list[int]:
        """Calls that no later call extends, in order of call id."""
        return sorted(c for c, n in self.call_end.items() if not self.nodes[n].children)

    def depth_first(self) -> list[int]:
        """Node ids in depth-first order, children in order of creation, the root left out."""
        out: list[int] = []
        stack = list(reversed(self.nodes[ROOT].children))
        while stack:
            at = stack.pop()
            out.append(at)
            stack.extend(reversed(self.nodes[at].children))
        return out

    def _start(self, prompt: TokenArray, prefer: int | None) -> int:
        """The node to walk from: where the preferred call ends, if the prompt begins with its history."""
        if prefer is None:
            return ROOT
        history = self.path_ids(prefer)
        return self.call_end[prefer] if np.array_equal(prompt[: len(history)], history) else ROOT

    def _longest_prefix(self, prompt: TokenArray, start: int) -> tuple[int, int]:
        """The node at or below ``start`` in which the longest stored prefix ends, and that prefix's length.

        Of several nodes that hold it, the latest is taken.
        """
        best = (self.nodes[start].end, start)
        stack = [start]
        while stack:
            at = stack.pop()
            for child, matched in self._matches(at, prompt):
                best = max(best, (matched, child))
                if matched == self.nodes[child].end and matched < len(prompt):
                    stack.append(child)
        return best[1], best[0]

    def _matches(self, at: int, prompt: TokenArray) -> Iterator[tuple[int, int]]:
        """Children of ``at`` that share a token with the prompt there, and how far the prompt then matches."""
        pos = self.nodes[at].end
        for child in self.nodes[at].children:
            tokens = self.nodes[child].tokens
            if tokens[0] != prompt[pos]:
                continue
            n = min(len(tokens), len(prompt) - pos)
            differ = tokens[:n] != prompt[pos : pos + n]
            yield child, pos + (int(differ.argmax()) if differ.any() else n)

    def _add(self, node: Node) -> int:
        self.nodes.append(node)
        new = len(self.nodes) - 1
        assert node.parent is not None
        self.nodes[node.parent].children.append(new)
        return new

    def _split(self, at: int, depth: int) -> int:
        """Cuts a node so that its upper part ends at ``depth``; the lower part keeps the id (calls end there)."""
        low = self.nodes[at]
        k = depth - low.start
        upper = Node(low.parent, low.start, low.tokens[:k], low.call, low.log_probs[:k], low.versions[:k], [at])
        self.nodes.append(upper)
        new = len(self.nodes) - 1
        assert low.parent is not None
        siblings = self.nodes[low.parent].children
        siblings[siblings.index(at)] = new
        low.parent, low.start = new, depth
        low.tokens, low.log_probs, low.versions = low.tokens[k:], low.log_probs[k:], low.versions[k:]
        return new
