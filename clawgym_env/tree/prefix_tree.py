"""The prefix tree of one rollout: what the policy saw and said, each token once.

Invariants:
    1. Concatenating the nodes from the root to a call's end gives exactly the ids the engine saw and sampled.
    2. A response is always a new node: two samples are never merged, even when equal. A prompt shares whatever nodes
       hold its tokens already, and forks where it diverges, in mid-node if need be (the node is split).
    3. The shape does not depend on how calls that extend different histories were interleaved (``prefer`` only chooses
       between paths that hold the same tokens).

Every call is compared with the history it goes on from. That is done at the speed of memory: the tokens of a branch lie
side by side, however many nodes they belong to.

Source: ClawGym II (arXiv:2608.16798), section on prefix-tree construction; ``docs/method.md`` section 2.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from clawgym_env.types import FloatArray, Generation, TokenArray

ROOT = 0
_NO_TOKENS: TokenArray = np.empty(0, dtype=np.int64)
_WIDTH = _NO_TOKENS.itemsize
_NO_LOG_PROBS: FloatArray = np.empty(0, dtype=np.float32)


@dataclass(slots=True, eq=False)
class _Branch:
    """Tokens that were added one after the other, each call's to the end of the last one's.

    Attributes:
        above: The node that it goes on from. A node keeps its id and its end when it is split, so this stays true.
        start: Tokens before this branch on its paths.
        ids: The tokens' bytes.
    """

    above: int
    start: int
    ids: bytearray
    _view: TokenArray | None = None

    @property
    def end(self) -> int:
        """Tokens up to and including this branch on its path."""
        return self.start + len(self.ids) // _WIDTH

    @property
    def tokens(self) -> TokenArray:
        """[T] int64, read-only."""
        if self._view is None:
            self._view = np.frombuffer(self.ids, dtype=np.int64)
            self._view.flags.writeable = False
        return self._view

    def append(self, ids: bytes | memoryview) -> None:
        """Adds tokens at the end."""
        self._view = None
        try:
            self.ids += ids
        except BufferError:  # a caller holds a view of these tokens: it keeps what it has
            self.ids = self.ids + ids

    def holds(self, start: int, end: int, prompt: memoryview) -> bool:
        """Whether a prompt agrees with this branch from one depth to another."""
        part = prompt[start * _WIDTH : end * _WIDTH]
        return len(part) == (end - start) * _WIDTH and self.ids.startswith(part, (start - self.start) * _WIDTH)


@dataclass(slots=True, eq=False)
class Node:
    """A run of tokens without a fork.

    Attributes:
        start: Tokens before this node on its path.
        end: Tokens up to and including this node on its path.
        branch: What holds its tokens.
        call: The call that sampled these tokens; ``None`` for prompt and tool output.
        log_probs: Of the sampled tokens; empty otherwise.
        versions: Policy version of each sampled token; empty otherwise.
    """

    parent: int | None
    start: int
    end: int
    branch: _Branch
    children: list[int]
    call: int | None
    log_probs: FloatArray
    versions: TokenArray

    @property
    def tokens(self) -> TokenArray:
        """[T] int64, read-only."""
        return self.branch.tokens[self.start - self.branch.start : self.end - self.branch.start]


class PrefixTree:
    """Grows by one call at a time; see the module's invariants."""

    def __init__(self) -> None:
        self.nodes: list[Node] = [Node(None, 0, 0, _Branch(ROOT, 0, bytearray()), [], None, _NO_LOG_PROBS, _NO_TOKENS)]
        self.call_end: dict[int, int] = {}
        self.total_tokens = 0

    @property
    def unique_tokens(self) -> int:
        """Tokens stored, each once."""
        return sum(n.end - n.start for n in self.nodes)

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
        prompt = np.ascontiguousarray(prompt_ids, dtype=np.int64).data.cast("B")
        size = len(prompt) // _WIDTH
        at, matched = self._longest_prefix(prompt, self._start(prompt, prefer))
        if matched < self.nodes[at].end:
            at = self._split(at, matched)
        if matched < size:
            at = self._add(at, prompt[matched * _WIDTH :])
        end = self._add(
            at,
            np.asarray(generation.token_ids, dtype=np.int64).tobytes(),
            call_id,
            generation.log_probs.astype(np.float32),
            generation.versions.astype(np.int64),
        )
        self.call_end[call_id] = end
        self.total_tokens += self.nodes[end].end
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
        parts = [branch.tokens[: end - branch.start] for branch, end in self._branches(self.call_end[call_id])]
        return np.concatenate(parts[::-1])

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

    def _branches(self, at: int) -> Iterator[tuple[_Branch, int]]:
        """The branches from a node up to the root, and the depth to which the node's path goes along each."""
        while at != ROOT:
            node = self.nodes[at]
            yield node.branch, node.end
            at = node.branch.above

    def _start(self, prompt: memoryview, prefer: int | None) -> int:
        """The node to walk from: where the preferred call ends, if the prompt begins with its history."""
        if prefer is None:
            return ROOT
        end = self.call_end[prefer]
        return end if all(branch.holds(branch.start, to, prompt) for branch, to in self._branches(end)) else ROOT

    def _longest_prefix(self, prompt: memoryview, start: int) -> tuple[int, int]:
        """The node at or below ``start`` in which the longest stored prefix ends, and that prefix's length.

        Of several nodes that hold it, the latest is taken.
        """
        size = len(prompt) // _WIDTH
        best = (self.nodes[start].end, start)
        stack = [start] if best[0] < size else []
        while stack:
            at = stack.pop()
            for child in self.nodes[at].children:
                node = self.nodes[child]
                if node.branch.holds(node.start, node.end, prompt):
                    best = max(best, (node.end, child))
                    if node.end < size:
                        stack.append(child)
                elif shared := _shared(node.tokens, prompt[node.start * _WIDTH :]):
                    best = max(best, (node.start + shared, child))
        return best[1], best[0]

    def _add(
        self,
        parent: int,
        ids: bytes | memoryview,
        call: int | None = None,
        log_probs: FloatArray = _NO_LOG_PROBS,
        versions: TokenArray = _NO_TOKENS,
    ) -> int:
        """A new node below another, in its branch where that ends there too, else in a branch of its own."""
        above = self.nodes[parent]
        branch, start = above.branch, above.end
        if parent == ROOT or start != branch.end:
            branch = _Branch(parent, start, bytearray())
        branch.append(ids)
        self.nodes.append(Node(parent, start, start + len(ids) // _WIDTH, branch, [], call, log_probs, versions))
        new = len(self.nodes) - 1
        above.children.append(new)
        return new

    def _split(self, at: int, depth: int) -> int:
        """Cuts a node so that its upper part ends at ``depth``; the lower part keeps the id (calls end there)."""
        low = self.nodes[at]
        k = depth - low.start
        upper = Node(low.parent, low.start, depth, low.branch, [at], low.call, low.log_probs[:k], low.versions[:k])
        self.nodes.append(upper)
        new = len(self.nodes) - 1
        assert low.parent is not None
        siblings = self.nodes[low.parent].children
        siblings[siblings.index(at)] = new
        low.parent, low.start = new, depth
        low.log_probs, low.versions = low.log_probs[k:], low.versions[k:]
        return new


def _shared(tokens: TokenArray, prompt: memoryview) -> int:
    """How many tokens a node shares with what follows of a prompt."""
    size = min(len(tokens), len(prompt) // _WIDTH)
    ids = np.frombuffer(prompt, np.int64, size)
    if tokens[0] != ids[0]:
        return 0
    differ = tokens[:size] != ids
    return int(differ.argmax()) if differ.any() else size
