# SPDX-License-Identifier: Apache-2.0
"""Rules that choose what is repaired: from the parents of a call to one list of runs for each.

A rule is an object whose `by` says which one it is; short forms of it: `repair.short_forms`.

{"by": "first", "count": 32}   the first tokens of every parent (EPIC, arXiv 2410.15332, 4.2)
{"by": "none"}                 no token
{"by": "all"}                  every token: what mode "exact" gives, where offsets are those of
                               the text
{"by": "random", "share": 0.15, "seed": 0}   whole blocks at random: the control
{"by": "attention", "share": 0.4}   whole blocks to which the call's own tokens attend most
{"by": "layers", "layers": [[0, 2], [8, 20]]}   every token, in the layers 0, 1 and 8 … 19 alone;
                               from what layer 8 was given when the parent was encoded
{"by": "reweight", "reweight": [0.9, 1.0]}   no token: to all parents but the first the call attends
                               at this temperature, and their log-sum-exp counts by temperature
                               times scale (APE, arXiv 2502.05431, 3)
{"by": "runs", "runs": [[[0, 32], [64, 80]], []]}   given runs, one list per parent
{"by": "clipped", "runs": [[[0, 32]], []]}   the same, of which what lies behind the end of a parent
                               is left out
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from statistics import fmean
from typing import Annotated, Any, ClassVar, NamedTuple

from msgspec import Meta, Struct, structs, to_builtins

from vllm_choreo.convert import convert
from vllm_choreo.errors import RepairError
from vllm_choreo.repair.layers import LayerList, check_ranges
from vllm_choreo.repair.runs import TokenRanges, check_inside, checked_runs, merge_ranges
from vllm_choreo.repair.short_forms import tagged
from vllm_choreo.repair.weights import ADVICE, Weights

RULES = (
    'a rule is "first:K" with K >= 1, "all", "none", {"share": ..., "by": ...}, {"layers": ...}, '
    '{"reweight": ...}, or one list of runs per parent'
)
_RUNS = (
    "runs are given as one list per parent, [[(start, stop), ...], ...]; a run is (start, stop) "
    "with 0 <= start < stop, in tokens of its parent"
)
_SHARES = (
    'a share is chosen by {"share": 0.4, "by": "attention"}, or for comparison by '
    '{"share": 0.4, "by": "random", "seed": 0}'
)
Share = Annotated[
    float,
    Meta(ge=0, le=1, description="a budget is a share of the parents' tokens, from 0 to 1"),
]


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


class Rule(Struct, frozen=True, tag_field="by", forbid_unknown_fields=True):
    """Choice of the runs of tokens that a call encodes anew."""

    def runs(self, parents: Sequence[Seen], block_size: int) -> tuple[TokenRanges, ...]:
        """Runs to encode anew, one list per parent; indices count from the first token seen.

        Raises:
            RepairError: the rule does not fit these parents.
        """
        raise NotImplementedError

    def to_json(self) -> dict[str, Any]:
        """Rule as plain data, with its tag."""
        data: dict[str, Any] = to_builtins(self)
        return data


class GivenRuns(Rule, frozen=True, tag="runs", rename={"given": "runs"}):
    """The caller's own choice."""

    given: Annotated[tuple[TokenRanges, ...], Meta(description=_RUNS)]

    def __post_init__(self) -> None:
        structs.force_setattr(self, "given", checked_runs(self.given))

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


class ClippedRuns(GivenRuns, frozen=True, tag="clipped"):
    """Given runs as far as the call sees their parents, some of which may not be complete yet."""

    def runs(self, parents: Sequence[Seen], block_size: int) -> tuple[TokenRanges, ...]:
        return tuple(
            merge_ranges((start, min(stop, parent.num_tokens)) for start, stop in runs)
            for runs, parent in zip(self.given, parents, strict=True)
        )


class FirstTokens(Rule, frozen=True, tag="first"):
    """The first `count` tokens of every parent."""

    count: Annotated[int, Meta(ge=1, description=RULES)]

    def runs(self, parents: Sequence[Seen], block_size: int) -> tuple[TokenRanges, ...]:
        return tuple(merge_ranges([(0, min(self.count, parent.num_tokens))]) for parent in parents)


class NoTokens(Rule, frozen=True, tag="none"):
    """No token, for a call of a session that has a rule."""

    def runs(self, parents: Sequence[Seen], block_size: int) -> tuple[TokenRanges, ...]:
        return ((),) * len(parents)


class Reweighted(NoTokens, frozen=True, tag="reweight", rename={"weights": "reweight"}):
    """No token; parents behind the first count by other weights, see `Weights`."""

    weights: Annotated[Weights, Meta(description=ADVICE)]


class AllTokens(Rule, frozen=True, tag="all"):
    """Every token."""

    def runs(self, parents: Sequence[Seen], block_size: int) -> tuple[TokenRanges, ...]:
        return tuple(((0, parent.num_tokens),) for parent in parents)


class ByLayers(AllTokens, frozen=True, tag="layers", rename={"ranges": "layers"}):
    """Every token in ranges of layers (DroidSpeak, arXiv 2411.02820).

    The first layer of a range is given the hidden states that it had when the parent was encoded;
    all other layers are as stored.
    """

    ranges: LayerList

    def __post_init__(self) -> None:
        check_ranges(self.ranges)


class ByAttention(Rule, frozen=True, tag="attention"):
    """Blocks that get most attention per token, as many of all parents as make up the share.

    Parents of which no attention is known have no part in it.
    """

    advice: ClassVar[str] = _SHARES
    share: Share

    def runs(self, parents: Sequence[Seen], block_size: int) -> tuple[TokenRanges, ...]:
        blocks = [
            (-fmean(parent.attention[slice(*run)]), number, run)
            for number, parent in enumerate(parents)
            if parent.attention is not None
            for run in parent.blocks(block_size)
        ]
        ranked = [(number, run) for _, number, run in sorted(blocks)]
        return chosen_blocks(ranked, self.share, len(parents))


class RandomBlocks(Rule, frozen=True, tag="random"):
    """Blocks at random, of all parents together as many as make up the share."""

    advice: ClassVar[str] = _SHARES
    share: Share
    seed: int = 0

    def runs(self, parents: Sequence[Seen], block_size: int) -> tuple[TokenRanges, ...]:
        blocks = [
            (number, run)
            for number, parent in enumerate(parents)
            for run in parent.blocks(block_size)
        ]
        random.Random(self.seed).shuffle(blocks)
        return chosen_blocks(blocks, self.share, len(parents))


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
    return tuple(merge_ranges(runs) for runs in chosen)


# -- from what a call gives ----------------------------------------------------------------------

CallRule = (
    GivenRuns | ClippedRuns | FirstTokens | NoTokens | Reweighted | AllTokens | ByLayers
    | ByAttention | RandomBlocks
)  # fmt: skip


def rule_of(given: object) -> CallRule:
    """Rule that a call gives, with its tag or in a short form.

    Raises:
        RepairError: it gives none.
    """
    form = Annotated[CallRule, Meta(description=RULES)]
    rule: CallRule = convert(tagged(given), form, "repair", RepairError)
    return rule


def rule_given(text: str) -> str | dict[str, Any] | list[Any]:
    """Read a rule from text: its name, or the JSON of an object or of lists of runs.

    Returns:
        What `repair=` takes.

    Raises:
        RepairError: it is neither.
    """
    given: str | dict[str, Any] | list[Any] = text
    if text.startswith(("[", "{")):
        try:
            given = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise RepairError(
                f"this is no JSON: {error}", parameter="repair", value=text
            ) from error
    rule_of(given)
    return given


def rule_text(given: object) -> str:
    """Write a rule, as `repair=` takes it, as the text that `rule_given` reads."""
    return given if isinstance(given, str) else json.dumps(given)
