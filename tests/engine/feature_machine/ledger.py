# SPDX-License-Identifier: Apache-2.0
"""What a program has made, and which refusals the definition allows. No torch, no vllm.

Names, lengths, places and histories are followed by the rules of `docs/design.md`, not by the
engine's code. Of each call two sets of errors are known in the end: those of which it *must* get
one, if there are any, and those that it *may* get besides.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import Any

from tests.engine.feature_machine.program import TENANTS, Call, Read
from tests.engine.feature_machine.shown import Shown, has_pictures
from vllm_choreo.repair.rules import ByAttention, ByLayers, Reweighted, Rule, Seen, rule_of

NUM_LAYERS = 3  # of the tiny models


@dataclass(frozen=True)
class Limits:
    """What of an engine decides whether a call fits.

    Attributes:
        num_blocks: that can be given away.
        hidden_bytes: for hidden states; 0: it keeps none.
        row_bytes: of a token in a layer.
        min_run_tokens: that a repaired run needs.
        block_size: tokens of a block.
        cuts_parents: whether a repaired parent is read in two, encoded once more for that.
        num_held_pictures: pictures for which there is memory, of all tenants; None: for all.
    """

    num_blocks: int
    max_model_len: int
    hidden_bytes: int
    row_bytes: int
    min_run_tokens: int
    block_size: int
    cuts_parents: bool = False
    num_held_pictures: int | None = None

    def blocks_of(self, num_tokens: int) -> int:
        """Blocks that so many tokens take."""
        return -(-num_tokens // self.block_size)


@dataclass(eq=False)
class Made:
    """A message, or what will be one.

    Attributes:
        id: of the message, in the engine.
        parents: what its call lists, where the session had it.
        header: its call's own tokens, those of its pictures among them.
        tokens: once they are known.
        state: "running"; "open": generated, but the client has not told where it ends; "made";
            "failed".
        error: type of the error with which its call ended.
        is_aborted: the client went away.
        has_no_end: it was given up before the client had told where it ends.
        history, text_history: ids of what its encoding, or its tokens, carry traces of.
        must, may: errors, by type.
        source: for a loaded one, what was saved.
        siblings: what was loaded with it, by what was saved.
        has_data: it was loaded with keys and values.
        is_given: these came from somebody who is not trusted.
        spans: once all parents are known: `(start, stop, offset)` of each.
        lengths: positions that each of them takes.
        position: of its first token.
        links: what it reads for its parents: messages as they were made, or copies of them.
        encoded: what the oracle says; None: nobody can tell.
    """

    call: Call
    id: str
    header: tuple[int, ...]
    parents: list[tuple[Made, Read]] = field(default_factory=list)
    tokens: tuple[int, ...] | None = None
    state: str = "running"
    error: str | None = None
    is_aborted: bool = False
    freed: bool = False
    has_no_end: bool = False
    history: frozenset[str] = frozenset()
    text_history: frozenset[str] = frozenset()
    must: set[str] = field(default_factory=set)
    may: set[str] = field(default_factory=set)
    source: Made | None = None
    siblings: Mapping[Made, Made] = field(default_factory=dict, repr=False)
    has_data: bool = False
    is_given: bool = False
    spans: list[tuple[int, int, int]] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    position: int = 0
    links: list[tuple[Any, int, int]] = field(default_factory=list, repr=False)
    encoded: Any = field(default=None, repr=False)
    answer: Any = field(default=None, repr=False)

    @property
    def is_decode(self) -> bool:
        return self.call.generate > 0

    @property
    def is_untrusted(self) -> bool:
        """It was given, or was made of what was."""
        return self.is_given or any(_is_untrusted(link) for link in self.links)

    @property
    def most_tokens(self) -> int:
        return len(self.tokens) if self.tokens else len(self.header) + self.call.generate

    @property
    def rule(self) -> Rule | None:
        return None if self.call.repair is None else rule_of(self.call.repair)


def _has_failed(made: Made) -> bool:
    """Whether a call fails, of which that may not have been told yet: what it reads has failed."""
    lost = made.state == "failed" or made.is_aborted
    return lost or any(_has_failed(parent) for parent, _ in made.parents)


class Ledger:
    """The messages of a program, by name.

    Args:
        shown: tokens of their pictures.

    Attributes:
        made: all that ever were, in order.
    """

    def __init__(self, limits: Limits, shown: Shown) -> None:
        self.limits = limits
        self._shown = shown
        self.made: list[Made] = []
        self._names: dict[str, dict[str, Made]] = {session: {} for session in TENANTS}

    # -- names -----------------------------------------------------------------------------

    def find(self, session: str, name: str) -> Made | None:
        return self._names[session].get(name)

    def of_session(self, session: str) -> dict[str, Made]:
        return dict(self._names[session])

    def enter(self, made: Made) -> None:
        """It has its name from now on."""
        self._names[made.call.session][made.call.name] = made

    def free(self, session: str, names: Iterable[str]) -> None:
        for name in names:
            if made := self._names[session].pop(name, None):
                made.freed = True
                # Nobody can tell any more where it ends.
                made.has_no_end = bool(made.call.stop) and made.state in ("running", "open")

    def open(self, call: Call) -> Made:
        """A call arrives; what is wrong at once is in `must`."""
        made = Made(call, f"{call.session}/{call.name}", self._shown.tokens_of(call))
        self.made.append(made)
        self._link(made)
        existing = self.find(call.session, call.name)
        if existing is not None and existing.state != "failed":
            made.must.add("NameTakenError")
        denied = {f"{call.session}/{name}" for name in call.deny}
        if denied & made.history:
            # Of what failed, the engine knows no more than its name.
            failed = {parent for parent, _ in made.parents if _has_failed(parent)}
            of_failed = set[str]().union(*(p.history | p.text_history for p in failed))
            is_certain = denied & (made.history - of_failed)
            (made.must if is_certain else made.may).add("DeniedMessageError")
        if call.keep:
            self._check_hidden(made)
        if call.pictures and self.may_fill_picture_memory():
            made.may.add("LimitError")
        if not call.generate:
            made.tokens = made.header
        return made

    def load(
        self, sources: Mapping[str, Made], session: str, given: Set[str], *, is_foreign: bool
    ) -> list[Made]:
        """Messages that were saved come as new ones, of these names; they have none yet.

        Args:
            given: names of those that come with keys and values.
            is_foreign: from somebody who is not trusted.
        """
        ids = {made.id: f"{session}/{name}" for name, made in sources.items()}
        siblings: dict[Made, Made] = {}
        for name, source in sources.items():
            call = replace(source.call, session=session, name=name)
            made = Made(call, ids[source.id], source.header)
            made.source, made.siblings, made.state = source, siblings, "loading"
            made.tokens, made.parents = source.tokens, source.parents
            made.has_data = name in given
            made.is_given = made.has_data and is_foreign
            made.history = frozenset(ids.get(one, one) for one in source.history)
            made.text_history = frozenset(ids.get(one, one) for one in source.text_history)
            siblings[source] = made
            self.made.append(made)
        return list(siblings.values())

    def _link(self, made: Made) -> None:
        call, histories = made.call, set()
        for read in call.reads:
            parent = self.find(call.session, read.name)
            if read.name == call.name:
                made.must.add("CyclicParentsError")
            if parent is None:
                made.must.add("UnknownMessageError")
                continue
            made.parents.append((parent, read))
            histories |= {parent.id} | (parent.text_history if call.exact else parent.history)
        if call.copy_of is not None:
            origin = self.find(call.session, call.copy_of)
            if origin is None:
                made.must.add("UnknownMessageError")
            else:
                made.text_history = frozenset({origin.id}) | origin.text_history
                if has_pictures(made.header) or has_pictures(origin.header):
                    # It has the pictures of what it copies, all of which is named by its tokens.
                    made.must.add("UnsupportedOptionError")
        made.history = frozenset(histories) | made.text_history

    def _check_hidden(self, made: Made) -> None:
        limits = self.limits
        if not limits.hidden_bytes:
            made.must.add("UnsupportedOptionError")
            return
        if max(made.call.keep) >= NUM_LAYERS:
            made.must.add("ChoreoError")
        if self.may_fill_hidden_memory():
            made.may.add("LimitError")

    def _cuts_rows(self, tokens: Sequence[int], start: int, stop: int) -> bool:
        """Whether a part of a message has positions that its tokens do not tell."""
        if not self._shown.has_rows or stop - start == len(tokens):
            return False
        return has_pictures(tokens[:stop])

    def _shows_what_is_not_repaired(self, made: Made) -> bool:
        """Whether there are pictures in the call, or its parents, that its rule cannot do with."""
        if made.rule is None:
            return False
        involved = (made.header, *(parent.header for parent, _ in made.parents))
        is_staged = isinstance(made.rule, (ByAttention, ByLayers))
        return (is_staged or self._shown.has_rows) and any(map(has_pictures, involved))

    def may_fill_hidden_memory(self) -> bool:
        """Whether there is too little for all that ever kept some, as if nothing had been freed."""
        kept = [other for other in self.made if other.call.keep]
        return sum(map(self.hidden_bytes_of, kept)) > self.limits.hidden_bytes

    def shows_pictures(self, chosen: Iterable[Made]) -> bool:
        """Whether messages have pictures, or were made behind any that have."""
        needed = (one for made in chosen for one in (made, *ancestors(made)))
        return any(has_pictures(one.header) for one in needed)

    def may_fill_picture_memory(self) -> bool:
        """Whether there is too little for all pictures ever shown, as if nothing was given up."""
        shown = {(TENANTS[m.call.session], n) for m in self.made for _, n in m.call.pictures}
        most = self.limits.num_held_pictures
        return most is not None and len(shown) > most

    def may_lack_hidden_states(self, made: Made) -> bool:
        """Whether it may take hidden states of what was given up, for which there is no room.

        Whatever else is encoded again has kept its room.
        """
        needed = {made, *ancestors(made)}
        by_layers = [one for one in needed if isinstance(one.rule, ByLayers)]
        entered = {
            parent
            for one in by_layers
            for parent, _ in one.parents
            if any(first and first in parent.call.keep for first, _ in one.rule.ranges)
        }
        # What came with a load is there under no name, unless that was loaded, too.
        is_loaded = any(one.source is not None for one in needed)
        is_lost = any(is_loaded or one.freed or one.state == "failed" for one in entered)
        return is_lost and self.may_fill_hidden_memory()

    def hidden_bytes_of(self, made: Made) -> int:
        tokens = min(made.most_tokens, self.limits.max_model_len)
        limits = self.limits
        rows = limits.blocks_of(tokens) * limits.block_size
        return rows * limits.row_bytes * len(made.call.keep)

    # -- lengths and places ----------------------------------------------------------------

    def resolve(self, made: Made) -> bool:
        """Decide places and what else is wrong, once everything has ended.

        Returns:
            Whether its parents have tokens.
        """
        if made.source is not None:
            source = made.source
            made.spans, made.lengths = source.spans, source.lengths
            made.position = source.position
            made.is_given |= made.has_data and source.is_untrusted
            # Whatever else came with it is there under no name.
            made.links = [
                (made.siblings.get(of) if isinstance(of, Made) else None, start, stop)
                for of, start, stop in source.links
            ]
            return True
        failed = [p for p, _ in made.parents if p.state == "failed" or p.has_no_end]
        if failed:
            made.may.add("ParentFailedError")
        if any(parent.has_no_end or _never_was(parent) for parent in failed):
            made.must.add("ParentFailedError")
        if len(made.parents) < len(made.call.reads):
            return False
        if any(parent.tokens is None for parent, _ in made.parents):
            return False
        end = 0
        for parent, read in made.parents:
            assert parent.tokens is not None
            start = 0 if read.start is None else read.start
            stop = len(parent.tokens) if read.stop is None else read.stop
            if not 0 <= start < stop <= len(parent.tokens):
                made.must.add("SpanError")
                if isinstance(made.rule, (ByAttention, ByLayers)) and not self.limits.hidden_bytes:
                    made.may.add("UnsupportedOptionError")
                if self._shows_what_is_not_repaired(made):
                    made.may.add("RepairError")
                return False
            if self._cuts_rows(parent.tokens, start, stop):
                made.must.add("SpanError")
                return False
            offset = end if read.offset is None else read.offset
            part = parent.tokens[start:stop]
            made.spans.append((start, stop, offset))
            made.lengths.append(self._shown.num_positions(part))
            end = offset + made.lengths[-1]
        made.position = end if made.call.new_offset is None else made.call.new_offset
        self._check_places(made)
        self._check_repair(made)
        self.link(made, self._runs(made))
        if self._may_fill_the_pool(made):
            made.may.add("PoolFullError")
        if self.may_lack_hidden_states(made):
            made.may.add("LimitError")
        return True

    def _check_places(self, made: Made) -> None:
        limits, spans = self.limits, made.spans
        if made.call.exact and not _is_text(made):
            made.must.add("OffsetError")
        if made.call.exact:
            spans = [(0, stop - start, offset) for start, stop, offset in spans]
        size = limits.block_size
        base = size * sum(limits.blocks_of(stop) - start // size for start, stop, _ in spans)
        # One slot is for the token that vLLM samples; the last generated one takes another.
        rooms = {1, 2} if made.is_decode else {1}
        for room in rooms:
            errors = made.must if room == min(rooms) else made.may
            own = len(made.header) + room
            if base + own > limits.max_model_len:
                errors.add("TooLongError")
            if made.position + own > limits.max_model_len:
                errors.add("OffsetError")
        if any(offset + stop - start > limits.max_model_len for start, stop, offset in spans):
            made.must.add("OffsetError")
        if limits.cuts_parents and made.rule is not None:
            # Each takes a block more, so does the rest of each behind what its message read.
            own = len(made.header) + max(rooms)
            behind = [(p.spans, p.most_tokens + 1) for p, _ in made.parents]
            for read, count in [(spans, own), *behind]:
                blocks = sum(limits.blocks_of(stop) + 1 for _, stop, _ in read) + 1
                if size * blocks + count > limits.max_model_len:
                    made.may.add("TooLongError")

    def _check_repair(self, made: Made) -> None:
        rule, limits = made.rule, self.limits
        if rule is None:
            return
        is_staged = isinstance(rule, (ByAttention, ByLayers))
        if self._shows_what_is_not_repaired(made):
            made.must.add("RepairError")
            return
        if is_staged and not limits.hidden_bytes:
            made.must.add("UnsupportedOptionError")
            return
        if isinstance(rule, ByLayers):
            if rule.ranges[-1][1] > NUM_LAYERS:
                made.must.add("RepairError")
            return
        if isinstance(rule, ByAttention):
            if limits.min_run_tokens > 1:
                made.may.add("RepairError")
            return
        seen = [Seen(start, stop) for start, stop, _ in made.spans]
        try:
            runs = rule.runs(seen, limits.block_size)
        except ValueError:
            made.must.add("RepairError")
            return
        if any(stop - start < limits.min_run_tokens for of in runs for start, stop in of):
            made.may.add("RepairError")

    # -- what is exact ---------------------------------------------------------------------

    def _runs(self, made: Made) -> Sequence[Any]:
        """What is repaired of each parent; where that goes by attention, the oracle tells later."""
        rule = made.rule
        is_unknown = isinstance(rule, (ByAttention, Reweighted)) or "RepairError" in made.must
        if rule is None or is_unknown:
            return [()] * len(made.spans)
        seen = [Seen(start, stop) for start, stop, _ in made.spans]
        return rule.runs(seen, self.limits.block_size)

    def link(self, made: Made, runs: Sequence[Any]) -> None:
        """Decide `links`."""
        rule, links = made.rule, list[tuple[Any, int, int]]()
        layers = rule.ranges if isinstance(rule, ByLayers) else ()
        is_layered = bool(layers) and layers != ((0, NUM_LAYERS),)
        for number, ((parent, _), (start, stop, offset)) in enumerate(
            zip(made.parents, made.spans, strict=True)
        ):
            before = made.spans[:number]
            where = (*(offset for *_, offset in before), offset)
            # One of all tokens is the same whether it is made for exact mode or for repair.
            copy = ("copy", parent, start, stop, tuple(links), where)
            if has(made, parent, links, before, start, offset):
                links.append((parent, start, stop))
            elif made.call.exact:
                links.append((copy, 0, stop - start))
            elif not runs[number]:
                links.append((parent, start, stop))
            elif is_layered:
                if {first for first, _ in layers if first} - set(parent.call.keep):
                    made.must.add("RepairError")
                links.append((("layers", made, parent, tuple(links)), start, stop))
            elif tuple(runs[number]) == ((0, stop - start),):
                links.append((copy, 0, stop - start))
            elif self.limits.cuts_parents:
                # Both parts are encoded here, whoever has encoded the parent; the first is one copy
                # for the call and for the rest if it stands at one place for both.
                goes_on = offset == parent.position and has(
                    made, parent, links, before, start, offset, is_anew=True
                )
                ((_, num_first),) = runs[number]
                cut = ("cut", parent, num_first, goes_on, tuple(links), where)
                links.append((cut, 0, stop - start))
            else:
                links.append((("patch", made, parent, tuple(links)), start, stop))
        made.links = links

    def num_unchanged(self, made: Made) -> int:
        """How many of the first parents are read as they were made, whatever is repaired."""
        links: list[tuple[Any, int, int]] = []
        for number, ((parent, _), (start, stop, offset)) in enumerate(
            zip(made.parents, made.spans, strict=True)
        ):
            if not has(made, parent, links, made.spans[:number], start, offset):
                return number
            links.append((parent, start, stop))
        return len(links)

    # -- room ------------------------------------------------------------------------------

    def _may_fill_the_pool(self, made: Made) -> bool:
        """Whether all that the call reads, and all of which that was made, may not fit together.

        Duplicates are counted twice, copies as if no calls shared one: too much, never too little.
        """
        return self.blocks_needed(made) > self.limits.num_blocks

    def blocks_needed(self, made: Made) -> int:
        # Drafts, and the token that is sampled when the last one is encoded.
        blocks_of = self.limits.blocks_of
        own = blocks_of(min(made.most_tokens + 8, self.limits.max_model_len))
        behind = ancestors(made)
        needed = own + sum(blocks_of(one.most_tokens) for one in behind)
        for one in (made, *behind):
            if one.call.exact or one.call.repair is not None:
                needed += sum(blocks_of(parent.most_tokens) for parent, _ in one.parents)
                if self.limits.cuts_parents:
                    needed += sum(blocks_of(parent.most_tokens) + 2 for parent, _ in one.parents)
                needed += blocks_of(len(one.header))  # to look at them
        return needed


def ancestors(made: Made) -> set[Made]:
    """All that a call reads, and of which that was made."""
    found: set[Made] = set()
    frontier = [made]
    while frontier:
        fresh = {parent for parent, _ in frontier.pop().parents} - found - {made}
        found |= fresh
        frontier += fresh
    return found


def has(
    made: Made,
    parent: Made,
    links: Sequence[tuple[Any, int, int]],
    before: Sequence[tuple[int, int, int]],
    start: int,
    offset: int,
    *,
    is_anew: bool = False,
) -> bool:
    """Whether a message, seen from `start` on at `offset`, was made behind what is read before.

    Args:
        is_anew: all of it is encoded once more, whoever may have encoded it.
    """
    if start or parent.call.adapter != made.call.adapter or (parent.is_given and not is_anew):
        return False
    if isinstance(parent.rule, Reweighted) and len(parent.links) > 1:
        return False
    shift = offset - parent.position
    offsets = [offset for *_, offset in before]
    theirs = [offset + shift for *_, offset in parent.spans]
    return parent.links == list(links) and theirs == offsets


def is_exact(made: Made) -> bool:
    """Whether the call gives what a request on the concatenated text gives, by recipes alone."""
    if isinstance(made.rule, Reweighted) and len(made.links) > 1:
        return False
    if not _is_text(made):
        return False
    for number, (link, (_, _, offset)) in enumerate(zip(made.links, made.spans, strict=True)):
        of, start, _ = link
        if isinstance(of, Made):
            links, before = made.links[:number], made.spans[:number]
            if not has(made, of, links, before, start, offset):
                return False
        elif of[0] != "copy" and not (of[0] == "cut" and of[3]):
            return False
    return True


def _is_untrusted(link: tuple[Any, int, int]) -> bool:
    of, *_ = link
    if isinstance(of, Made):
        return of.is_untrusted
    kind, *parts = of or (None,)
    if kind == "copy":
        return any(map(_is_untrusted, parts[3]))
    if kind == "cut":
        return any(map(_is_untrusted, (*parts[3], *parts[0].links)))
    # Patches are made of what they are laid over, and of what is read before that.
    return kind is not None and any(map(_is_untrusted, parts[2])) | parts[1].is_untrusted


def _is_text(made: Made) -> bool:
    offsets = [offset for *_, offset in made.spans]
    ends = [offset + length for offset, length in zip(offsets, made.lengths, strict=True)]
    return ends == [*offsets[1:], made.position][: len(ends)]


def _never_was(failed: Made) -> bool:
    """Whether nobody can have begun to read what failed: it has no tokens, or no place."""
    return failed.tokens is None or (not failed.is_aborted and failed.error != "PoolFullError")
