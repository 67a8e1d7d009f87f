# SPDX-License-Identifier: Apache-2.0
"""Programs side by side: each gets what it would get alone, and fails alone."""

from __future__ import annotations

import threading
from functools import partial
from typing import Any

import pytest
from vllm import SamplingParams

from vllm_choreo import Choreography
from vllm_choreo.errors import ChoreoError
from vllm_choreo.lab.workflows.parallel_debate import parallel_debate
from vllm_choreo.lab.workflows.together import run_together

_SAMPLING = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)


@pytest.fixture
def llm(plain_llama: Any) -> Any:
    return plain_llama


def _program(c: Any, number: int) -> list[tuple[int, ...]]:
    """Of another length than its neighbours."""
    document = c.prefill(f"Document {number} is open.", role="document")
    answers: list[Any] = []
    for _ in range(number + 1):
        header = f"{number} and next:"
        parents = [document, *answers]
        answers.append(c.decode(header, parents=parents, sampling_params=_SAMPLING))
    c.free(document)
    return [answer.generated_token_ids for answer in answers]


def _fails(c: Any) -> None:
    document = c.prefill("It fails.")
    c.decode("Soon:", parents=[document], offsets=[1, 2], sampling_params=_SAMPLING)


@pytest.mark.parametrize("mode", ["choreo", "baseline"])
def test_each_gets_what_it_gets_alone(llm: Any, mode: str) -> None:
    programs = [partial(_program, number=number) for number in range(4)]
    with Choreography(llm, mode) as c:
        alone = [program(c) for program in programs]
    with Choreography(llm, mode) as c:
        assert run_together(c, programs) == alone


def test_lists_of_calls_stay_lists(llm: Any) -> None:
    questions = ["Who?", "Where is it?"]
    programs = [
        partial(parallel_debate, question=one, agents=2, rounds=2, sampling_params=_SAMPLING)
        for one in questions
    ]
    with Choreography(llm) as c:
        alone = [program(c).answers for program in programs]
        together = run_together(c, programs)
    assert [ran.answers for ran in together if not isinstance(ran, ChoreoError)] == alone


def test_who_fails_fails_alone(llm: Any) -> None:
    """Refused before it runs, or after some of the list did."""
    with Choreography(llm) as c:
        alone = _program(c, 2)
        first, failed, too_long = run_together(
            c,
            [
                partial(_program, number=2),
                _fails,
                lambda seat: seat.decode([1] * 9000, sampling_params=_SAMPLING),
            ],
        )
    assert first == alone
    assert isinstance(failed, ChoreoError) and failed.parameter == "offsets"
    assert isinstance(too_long, ChoreoError)


def test_what_cannot_be_freed_is_told_to_whom_it_concerns(llm: Any) -> None:
    """Also where another one frees at the same time."""

    def frees_twice(c: Any) -> None:
        document = c.prefill("Gone.")
        c.free(document)
        c.free(document)

    def frees_once(c: Any) -> str:
        document = c.prefill("Here.")
        c.prefill("There.")
        c.free(document)
        return "freed"

    with Choreography(llm) as c:
        alone = _program(c, 1)
        failed, freed, fine = run_together(
            c, [frees_twice, frees_once, partial(_program, number=1)]
        )
    assert isinstance(failed, ChoreoError) and "was freed" in str(failed)
    assert freed == "freed" and fine == alone


def test_another_error_ends_all(llm: Any) -> None:
    """And no thread is left waiting."""

    def breaks(c: Any) -> None:
        c.prefill("One")
        raise KeyError("mine")

    before = threading.active_count()
    with Choreography(llm) as c, pytest.raises(KeyError, match="mine"):
        run_together(c, [breaks, partial(_program, number=1)])
    assert threading.active_count() == before


def test_interrupted_between_calls(llm: Any) -> None:
    """Ctrl-C reaches the caller's thread, which answers; whoever waits is let go."""

    class Interrupted:
        mode = "choreo"

        def prefill(self, *_: Any, **__: Any) -> Any:
            raise KeyboardInterrupt

    before = threading.active_count()
    with pytest.raises(KeyboardInterrupt):
        run_together(Interrupted(), [partial(_program, number=n) for n in range(3)])  # type: ignore[arg-type]
    assert threading.active_count() == before


def test_of_nothing() -> None:
    assert run_together(None, []) == []  # type: ignore[arg-type, comparison-overlap]
