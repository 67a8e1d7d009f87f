# SPDX-License-Identifier: Apache-2.0
"""Templated radix tree: which prompts begin alike, though parts of them are not known yet.

    root ── "You are a critic. " ──┬── "Be brief." ── <answer of op 3> ── leaf 5
                                   └── "Be strict." ── leaf 4

A prompt is a sequence of symbols: text, or the number of a value to be filled in. Two prompts share
a node where their text is the same, word by word, or where the same value is filled in (Helium,
appendix A). Weights are tokens.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence

from vllm_choreo.planner.physical.profile import estimated_tokens

Symbol = str | int

_WORDS = re.compile(r"\s*\S+|\s+")


class TreeNode:
    """A segment of prompts.

    Attributes:
        parent: the segment before; None at the root.
        symbol: its text, or the number of the value that is filled in.
        weight: its tokens.
        depth: number of nodes above it.
        children: segments behind it, by their first word, or number.
        leaves: prompts that end here.
        num_leaves: prompts that begin with the path to this node.
    """

    __slots__ = ("children", "depth", "leaves", "num_leaves", "parent", "symbol", "weight")

    def __init__(self, parent: TreeNode | None, symbol: Symbol, weight: float) -> None:
        self.parent = parent
        self.symbol = symbol
        self.weight = weight
        self.depth: int = parent.depth + 1 if parent else 0
        self.children: dict[Symbol, TreeNode] = {}
        self.leaves: list[int] = []
        self.num_leaves = 0

    @property
    def is_static(self) -> bool:
        """True if all text up to here is known."""
        return all(isinstance(node.symbol, str) for node in self.path())

    def path(self) -> list[TreeNode]:
        """Nodes from below the root to this one."""
        path: list[TreeNode] = []
        node: TreeNode | None = self
        while node is not None and node.parent is not None:
            path.append(node)
            node = node.parent
        return path[::-1]

    def text(self) -> str:
        """Text of a static path."""
        return "".join(str(node.symbol) for node in self.path())


class TemplatedRadixTree:
    """A tree whose leaves are prompts.

    Args:
        weigh: estimates the tokens of a value that is filled in, by its number.
        tokens: estimates the tokens of a text.
    """

    def __init__(
        self,
        weigh: Callable[[int], float] = lambda number: 0.0,
        tokens: Callable[[str], float] = estimated_tokens,
    ) -> None:
        self.root = TreeNode(None, "", 0.0)
        self.end: dict[int, TreeNode] = {}
        self._weigh = weigh
        self._tokens = tokens

    def add(self, leaf: int, symbols: Sequence[Symbol]) -> None:
        """Insert a prompt; `leaf` is its number."""
        node = self.root
        node.num_leaves += 1
        for symbol in symbols:
            if symbol == "":
                continue
            rest: Symbol | None = symbol
            while rest is not None:
                node, rest = self._step(node, rest)
                node.num_leaves += 1
        node.leaves.append(leaf)
        self.end[leaf] = node

    def nodes(self) -> Iterator[TreeNode]:
        """Yield all nodes but the root, each after the one above it."""
        stack = list(self.root.children.values())[::-1]
        while stack:
            node = stack.pop()
            yield node
            stack += list(node.children.values())[::-1]

    def total(self, leaf: int) -> float:
        """Tokens of a prompt."""
        return sum(node.weight for node in self.end[leaf].path())

    def new_tokens(self, before: int | None, leaf: int) -> float:
        """Tokens of a prompt that do not lie on the path of the one before: `u_p` of the paper."""
        if before is None:
            return self.total(leaf)
        low, high = self.end[leaf], self.end[before]
        new = 0.0
        while low.depth > high.depth:
            new += low.weight
            low = low.parent  # type: ignore[assignment]
        while high.depth > low.depth:
            high = high.parent  # type: ignore[assignment]
        while low is not high:
            new += low.weight
            low, high = low.parent, high.parent  # type: ignore[assignment]
        return new

    def _step(self, node: TreeNode, symbol: Symbol) -> tuple[TreeNode, Symbol | None]:
        """Go one node down, and make it if need be; return it and the rest of the symbol."""
        if isinstance(symbol, int):
            child = node.children.get(symbol)
            if child is None:
                child = TreeNode(node, symbol, self._weigh(symbol))
                node.children[symbol] = child
            return child, None
        first = _first_word(symbol)
        child = node.children.get(first)
        if child is None:
            child = node.children[first] = TreeNode(node, symbol, self._tokens(symbol))
            return child, None
        assert isinstance(child.symbol, str)
        common = _common(child.symbol, symbol)
        if common < len(child.symbol):
            child = self._split(child, first, common)
        return child, symbol[common:] or None

    def _split(self, lower: TreeNode, first: str, length: int) -> TreeNode:
        """Cut a node after `length` characters; return the new node above it."""
        assert lower.parent is not None and isinstance(lower.symbol, str)
        head, tail = lower.symbol[:length], lower.symbol[length:]
        upper = TreeNode(lower.parent, head, self._tokens(head))
        upper.num_leaves = lower.num_leaves
        lower.parent.children[first] = upper
        upper.children[_first_word(tail)] = lower
        lower.parent, lower.symbol, lower.weight = upper, tail, self._tokens(tail)
        stack = [lower]
        while stack:
            node = stack.pop()
            node.depth += 1
            stack += node.children.values()
        return upper


def _first_word(text: str) -> str:
    match = _WORDS.match(text)
    return match.group() if match else text


def _common(left: str, right: str) -> int:
    """Characters of the words, at least one, that both texts begin with."""
    if left == right[: len(left)] and _ends_word(left, right):
        return len(left)
    length = 0
    words = zip(_WORDS.finditer(left), _WORDS.finditer(right), strict=False)
    for one, other in words:
        if one.group() != other.group():
            break
        length = one.end()
    return length


def _ends_word(left: str, right: str) -> bool:
    """Return whether `left`, with which `right` begins, ends at a word's end there."""
    return len(left) == len(right) or right[len(left)].isspace()
