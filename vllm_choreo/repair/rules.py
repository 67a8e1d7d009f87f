# SPDX-License-Identifier: Apache-2.0
"""Rules that choose what is repaired: from the parents of a call to one list of runs for each.

"first:32"                     the first tokens of every parent (EPIC, arXiv 2410.15332, 4.2)
"none"                         no token
"all"                          every token: what mode "exact" gives, where offsets are those of
the text
{"share": 0.15, "by": "random", "seed": 0}   whole blocks at random: the control
{"share": 0.4, "by": "attention"}   whole blocks to which the call's own tokens attend most
{"layers": [8, 20]}            every token, in the layers 8 … 19 alone, from what layer 8 was given
                               when the parent was encoded; [] is "none"
{"layers": [[0, 2], [8, 20]]}  in several ranges of layers
{"reweight": [0.9, 1.0]}       no token: to all parents but the first the call attends at this
                               temperature, and their log-sum-exp counts by temperature times
                               scale (APE, arXiv 2502.05431, 3)
[[(0, 32), (64, 80)], []]      given runs, one list per parent
{"clipped": [[(0, 32)], []]}   the same, of which what lies behind the end of a parent is left out
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean
from typing import Any, NamedTuple, Protocol

from vllm_choreo.errors import RepairError
from vllm_choreo.repair.layers import Range
from vllm_choreo.repair.runs import TokenRanges, as_lists, check_inside, checked_runs, joined
from vllm_choreo.repair.weights import Weights, checked_weights


class Seen(NamedTuple):
    """Tokens `start … stop-1` of the message of one parent, as a call sees them.

    The tokens of a message lie in blocks from its first one on.

    Attributes:
        attention: attention that the call's own tokens give to each of these; None: nobody asked,
            or the call reads the parent as it was encoded.
    """

    start: int
    stop: int
    attention: Sequence[float] | None = None

    @property
    def num_tokens(self) -> int:
        return self.stop - self.start

    def blocks(self, block_size: int) -> list[tuple[int, int]]:
        """Parts of blocks that are seen, as runs that count from `start`."""
        first = self.start - self.start % block_size
        return [
            (max(edge, self.start) - self.start, min(edge + block_size, self.stop) - self.start)
            for edge in range(first, self.stop, block_size)
        ]


class Rule(Protocol):
    """Choice of the runs of tokens that a call encodes anew."""

    def runs(self, parents: Sequence[Seen], block_size: int) -> tuple[TokenRanges, ...]:
        """Runs to encode anew, one list per parent; indices count from the first token seen.

        Raises:
            RepairError: the rule does not fit these parents.
        """
        ...

    def to_json(self) -> Any:
        """Rule as a call gives it."""
        ...


@dataclass(frozen=True)
class GivenRuns:
    """The caller's own choice."""

    given: tuple[TokenRanges, ...]

    def check_count(self, num_parents: int) -> None:
        """Raise RepairError unless there is one list per parent."""
        if len(self.given) != num_parents:
            raise RepairError(
                f"repair holds one list of runs per parent: {num_parents} parents, "
                f"{len(self.given)} lists; an empty list leaves a parent as it is",
                parameter="repair",
                value=self.to_json(),
            )

    def runs(self, parents: Sequence[Seen], block_size: int) -> tuple[TokenRanges, ...]:
        check_inside(self.given, [parent.num_tokens for parent in parents])
        return self.given

    def to_json(self) -> Any:
        return as_lists(self.given)


@dataclass(frozen=True)
class ClippedRuns(GivenRuns):
    """Given runs as far as the call sees their parents, some of which may not be complete yet."""

    def runs(self, parents: Sequence[Seen], block_size: int) -> tuple[TokenRanges, ...]:
        return tuple(
            joined((start, min(stop, parent.num_tokens)) for start, stop in runs)
            for runs, parent in zip(self.given, parents, strict=True)
        )

    def to_json(self) -> Any:
        return {"clipped": as_lists(self.given)}


@dataclass(frozen=True)
class FirstTokens:
    """The first `count` tokens of every parent."""

    count: int

    def runs(self, parents: Sequence[Seen], block_size: int) -> tuple[TokenRanges, ...]:
        return tuple(joined([(0, min(self.count, parent.num_tokens))]) for parent in parents)

    def to_json(self) -> Any:
        return f"first:{self.count}"


@dataclass(frozen=True)
class NoTokens:
    """No token, for a call of a session that has a rule."""

    def runs(self, parents: Sequence[Seen], block_size: int) -> tuple[TokenRanges, ...]:
        return ((),) * len(parents)

    def to_json(self) -> Any:
        return "none"


@dataclass(frozen=True)
class Reweighted(NoTokens):
    """No token; parents behind the first count by other weights, see `Weights`."""

    weights: Weights

    def to_json(self) -> Any:
        return {"reweight": list(self.weights)}


@dataclass(frozen=True)
class AllTokens:
    """Every token."""

    def runs(self, parents: Sequence[Seen], block_size: int) -> tuple[TokenRanges, ...]:
        return tuple(((0, parent.num_tokens),) for parent in parents)

    def to_json(self) -> Any:
        return "all"


@dataclass(frozen=True)
class ByLayers(AllTokens):
    """Every token in ranges of layers (DroidSpeak, arXiv 2411.02820).

    The first layer of a range is given the hidden states that it had when the parent was encoded;
    all other layers are as stored.
    """

    ranges: tuple[Range, ...]

    def to_json(self) -> Any:
        ranges = as_lists([self.ranges])[0]
        return {"layers": ranges[0] if len(ranges) == 1 else ranges}


@dataclass(frozen=True)
class ByAttention:
    """Blocks that get most attention per token, as many of all parents as make up the share.

    Parents of which no attention is known have no part in it.
    """

    share: float

    def runs(self, parents: Sequence[Seen], block_size: int) -> tuple[TokenRanges, ...]:
        blocks = [
            (-fmean(parent.attention[slice(*run)]), number, run)
            for number, parent in enumerate(parents)
            if parent.attention is not None
            for run in parent.blocks(block_size)
        ]
        ranked = [(number, run) for _, number, run in sorted(blocks)]
        return chosen_blocks(ranked, self.share, len(parents))

    def to_json(self) -> Any:
        return {"share": self.share, "by": "attention"}


@dataclass(frozen=True)
class RandomBlocks:
    """Blocks at random, of all parents together as many as make up the share."""

    share: float
    seed: int

    def runs(self, parents: Sequence[Seen], block_size: int) -> tuple[TokenRanges, ...]:
        blocks = [
            (number, run)
            for number, parent in enumerate(parents)
            for run in parent.blocks(block_size)
        ]
        random.Random(self.seed).shuffle(blocks)
        return chosen_blocks(blocks, self.share, len(parents))

    def to_json(self) -> Any:
        return {"share": self.share, "by": "random", "seed": self.seed}


def chosen_blocks(
    ranked: Sequence[tuple[int, tuple[int, int]]], share: float, num_parents: int
) -> tuple[TokenRanges, ...]:
    """Best blocks whose tokens together are at most the share of all tokens.

    Args:
        ranked: all blocks, `(number of the parent, run)`, the best first.
    """
    budget = share * sum(stop - start for _, (start, stop) in ranked)
    chosen: list[list[tuple[int, int]]] = [[] for _ in range(num_parents)]
    for number, (start, stop) in ranked:
        if stop - start <= budget:
            budget -= stop - start
            chosen[number].append((start, stop))
    return tuple(joined(runs) for runs in chosen)


# -- from what a call gives ----------------------------------------------------------------------

_PLAIN: dict[str, type[NoTokens] | type[AllTokens]] = {"none": NoTokens, "all": AllTokens}


def rule_of(given: Any) -> Rule:
    """Rule that a call gives as text, as an object, or as lists of runs.

    Raises:
        RepairError: none of these.
    """
    if isinstance(given, str):
        return _named(given)
    if isinstance(given, Mapping):
        if [*given] == ["layers"]:
            return _layered(given["layers"])
        if [*given] == ["reweight"]:
            return Reweighted(checked_weights(given["reweight"]))
        is_clipped = [*given] == ["clipped"]
        return ClippedRuns(checked_runs(given["clipped"])) if is_clipped else _shared(given)
    return GivenRuns(checked_runs(given))


def rule_given(text: str) -> Any:
    """Read a rule from text: its name, or the JSON of an object or of lists of runs.

    Returns:
        What `repair=` takes.

    Raises:
        RepairError: it is neither.
    """
    given: Any = text
    if text.startswith(("[", "{")):
        try:
            given = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise RepairError(
                f"this is no JSON: {error}", parameter="repair", value=text
            ) from error
    return rule_of(given).to_json()


def rule_text(given: Any) -> str:
    """Write a rule, as `repair=` takes it, as the text that `rule_given` reads."""
    return given if isinstance(given, str) else json.dumps(given)


def _named(text: str) -> Rule:
    if text in _PLAIN:
        return _PLAIN[text]()
    name, _, count = text.partition(":")
    if name != "first" or not count.isascii() or not count.isdigit() or int(count) < 1:
        raise RepairError(
            'a rule is "first:K" with K >= 1, "all", "none", '
            '{"share": ..., "by": ...}, or one list of runs per parent',
            parameter="repair",
            value=text,
        )
    return FirstTokens(int(count))


def _layered(given: Any) -> Rule:
    if _is_list(given) and not given:
        return NoTokens()
    ranges = given if _is_list(given) and all(map(_is_list, given)) else [given]
    if not all(map(_is_range, ranges)) or any(
        stop >= first for (_, stop), (first, _) in pairwise(ranges)
    ):
        raise RepairError(
            "layers are (first, stop) with 0 <= first < stop, or a list of these, ascending and "
            "with a layer between two of them at least, or () for none",
            parameter="repair.layers",
            value=given,
        )
    return ByLayers(tuple((first, stop) for first, stop in ranges))


def _is_list(given: Any) -> bool:
    return isinstance(given, Sequence) and not isinstance(given, str)


def _is_range(given: Any) -> bool:
    is_pair = _is_list(given) and len(given) == 2 and all(type(end) is int for end in given)
    return is_pair and 0 <= given[0] < given[1]


def _shared(given: Mapping[str, Any]) -> Rule:
    share, by, seed = given.get("share"), given.get("by"), given.get("seed", 0)
    unknown = given.keys() - {"share", "by", "seed"}
    if unknown or by not in ("random", "attention") or type(seed) is not int:
        raise RepairError(
            'a share is chosen by {"share": 0.4, "by": "attention"}, or for comparison by '
            '{"share": 0.4, "by": "random", "seed": 0}',
            parameter="repair",
            value=dict(given),
        )
    if isinstance(share, bool) or not isinstance(share, (int, float)) or not 0 <= share <= 1:
        raise RepairError(
            "a budget is a share of the parents' tokens, from 0 to 1",
            parameter="repair.share",
            value=share,
        )
    return ByAttention(float(share)) if by == "attention" else RandomBlocks(float(share), seed)
