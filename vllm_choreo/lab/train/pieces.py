# SPDX-License-Identifier: Apache-2.0
"""Recorded texts as chats that name no messages are read: cut by content, each piece alone.

    recorded     | system | user: document, document, …, question | assistant: answer |

    trained on   | system |   read by every piece, which reads no other one
                          | piece | piece | piece | piece |
                                                          | assistant: answer |   reads them all

That is `choreo_auto` with cuts and the context "alone": the pieces, and what they stand behind,
come from what serves it (`chat/matching.py`). So an adapter for calls that encode messages learns
to encode pieces of any text, to be read by whoever has the same beginning, in any order.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import accumulate, count
from typing import TYPE_CHECKING

from vllm_choreo.chat.cutter import DEFAULT_MIN_TOKENS, end_tokens
from vllm_choreo.chat.marks import Content, ContentPlace
from vllm_choreo.chat.matching import EntrySpan, Matching, plan_chat
from vllm_choreo.chat.message_table import MessageTable
from vllm_choreo.chat.parts import Split, cut_long_parts, split
from vllm_choreo.chat.turns import ChatTurns
from vllm_choreo.errors import ChoreoError
from vllm_choreo.lab.train.packing import PackedCall, SeenSpan
from vllm_choreo.lab.train.recorded import calls_of
from vllm_choreo.transcript.transcript import Transcript

if TYPE_CHECKING:
    from vllm_choreo.chat.content_cuts import Ranks

_UNLIMITED = 2**62
_ALONE = Matching(context="alone")


@dataclass(frozen=True)
class ContentCutter:
    """Cutter of recorded texts.

    Attributes:
        ranks: rank of each token of the vocabulary, see `content_cuts.token_ranks`.
        ends: tokens that end what the model generates.
        mean_tokens: tokens of a piece on average.
        min_tokens: shorter parts are joined with their neighbours.
    """

    ranks: Ranks
    ends: Collection[int]
    mean_tokens: int
    min_tokens: int = DEFAULT_MIN_TOKENS

    @classmethod
    def of(cls, model: str, mean_tokens: int) -> ContentCutter:
        """The cutter for a model's folder or name."""
        from transformers import AutoTokenizer, GenerationConfig

        from vllm_choreo.chat.content_cuts import token_ranks

        tokenizer = AutoTokenizer.from_pretrained(model)
        try:
            generation = GenerationConfig.from_pretrained(model).to_dict()
        except OSError:  # it has none
            generation = {}
        return cls(token_ranks(tokenizer), end_tokens(tokenizer, generation), mean_tokens)


def pieces_of(transcript: Transcript, cutter: ContentCutter) -> list[PackedCall]:
    """The calls that encode and read the texts of a run, cut into pieces that stand alone.

    What was generated is the same, in the same order, as of `calls_of`, and so is the text that
    each call which generates stands for. A piece of several texts behind one beginning is one.

    Raises:
        ChoreoError: a call reads what another has generated, which is never cut.
    """
    calls = calls_of(transcript)
    roles = [_role(step.message.text, _turns(transcript)) for step in transcript.steps]
    table, numbers = MessageTable(_UNLIMITED, _UNLIMITED), count()
    made: list[PackedCall] = []
    places: dict[str, int] = {}  # of messages, among the calls that are made
    for call in calls:
        if not call.is_decode:
            continue
        text = _split(call, calls, roles, cutter)
        plan = plan_chat(text, table, _ALONE, lambda _: True, lambda: f"s/{next(numbers)}")
        for piece in plan.new:
            table.add(piece.entry)
            places[piece.entry.message_id] = len(made)
            made.append(_call(piece.token_ids, piece.parents, places))
        generated = call.token_ids[-call.num_generated :]
        made.append(_call((*plan.header, *generated), plan.parents, places, call.num_generated))
    return made


def _turns(transcript: Transcript) -> ChatTurns:
    given = transcript.inputs.get("turns")
    return ChatTurns.from_json(given) if isinstance(given, dict) else ChatTurns()


def _role(text: str, turns: ChatTurns) -> str:
    """Role of a recorded message as a part of a chat: "" is what the template itself writes."""
    if turns.start and text == turns.start:
        return ""
    is_system = turns.system_opening != turns.user_opening
    return "system" if is_system and text.startswith(turns.system_opening) else "user"


def _split(
    call: PackedCall, calls: Sequence[PackedCall], roles: Sequence[str], cutter: ContentCutter
) -> Split:
    """The text that a call stands for, in parts: places are counted in tokens."""
    tokens: list[int] = []
    places: list[ContentPlace] = []
    for span in call.parents:
        parent = calls[span.call]
        if parent.is_decode:
            raise ChoreoError(
                "a call of this run reads what another one has generated: such runs are trained on "
                "as their messages stand; leave cut out",
                parameter="cut",
                value="content",
            )
        read = parent.token_ids[span.start : span.stop]
        places += _content(read, len(tokens), len(places), roles[span.call], cutter.ends)
        tokens += read
    header = call.token_ids[: -call.num_generated]
    # A header that ends no turn is what a message cannot be: it goes before the answer.
    if any(token in cutter.ends for token in header):
        places += _content(header, len(tokens), len(places), "user", cutter.ends)
    tokens += header
    offsets = [(at, at + 1) for at in range(len(tokens))]
    whole = split(tokens, offsets, places, len(tokens), cutter.ends, cutter.min_tokens, True)
    return cut_long_parts(whole, cutter.ranks, cutter.mean_tokens)


def _content(
    tokens: Sequence[int], start: int, number: int, role: str, ends: Collection[int]
) -> list[ContentPlace]:
    """The content of a recorded message: up to the token that ends its turn, if there is one.

    What the template itself writes is none.
    """
    if not role:
        return []
    closing = [at for at, token in enumerate(tokens) if token in ends]
    stop = start + (closing[-1] if closing else len(tokens))
    return [ContentPlace(Content(number, role, ""), start, stop)]


def _call(
    token_ids: tuple[int, ...],
    spans: Sequence[EntrySpan],
    places: dict[str, int],
    num_generated: int = 0,
) -> PackedCall:
    """A call that sees its parents one behind the other."""
    offsets = [0, *accumulate(span.num_tokens for span in spans)]
    parents = tuple(
        SeenSpan(places[span.entry.message_id], span.start, span.stop, at)
        for span, at in zip(spans, offsets, strict=False)
    )
    return PackedCall(token_ids, parents, offsets[-1], num_generated)
