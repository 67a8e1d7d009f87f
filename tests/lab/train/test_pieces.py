# SPDX-License-Identifier: Apache-2.0
"""Recorded texts that are cut: the same texts and answers, in pieces behind the beginning."""

from __future__ import annotations

import random
from itertools import accumulate, count

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.lab.train.recordings import ASSISTANT, END, SYSTEM, TURNS, USER
from vllm_choreo.errors import ChoreoError
from vllm_choreo.lab.train.packing import PackedCall, pack, pack_as_text
from vllm_choreo.lab.train.pieces import ContentCutter, pieces_of
from vllm_choreo.lab.train.recorded import calls_of
from vllm_choreo.semantics.message import Message, Metrics, Usage
from vllm_choreo.semantics.naming import ParentSpan
from vllm_choreo.transcript.transcript import Transcript

MEAN = 16
CUTTER = ContentCutter(np.zeros(1000, dtype=np.uint8), {END}, MEAN)
_NUMBERS = count()


def message(tokens: list[int], parents: list[Message], generated: int = 0) -> Message:
    held = (*tokens, *range(900, 900 + generated))
    return Message(
        id=f"s/{next(_NUMBERS)}",
        text=f"t{tokens[0]} …",
        token_ids=held,
        num_tokens=len(held),
        position=0,
        parents=tuple(ParentSpan(parent.id) for parent in parents),
        generated_text="…" if generated else "",
        generated_token_ids=held[len(tokens) :],
        logprobs=None,
        finish_reason="length" if generated else None,
        usage=Usage(True, 0, 0, len(held)),
        metrics=Metrics(0.0, None, 0.0, 0.0),
    )


def turn(opening: int, tokens: list[int]) -> list[int]:
    return [opening, *tokens, END, 20]  # what a template writes behind a turn: a newline


def text(rng: random.Random, most: int) -> list[int]:
    return [rng.randrange(30, 800) for _ in range(rng.randrange(1, most))]


def transcript_of(*messages: Message) -> Transcript:
    log = Transcript("drawn", "baseline", {"turns": TURNS.to_json()})
    for one in messages:
        log.add("all", "somebody", one)
    return log


def drawn(seed: int) -> tuple[Transcript, list[int]]:
    """A run, and its beginning: what its system says, up to the token that ends a turn.

    Two questions are asked about documents that are messages, or are pasted before the question.
    """
    rng = random.Random(seed)
    says = turn(SYSTEM, text(rng, 60)) if rng.random() < 0.8 else []
    system = [message(says, [])] if says else []
    documents = [message(turn(USER, text(rng, 90)), system) for _ in range(rng.randrange(3))]
    pasted = text(rng, 120) if not documents or rng.random() < 0.5 else []
    answers = [
        message(
            [*turn(USER, [*pasted, *text(rng, 9)]), ASSISTANT], [*system, *documents], generated=3
        )
        for _ in range(2)
    ]
    return transcript_of(*system, *documents, *answers), says[:-1]


def tokens_read(call: PackedCall, calls: list[PackedCall]) -> list[int]:
    return [t for s in call.parents for t in calls[s.call].token_ids[s.start : s.stop]]


@settings(deadline=None, max_examples=80)
@given(st.integers(0, 2**32))
def test_texts_stay_and_pieces_have_read_the_beginning_and_nothing_else(seed: int) -> None:
    log, beginning = drawn(seed)
    pieces = pieces_of(log, CUTTER)
    cut, recorded = (pack_as_text(pack(calls)) for calls in (pieces, calls_of(log)))
    assert cut.token_ids.tolist() == recorded.token_ids.tolist()
    assert cut.trained_rows.tolist() == recorded.trained_rows.tolist()
    for call in pieces:
        read = tokens_read(call, pieces)
        # All stand one behind the other, as a call does that says nothing of places.
        lengths = [span.stop - span.start for span in call.parents]
        places = [*(span.offset for span in call.parents), call.new_offset]
        assert places == [0, *accumulate(lengths)] and len(read) == sum(lengths)
        if call.is_decode:
            continue
        assert len(call.token_ids) <= 2 * MEAN or beginning[: len(read) + 1] == read
        if read != beginning:  # a part of the beginning
            assert beginning[: len(read) + len(call.token_ids)] == [*read, *call.token_ids]


def test_what_two_questions_are_asked_about_is_encoded_once() -> None:
    rng = random.Random(1)
    system = message(turn(SYSTEM, text(rng, 60)), [])
    pasted = [rng.randrange(30, 800) for _ in range(150)]
    questions = [
        message([*turn(USER, [*pasted, 100 + number]), ASSISTANT], [system], generated=2)
        for number in range(2)
    ]
    one = pieces_of(transcript_of(system, questions[0]), CUTTER)
    both = pieces_of(transcript_of(system, *questions), CUTTER)
    assert len(one) > 8 and both[: len(one)] == one
    # The last piece, which holds the question, and the call that answers.
    assert len(both) - len(one) <= 3


def test_what_was_generated_is_not_cut() -> None:
    said = message([*turn(USER, [40]), ASSISTANT], [], generated=3)
    reader = message([*turn(USER, [50]), ASSISTANT], [said], generated=3)
    with pytest.raises(ChoreoError, match="leave cut out") as caught:
        pieces_of(transcript_of(said, reader), CUTTER)
    assert caught.value.parameter == "cut"
