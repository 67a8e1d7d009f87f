# SPDX-License-Identifier: Apache-2.0
"""Messages of engines with window groups in host memory and in files: gaps stay gaps."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from vllm import SamplingParams

from tests.engine.choreographies import (
    LOGPROB_TOLERANCE,
    Draw,
    check,
    draw_choreography,
    side_by_side,
)
from tests.engine.feature_machine import invariants
from tests.engine.oracle import Oracle, Parent, assert_greedy, random_tokens
from tests.grids import sampled
from vllm_choreo import Choreography
from vllm_choreo.engine.utility import call
from vllm_choreo.errors import KeptError

MODELS = ["gemma3", "gpt_oss"]
# A block of one of the three groups: one layer, 2 heads, 32 slots, a key and a value of 32 floats.
BLOCK_BYTES = 2 * 32 * 2 * 32 * 4
_GREEDY = {"temperature": 0.0, "ignore_eos": True, "logprobs": 5}

Slot = Callable[..., Any]
Paths = Callable[[str], Path]


def _on(**settings: Any) -> dict[str, Any]:
    return {"additional_config": {"choreo": {"window_groups": True, **settings}}}


def _in_host(num_blocks: int) -> dict[str, Any]:
    return _on(host_memory_gib=(num_blocks + 0.5) * BLOCK_BYTES / 2**30)


def _params(max_tokens: int = 6, **options: Any) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, **{**_GREEDY, **options})


def _scheduler(llm: Any) -> Any:
    return llm.llm_engine.engine_core.engine_core.scheduler


class Events:
    """Messages that were encoded again and brought back since the last look."""

    def __init__(self, llm: Any) -> None:
        self._llm = llm
        self._seen = (0, 0)
        self.new()

    def new(self) -> tuple[int, int]:
        totals = call(self._llm, "totals")
        names = ("encoded_again_messages_total", "restored_messages_total")
        now = tuple(int(totals.get(name, 0)) for name in names)
        again, restored = now[0] - self._seen[0], now[1] - self._seen[1]
        self._seen = now[0], now[1]
        return again, restored


class Asker:
    """Questions about parts of one document, each answer compared with the oracle's."""

    def __init__(self, c: Choreography, oracle: Oracle, document: Any, tokens: list[int]) -> None:
        self._c, self._oracle, self._document = c, oracle, document
        self._encoded = oracle.encode(tokens)

    def ask(self, start: int, stop: int, new_offset: int) -> None:
        answer = self._c.decode(
            [5, 6, 7],
            parents=[(self._document, start, stop)],
            offsets=[0],
            new_offset=new_offset,
            sampling_params=_params(40),
        )
        assert_greedy(answer, self._oracle, [Parent(self._encoded, 0, start, stop)], new_offset)


@pytest.fixture(scope="module", params=sampled(MODELS, 1))
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def oracle(name: str, tiny_oracle: Callable[[str], Oracle]) -> Oracle:
    return tiny_oracle(name)


# -- host memory ---------------------------------------------------------------------------------


def test_what_was_given_up_is_not_in_host_memory_either(
    name: str, engine_slot: Slot, tiny_model_path: Paths, oracle: Oracle
) -> None:
    llm, tokens = (
        engine_slot(tiny_model_path(name), **_in_host(100)),
        random_tokens(random.Random(7), 250),
    )
    with Choreography(llm) as c:
        document = c.prefill(tokens)
        asker, events = Asker(c, oracle, document, tokens), Events(llm)
        kept = c.stats()["num_blocks"]
        c.evict(document)
        assert call(llm, "totals")["num_host_blocks_used"] == kept < 3 * 8
        asker.ask(0, 250, 250)
        assert events.new() == (0, 1)
        c.evict(document)
        asker.ask(100, 150, 50)
        assert events.new() == (1, 0), "of its middle nothing lies there"
        c.evict(document)  # while it is whole
        assert call(llm, "totals")["num_host_blocks_used"] == 3 * 8
        asker.ask(0, 250, 0)
        assert events.new() == (0, 1)
    invariants.check_nothing_is_left(_scheduler(llm))


def test_gaps_are_closed_from_host_memory_while_others_read(
    name: str, engine_slot: Slot, tiny_model_path: Paths, oracle: Oracle
) -> None:
    llm, tokens = (
        engine_slot(tiny_model_path(name), **_in_host(100)),
        random_tokens(random.Random(8), 300),
    )
    rng = random.Random(9)
    with Choreography(llm) as c:
        document = c.prefill(tokens)
        asker, events = Asker(c, oracle, document, tokens), Events(llm)
        asker.ask(0, 300, 0)
        c.evict(document)  # all of it lies in host memory
        asker.ask(0, 300, 300)
        assert events.new() == (1, 1)
        headers, encoded = [random_tokens(rng, n) for n in (3, 40, 7)], oracle.encode(tokens)
        parts = [(0, 300), (90, 140), (30, 60)]
        answers = c.decode(
            [
                {"header": h, "parents": [(document, *part)], "sampling_params": _params(30)}
                for h, part in zip(headers, parts, strict=True)
            ]
        )
        for answer, (start, stop) in zip(answers, parts, strict=True):
            assert_greedy(answer, oracle, [Parent(encoded, 0, start, stop)], stop - start)
        assert events.new() == (0, 1)
    invariants.check_nothing_is_left(_scheduler(llm))


@pytest.mark.exhaustive
@pytest.mark.parametrize("seeds", [range(n, n + 10) for n in (9200, 9210, 9220)], ids=str)
def test_random_choreographies_with_host_memory(
    name: str, engine_slot: Slot, tiny_model_path: Paths, oracle: Oracle, seeds: range
) -> None:
    options = {**_in_host(60), "num_gpu_blocks_override": 101, "max_num_batched_tokens": 128}
    llm = engine_slot(tiny_model_path(name), **options)
    draw = Draw(max_tokens=8, max_length=190)
    events = Events(llm)
    with Choreography(llm) as c:
        drawn = [draw_choreography(seed, draw) for seed in seeds]
        assert check(c, oracle, side_by_side(drawn)) < LOGPROB_TOLERANCE
    assert events.new()[1], "some came back from host memory"
    invariants.check_nothing_is_left(_scheduler(llm))


# -- files ---------------------------------------------------------------------------------------


def _ask_end(c: Choreography, document: Any) -> Any:
    return c.decode([5, 6], parents=[document], sampling_params=_params())


def test_files_have_what_a_message_keeps(
    name: str, engine_slot: Slot, tiny_model_path: Paths, oracle: Oracle, tmp_path: Path
) -> None:
    llm, tokens = engine_slot(tiny_model_path(name), **_on()), random_tokens(random.Random(11), 250)
    short = random_tokens(random.Random(12), 20)
    with Choreography(llm) as c:
        document, note = c.prefill(tokens), c.prefill(short)
        num_blocks = c.stats()["num_blocks"]
        expected = _ask_end(c, document), _ask_end(c, note)
        saved = c.save([document, note], tmp_path / "saved", encodings=True)
        of_full_blocks = BLOCK_BYTES * num_blocks
        assert 0.8 * of_full_blocks < saved.bytes < of_full_blocks + 10_000
        c.decode([4], parents=[document], new_offset=0, sampling_params=_params(1))
        whole = c.save([document], tmp_path / "whole", encodings=True)
        assert whole.bytes < saved.bytes, "nobody asks for a part of it any more"
    events = Events(llm)
    with Choreography(llm) as c:
        document, note = c.load(tmp_path / "saved")
        assert [_ask_end(c, m).token_ids for m in (document, note)] == [
            e.token_ids for e in expected
        ]
        assert events.new() == (0, 0)
        Asker(c, oracle, document, tokens).ask(100, 150, 50)
        assert events.new() == (1, 0), "its middle comes from the recipe"
    invariants.check_nothing_is_left(_scheduler(llm))


def test_files_go_into_host_memory_where_the_cache_is_full(
    name: str, engine_slot: Slot, tiny_model_path: Paths, oracle: Oracle, tmp_path: Path
) -> None:
    llm = engine_slot(tiny_model_path(name), **_in_host(100))
    tokens = random_tokens(random.Random(13), 250)
    with Choreography(llm) as c:
        c.save([c.prefill(tokens)], tmp_path / "saved", encodings=True)
    pool, events = _scheduler(llm).kv_cache_manager.block_pool, Events(llm)
    taken = pool.get_new_blocks(pool.get_num_free_blocks() - 4)
    with Choreography(llm) as c:
        (document,) = c.load(tmp_path / "saved")
        pool.free_blocks(taken)
        assert call(llm, "totals")["num_host_blocks_used"]
        Asker(c, oracle, document, tokens).ask(0, 250, 250)
        assert events.new() == (0, 1)
    invariants.check_nothing_is_left(_scheduler(llm))


def test_files_of_other_groups_are_refused_by_name_or_encoded(
    name: str, engine_slot: Slot, tiny_model_path: Paths, oracle: Oracle, tmp_path: Path
) -> None:
    """Of one group into several all goes; back only what has no gaps."""
    tokens, short = random_tokens(random.Random(14), 250), random_tokens(random.Random(15), 20)
    path = tiny_model_path(name)

    def save(llm: Any, to: str) -> None:
        with Choreography(llm) as c:
            document, note = c.prefill(tokens), c.prefill(short)
            c.save([document], tmp_path / to / "document", encodings=True)
            c.save([note], tmp_path / to / "note", encodings=True)

    def ask(llm: Any, uri: Path, text: list[int], **options: Any) -> tuple[int, int]:
        events = Events(llm)
        with Choreography(llm) as c:
            (message,) = c.load(uri, **options)
            Asker(c, oracle, message, text).ask(0, len(text), len(text))
        invariants.check_nothing_is_left(_scheduler(llm))
        return events.new()

    grouped = engine_slot(path, **_on())
    save(grouped, "grouped")
    plain = engine_slot(path)
    with Choreography(plain) as c:
        with pytest.raises(KeptError, match="window_groups") as refused:
            c.load(tmp_path / "grouped" / "document")
        assert "safetensors" in str(refused.value.value)
        assert not c.stats()["num_messages"]
    invariants.check_nothing_is_left(_scheduler(plain))
    assert ask(plain, tmp_path / "grouped" / "document", tokens, on_mismatch="encode") == (1, 0)
    assert ask(plain, tmp_path / "grouped" / "note", short) == (0, 0)
    save(plain, "plain")
    grouped = engine_slot(path, **_on())
    assert ask(grouped, tmp_path / "plain" / "document", tokens) == (0, 0)
    assert ask(grouped, tmp_path / "plain" / "note", short) == (0, 0)
