# SPDX-License-Identifier: Apache-2.0
"""Sessions that run for weeks: what they keep of freed messages and of failed calls is bounded.

The facades run on the fake engine of `fakes.py`, which keeps nothing itself.
"""

from __future__ import annotations

import gc
import itertools
import json
import tracemalloc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.api.fakes import REPORT, Two, make_llm
from vllm_choreo import Choreography
from vllm_choreo.api import entries
from vllm_choreo.errors import (
    ChoreoError,
    DeniedMessageError,
    FreedMessageError,
    NameTakenError,
    ParentFailedError,
    TooLongError,
    UnknownMessageError,
)
from vllm_choreo.semantics.provenance import Trace
from vllm_choreo.wire.messages import message_json

pytestmark = pytest.mark.usefixtures("operations")


@pytest.fixture
def llm() -> Any:
    llm = make_llm()
    llm.llm_engine.refuse["bad"] = REPORT
    return llm


@pytest.fixture
def c(llm: Any) -> Iterator[Choreography]:
    with Choreography(llm) as session:
        yield session


@pytest.fixture
def remembers_ten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(entries, "MAX_GONE", 10, raising=False)


def round_of_calls(c: Choreography, number: int) -> None:
    """Five calls, two of which fail; nothing is left of them."""
    doc = c.prefill("doc", save_as=f"doc-{number}")
    answer = c.decode("a", parents=[doc], sampling_params=Two)
    for name in (f"bad-{number}", None):
        with pytest.raises(TooLongError) as caught:
            c.decode([{"header": "bad", "save_as": name, "parents": [doc]}, {"header": "x"}])
        c.free(caught.value.results[1])
    c.free(doc, answer)


def test_a_session_does_not_grow(c: Choreography, llm: Any, remembers_ten: None) -> None:
    def rounds(first: int, last: int) -> int:
        """Bytes that are held after these rounds."""
        for number in range(first, last):
            round_of_calls(c, number)
            llm.llm_engine.prompts.clear()
            llm.llm_engine.operations.clear()
        gc.collect()
        return tracemalloc.get_traced_memory()[0]

    tracemalloc.start()
    try:
        held = [rounds(first, last) for first, last in ((0, 50), (50, 200), (200, 350))]
    finally:
        tracemalloc.stop()
    # The lesser of two: other threads of the process may allocate something, too.
    growth = min(after - before for before, after in itertools.pairwise(held))
    assert growth < 15_000, f"{growth / 150:.0f} bytes stay of every round"


def test_a_raised_error_keeps_no_message_alive(c: Choreography) -> None:
    with pytest.raises(TooLongError) as caught:
        c.decode([{"header": "a"}, {"header": "bad", "save_as": "bad"}], sampling_params=Two)
    made = caught.value.results[0]
    alive, error = weakref.ref(made), weakref.ref(caught.value)
    c.free(made)
    del made, caught
    gc.collect()
    assert alive() is None and error() is None
    with pytest.raises(ParentFailedError, match="too long"):
        c.decode("b", parents=["bad"])


def test_traces_live_as_long_as_messages_that_carry_them(c: Choreography) -> None:
    def num_traces() -> int:
        gc.collect()
        return sum(type(thing) is Trace for thing in gc.get_objects())

    before = num_traces()
    last = c.prefill("a")
    for _ in range(500):
        reader = c.prefill("a", parents=[last])
        c.free(last)
        last = reader
    assert len(last.provenance) == 500  # all of them freed, and rightly told
    assert num_traces() >= before + 500
    c.free(last)
    del last, reader
    assert num_traces() == before


def test_an_answer_does_not_grow_with_the_history(c: Choreography) -> None:
    def size() -> int:
        return len(json.dumps(message_json(last)))

    last = c.prefill("a")
    sizes = {}
    for number in range(1, 2001):
        last = c.prefill("a", parents=[last])
        sizes[number] = size()
    assert len(last.provenance) == 2000
    # The digits of the clock and of names may be more.
    assert sizes[2000] < sizes[1000] + 100, f"{sizes[1000]} bytes at 1000, {sizes[2000]} at 2000"


# -- what is remembered of what is gone ------------------------------------------------------------


def test_numbers_are_known_for_ever(c: Choreography, remembers_ten: None) -> None:
    first = c.prefill("a").id
    c.free(first)
    with pytest.raises(TooLongError):
        c.decode("bad")
    for _ in range(20):
        c.free(c.prefill("b"))
        with pytest.raises(TooLongError):
            c.decode("bad")
    for gone in (first, f"{c.session}/1"):
        with pytest.raises(FreedMessageError):
            c.prefill("x", parents=[gone])
    for never in ("99", "01", "²", "9" * 30, f"other/{first.partition('/')[2]}"):
        with pytest.raises(UnknownMessageError):
            c.prefill("x", parents=[never])


def test_neighbours_by_number_are_unknown_not_freed(c: Choreography) -> None:
    with pytest.raises(UnknownMessageError, match="in an earlier call"):
        c.prefill([{"tokens": "a"}, {"tokens": "b", "parents": ["0"]}])


def test_a_freed_name_stays_taken_while_it_is_remembered(
    c: Choreography, remembers_ten: None
) -> None:
    c.free(c.prefill("a", save_as="old"))
    with pytest.raises(NameTakenError):
        c.prefill("a", save_as="old")
    for number in range(10):
        c.free(c.prefill("a", save_as=f"n{number}"))
    with pytest.raises(UnknownMessageError, match="freed long ago"):
        c.prefill("x", parents=["old"])
    assert c.prefill("b", save_as="old").text == "b"


def test_a_message_that_is_held_never_comes_to_mean_another(
    c: Choreography, remembers_ten: None
) -> None:
    held = c.prefill("a", save_as="old")
    c.free(held)
    for number in range(20):
        c.free(c.prefill("a", save_as=f"n{number}"))
    with pytest.raises(NameTakenError):
        c.prefill("b", save_as="old")
    with pytest.raises(FreedMessageError):
        c.prefill("x", parents=[held])


# -- denying what is gone --------------------------------------------------------------------------


def _forget(c: Choreography) -> None:
    for number in range(11):
        c.free(c.prefill("a", save_as=f"n{number}"))


def _by_option(c: Choreography, name: str, parent: Any) -> None:
    c.prefill("x", parents=[parent], deny=[name])


def _by_policy(c: Choreography, name: str, parent: Any) -> None:
    c.deny(name).prefill("x", parents=[parent])


@pytest.mark.parametrize("denied", [_by_option, _by_policy])
def test_what_is_forgotten_can_be_denied_as_long_as_anybody_carries_it(
    c: Choreography, remembers_ten: None, denied: Callable[[Choreography, str, Any], None]
) -> None:
    c.prefill("a", save_as="secret")
    plan = c.prefill("b", parents=["secret"])
    said = c.prefill("c", parents=[plan])
    c.free("secret", plan)
    _forget(c)
    with pytest.raises(DeniedMessageError, match="secret"):
        denied(c, "secret", said)
    c.free(said)
    doc = c.prefill("d")
    with pytest.raises(UnknownMessageError, match="freed long ago"):
        denied(c, "secret", doc)


def test_a_name_that_never_was_is_not_denied_silently(c: Choreography, remembers_ten: None) -> None:
    secret = c.prefill("a", save_as="secret")
    for name in ("secrets", "99", "other/secret"):
        with pytest.raises(UnknownMessageError):
            c.prefill("x", parents=[secret], deny=[name])
        with pytest.raises(UnknownMessageError):
            c.deny(name)


def test_a_name_that_was_given_again_denies_both(c: Choreography, remembers_ten: None) -> None:
    c.prefill("a", save_as="secret")
    said = c.prefill("b", parents=["secret"])
    c.free("secret")
    _forget(c)
    again = c.prefill("c", save_as="secret")
    for parent in (said, again):
        with pytest.raises(DeniedMessageError):
            c.prefill("x", parents=[parent], deny=["secret"])


def test_the_name_of_a_failed_call_is_free_at_once(c: Choreography, llm: Any) -> None:
    with pytest.raises(ChoreoError):
        c.decode("bad", save_as="answer")
    del llm.llm_engine.refuse["bad"]
    assert c.decode("bad", save_as="answer").id.endswith("/answer")
    assert c.decode("x", parents=["answer"]).parents[0].id.endswith("/answer")
