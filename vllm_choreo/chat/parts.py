# SPDX-License-Identifier: Apache-2.0
"""Parts into which the tokens of a rendered chat are cut.

    <|im_start|>system⏎Be brief.<|im_end|> | ⏎<|im_start|>user⏎What is green?<|im_end|> | ⏎<|im_…
    '------------- part -----------------'   '----------------- part -----------------'   header

A part ends behind the token that ends a turn, where the template writes one, for there an answer
ends that is generated: so the answer, with the header before it, has the very tokens that the next
request's part has. Where there is no such token, a part ends where its content does.

Parts that are short are joined, for every message takes whole blocks of the KV cache: those between
two answers, so that answers always stand alone. Parts that are long are cut into pieces by their
content, if asked for (`content_cuts.py`); answers are not.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING

from vllm_choreo.chat.marks import ContentPlace

if TYPE_CHECKING:
    from vllm_choreo.chat.content_cuts import Ranks

# Of a chat, the first ones are messages, and what follows them is text.
MAX_PARTS = 256
ANSWERS = ("assistant", "")  # roles of parts that are never joined with others
# Roles of parts at the head of a chat that are its beginning; "": what the template writes itself.
_BEGINNING = ("system", "developer", "")


@dataclass(frozen=True)
class ChatPart:
    """Tokens `start … stop-1` of a chat.

    Attributes:
        role: role of the last message whose content it holds; "": it holds none, as a tool call.
        messages: indices of the chat messages whose contents it holds.
    """

    start: int
    stop: int
    role: str
    messages: tuple[int, ...] = ()

    @property
    def num_tokens(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class ChatPicture:
    """A picture in a chat, for which tokens `start … stop-1` stand.

    Attributes:
        name: number below 0 that no other picture has.
    """

    start: int
    stop: int
    name: int


@dataclass(frozen=True)
class Split:
    """A rendered chat in parts.

    Attributes:
        token_ids: tokens of the whole chat.
        parts: parts one after the other from its first token on; they never hold its last one.
        reason: the reason why there are none, or "".
        pictures: pictures in the chat, in their order; no part cuts one.
    """

    token_ids: tuple[int, ...]
    parts: tuple[ChatPart, ...] = ()
    reason: str = field(default="", compare=False)
    pictures: tuple[ChatPicture, ...] = ()

    @cached_property
    def content(self) -> tuple[int, ...]:
        """Tokens by what they stand for: those of a picture, equal for all, are its name."""
        content = list(self.token_ids)
        for picture in self.pictures:
            content[picture.start : picture.stop] = [picture.name] * (picture.stop - picture.start)
        return tuple(content)

    def cuts_picture(self, at: int) -> bool:
        """Return whether a cut before this token has a picture on both sides."""
        return any(picture.start < at < picture.stop for picture in self.pictures)

    @property
    def header_start(self) -> int:
        """Index of the first token behind all parts."""
        return self.parts[-1].stop if self.parts else 0


def split(
    token_ids: Sequence[int],
    offsets: Sequence[tuple[int, int]],
    places: Sequence[ContentPlace],
    num_chars: int,
    ends: Collection[int],
    min_tokens: int,
    keeps_beginning: bool = False,
) -> Split:
    """Cut a rendered chat into parts.

    Args:
        token_ids: tokens of the chat.
        offsets: the characters `start, stop` of each token in the text of the chat.
        places: places of the contents in that text, in order.
        num_chars: length of the text.
        ends: the tokens that end what a model generates.
        min_tokens: shorter parts are joined with their neighbours.
        keeps_beginning: those of the beginning are joined with one another alone.
    """
    tokens = tuple(token_ids)
    if not places:
        return Split(tokens, reason="template")
    starts = [start for start, _ in offsets]
    borders = [(0, places[0].start), *((p.stop, n.start) for p, n in pairwise(places))]
    borders.append((places[-1].stop, num_chars))
    cuts: set[int] = set()
    for number, (begin, end) in enumerate(borders):
        first, last = bisect_left(starts, begin), bisect_left(starts, end)
        found = {at + 1 for at in range(first, last) if tokens[at] in ends}
        # Before the first content there is nothing that could end.
        cuts |= found or ({first} if number else set())
    legal = sorted(cut for cut in cuts if 0 < cut < len(tokens))[:MAX_PARTS]
    parts = _parts(legal, starts, places)
    border = num_beginning(parts) if keeps_beginning else 0
    merged = (part for side in (parts[:border], parts[border:])
              for part in _merge_short(side, min_tokens))  # fmt: skip
    return Split(tokens, tuple(merged))


def num_beginning(parts: Sequence[ChatPart]) -> int:
    """Number of parts of a chat's beginning: those before the first that holds a text of another
    role than "system" or "developer".
    """
    others = (number for number, part in enumerate(parts) if part.role not in _BEGINNING)
    return next(others, len(parts))


def split_given_parts(parts: Sequence[Sequence[int]], min_tokens: int) -> Split:
    """Join the parts that a prompt is given in; behind the last cut is its header.

    Args:
        parts: the tokens of each, one at least.
        min_tokens: shorter parts are joined with their neighbours.
    """
    stops = list(accumulate(map(len, parts)))[:-1][:MAX_PARTS]
    cut = [ChatPart(start, stop, "user") for start, stop in pairwise((0, *stops))]
    tokens = tuple(token for part in parts for token in part)
    return Split(tokens, tuple(_merge_short(cut, min_tokens)))


def cut_long_parts(cut: Split, ranks: Ranks, mean_tokens: int) -> Split:
    """Cut parts that hold much text into pieces by their content.

    Args:
        ranks: rank of each token of the vocabulary, see `content_cuts.token_ranks`.
        mean_tokens: tokens of a piece on average.
    """
    from vllm_choreo.chat.content_cuts import content_cuts

    pieces: list[ChatPart] = []
    for number, part in enumerate(cut.parts):
        inner: list[int] = []
        if part.role not in ANSWERS:
            inner = content_cuts(cut.token_ids[part.start : part.stop], ranks, mean_tokens)
            inner = [at for at in inner if not cut.cuts_picture(part.start + at)]
        most = MAX_PARTS - len(pieces) - (len(cut.parts) - number)
        stops = [*(part.start + at for at in inner[: max(0, most)]), part.stop]
        for start, stop in pairwise((part.start, *stops)):
            pieces.append(replace(part, start=start, stop=stop))
    return replace(cut, parts=tuple(pieces))


def _parts(
    cuts: Sequence[int], starts: Sequence[int], places: Sequence[ContentPlace]
) -> list[ChatPart]:
    """Parts between the cuts, each with the contents that begin in it."""
    parts, start, at = [], 0, 0
    for stop in cuts:
        inside = []
        while at < len(places) and bisect_left(starts, places[at].start) < stop:
            inside.append(places[at].content)
            at += 1
        role = inside[-1].role if inside else ""
        parts.append(ChatPart(start, stop, role, tuple(dict.fromkeys(c.message for c in inside))))
        start = stop
    return parts


def _merge_short(parts: Sequence[ChatPart], min_tokens: int) -> list[ChatPart]:
    """Join runs of short parts into parts of at least `min_tokens`, as far as there are enough."""
    joined: list[ChatPart] = []
    is_open = False  # the last one is short, and may be joined with the next
    for part in parts:
        can_join = part.role not in ANSWERS and part.num_tokens < min_tokens
        if is_open and can_join:
            last = joined.pop()
            messages = tuple(dict.fromkeys((*last.messages, *part.messages)))
            part = ChatPart(last.start, part.stop, part.role, messages)
        joined.append(part)
        is_open = can_join and part.num_tokens < min_tokens
    return joined
