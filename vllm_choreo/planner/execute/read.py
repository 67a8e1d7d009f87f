# SPDX-License-Identifier: Apache-2.0
r"""Division of a prompt for one call: parents that are read as messages, and a header.

    symbols   [system turn] [question] <answer 1> "and" <answer 2> [instruction, opening]
    exact     \___ shared prefixes: a chain of messages _____/      header
    choreo    \___ chain ___________/ message    alone  message     header

    symbols   [all that an earlier call has read] <its answer> [next turn, opening]
    exact     \___ its parents, its message _______________/  header

A chain is exact: each link is encoded with all before it, and ends where the text as a whole has a
token's end. Text beside messages is encoded alone if other calls have the same, else with all that
stands before it. Text that is to be read as a message (an input, an answer from a cache or of
another worker) is encoded alone, too, once for all calls that read it.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from vllm_choreo.planner.workers.worker import Answer, Worker

Key = tuple[str, ...]


@dataclass(frozen=True)
class Told:
    """Text to be read as a message: an input, or an answer whose message lies elsewhere."""

    text: str


Part = str | Answer | Told


@dataclass(frozen=True)
class Reading:
    """A prompt, as one call reads it.

    Attributes:
        before: the answer of an earlier call, with whose prompt and answer this prompt begins.
        chain: texts of the shared prefix, each encoded with those before.
        parts: texts behind the chain, answers and `Told`, which are read as messages.
        header: text at the end, never empty.
    """

    chain: Key
    parts: tuple[Part, ...]
    header: str
    before: Answer | None = None

    @property
    def exact(self) -> bool:
        """True if the call reads nothing that was encoded apart."""
        return not self.parts

    def text(self) -> str:
        """Return the prompt as text, without that of `before`."""
        parts = (part if isinstance(part, str) else part.text for part in self.parts)
        return "".join((*self.chain, *parts, self.header))


def reading(pieces: Sequence[Part], cuts: Sequence[int], before: Answer | None = None) -> Reading:
    """Divide a prompt.

    Args:
        pieces: texts of the prompt, and answers and `Told` to be read as messages; the last one is
            text.
        cuts: numbers of the pieces at which shared prefixes end.
        before: answer of an earlier call, which `pieces` follow; see `Reading`.
    """
    first = next((i for i, p in enumerate(pieces) if not isinstance(p, str)), len(pieces))
    # A prompt may end with an empty answer: its header is the text before that.
    pieces = _up_to_text(pieces)
    chain: list[str] = []
    start = 0
    for cut in cuts:
        if cut < first and cut < len(pieces) - 1:
            link = "".join(str(piece) for piece in pieces[start : cut + 1])
            if link:
                chain.append(link)
            start = cut + 1
    rest: list[Part] = []
    for piece in pieces[start:]:
        if isinstance(piece, str) and rest and isinstance(rest[-1], str):
            rest[-1] += piece
        elif piece not in ("", Told("")):
            rest.append(piece)
    header = rest.pop() if rest else ""
    assert isinstance(header, str), "a prompt ends with text"
    return Reading(tuple(chain), tuple(rest), header, before)


def _up_to_text(pieces: Sequence[Part]) -> list[Part]:
    """Pieces up to the last one with text, which is text of the prompt itself."""
    kept = list(pieces)
    while len(kept) > 1 and kept[-1] == "":
        kept.pop()
        last = kept[-1]
        kept[-1] = last if isinstance(last, str) else last.text
    return kept


async def is_retold(worker: Worker, opening: str, answer: Answer, rest: str) -> bool:
    """Return whether the text of a prompt has, between `opening` and `rest`, an answer's tokens.

    `opening` is that of the answer's turn: before it, texts are tokenised apart as together. If the
    tokens differ, or are not known, a call may not read the message in place of the text.
    """
    texts = (opening, rest, opening + answer.text + rest)
    before, after, whole = await asyncio.gather(*map(worker.tokenize, texts))
    if before is None or after is None:
        return False
    return (*before, *answer.token_ids, *after) == whole


async def drop_inexact_links(
    worker: Worker, read: Reading, ends_turn: Callable[[str], bool]
) -> Reading:
    """Leave out the links of a chain that end where the text, as a whole, has no token's end.

    Args:
        worker: knows the tokens.
        read: a call's prompt.
        ends_turn: whether a text ends a turn, where texts are tokenised apart as together.
    """
    if not read.chain or not worker.reads_messages:
        return read
    behind = (*read.parts, read.header)
    texts: list[str] = []
    start = 0  # of the turn, among texts
    for link in (*read.chain, behind[0]):
        if not isinstance(link, str):  # a message, whose tokens are those that it has
            return replace(read, chain=tuple(texts))
        if texts and ends_turn(texts[-1]):
            start = len(texts)
        text = link
        while len(texts) > start and not await _ends_tokens(worker, [*texts[start:], text]):
            text = texts.pop() + text
        texts.append(text)
    *parts, header = (texts.pop(), *behind[1:])
    assert isinstance(header, str), "a prompt ends with text"
    return replace(read, chain=tuple(texts), parts=tuple(parts), header=header)


async def _ends_tokens(worker: Worker, texts: Sequence[str]) -> bool:
    """Return whether texts, as one, have the tokens that they have one by one."""
    found = await asyncio.gather(*map(worker.tokenize, ("".join(texts), *texts)))
    whole, *apart = [tokens or () for tokens in found]
    return found[0] is not None and whole == tuple(itertools.chain(*apart))


def repeated(prompts: Iterable[Sequence[str | None]]) -> frozenset[str]:
    """Texts that stand before messages in more than one prompt.

    Args:
        prompts: symbols of each behind its chain; None: a value that is read as a message.
    """
    counts: Counter[str] = Counter()
    for symbols in prompts:
        texts, between = [], ""
        for symbol in symbols:
            if symbol is None:
                texts.append(between)
            between = "" if symbol is None else between + symbol
        counts.update(set(texts) - {""})
    return frozenset(text for text, count in counts.items() if count > 1)
