# SPDX-License-Identifier: Apache-2.0
"""Repair where a call looks, on the real engine, against the dense oracle's attention weights."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from vllm import SamplingParams

from tests.engine.adapters import Adapter
from tests.engine.attention_oracle import AttentionOracle
from tests.engine.engines import BLOCK_SIZE
from tests.engine.oracle import Oracle, Parent, random_tokens
from tests.engine.programs import GREEDY, Program
from tests.grids import sampled
from vllm_choreo import Choreography
from vllm_choreo.errors import RepairError, UnsupportedOptionError

_HIDDEN = {"choreo": {"hidden_memory_gib": 2**-9}}


def _by(share: float) -> dict[str, Any]:
    return {"share": share, "by": "attention"}


# -- laws ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def llm(engine_slot: Callable[..., Any], tiny_model_path: Callable[[str], Path]) -> Any:
    return engine_slot(tiny_model_path("llama"), additional_config=_HIDDEN)


@pytest.fixture
def c(llm: Any) -> Iterator[Choreography]:
    with Choreography(llm) as session:
        yield session


def _documents(c: Choreography, seed: int, count: int = 3) -> list[Any]:
    rng = random.Random(seed)
    return [c.prefill(random_tokens(rng, 70)) for _ in range(count)]


def _logprobs(message: Any) -> list[dict[int, float]]:
    return [{t: entry.logprob for t, entry in step.items()} for step in message.logprobs]


def _scheduler(llm: Any) -> Any:
    return llm.llm_engine.engine_core.engine_core.scheduler


def _scored(llm: Any) -> int:
    return _scheduler(llm).store.totals["scored_tokens"]


def test_no_share_is_no_repair_and_a_share_of_one_is_all(llm: Any, c: Choreography) -> None:
    docs = _documents(c, 1)
    call = {"parents": docs, "sampling_params": GREEDY}
    c.decode([5, 6], **call)  # beside the first step of the next runs the last token of this one
    plain, before = c.decode([5, 6], **call), _scored(llm)
    none = c.decode([5, 6], repair=_by(0), **call)
    assert _logprobs(none) == _logprobs(plain) and none.usage == plain.usage
    everything = c.decode([5, 6], repair="all", **call)
    assert _scored(llm) == before
    every_block = c.decode([5, 6], repair=_by(1), **call)
    assert every_block.usage.repaired_tokens == 140 and every_block.usage.exact
    for found, expected in zip(_logprobs(every_block), _logprobs(everything), strict=True):
        assert found == pytest.approx(expected, abs=1e-4)
    assert _scored(llm) == before + 2


def test_what_is_read_as_it_was_encoded_is_not_looked_at(llm: Any, c: Choreography) -> None:
    first = c.prefill(random_tokens(random.Random(2), 70))
    second = c.prefill([7] * 50, parents=[first])
    before = _scored(llm)
    read = c.prefill([3], parents=[first, second], repair=_by(0.9))
    assert read.usage.exact and _scored(llm) == before
    # Of 70 tokens behind the first parent, the largest block that half of them pay for.
    other = c.prefill(random_tokens(random.Random(3), 70))
    found = c.prefill([3, 4, 5], parents=[first, other], repair=_by(0.5))
    assert found.usage.repaired_tokens == 32 and _scored(llm) == before + 3


def test_readers_share_what_they_choose_alike(c: Choreography) -> None:
    docs = _documents(c, 4)
    calls = [{"tokens": [11, 12, 13], "parents": docs} for _ in range(5)]
    readers = c.prefill(calls, repair=_by(0.5))
    assert len({reader.usage.repaired_tokens for reader in readers}) == 1
    assert c.stats()["num_copies"] <= 2
    blocks = c.stats()["num_blocks"]
    c.prefill([11, 12, 13], parents=docs, repair=_by(0.5))
    assert c.stats()["num_blocks"] <= blocks + 1


def test_a_call_takes_one_step_more(llm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with Choreography(llm) as c:
        docs = _documents(c, 5)
        c.prefill([7])  # the step of the last document's last neighbours is over
        steps: list[tuple[int, int]] = []
        scheduler = _scheduler(llm)
        schedule = scheduler.schedule

        def spy(*args: Any, **kwargs: Any) -> Any:
            output = schedule(*args, **kwargs)
            steps.append((output.total_num_scheduled_tokens, len(output.choreo.stages)))
            return output

        monkeypatch.setattr(scheduler, "schedule", spy)
        found = c.prefill([5, 6, 7], parents=docs, repair=_by(0.5))
        repaired = found.usage.repaired_tokens
        assert [step for step in steps if any(step)] == [(0, 1), (3 + repaired, 0)]


@pytest.mark.parametrize("num_steps", range(4))
def test_a_call_that_ends_while_it_looks_leaves_nothing(llm: Any, num_steps: int) -> None:
    engine = llm.llm_engine
    with Choreography(llm) as c:
        free = c.stats()["num_free_blocks"]
        docs = [doc.id for doc in _documents(c, 6)]
        call = {"session": c.session, "save_as": "gone", "parents": docs, "repair": _by(0.5)}
        params = SamplingParams(max_tokens=4, extra_args={"choreo": call})
        engine.add_request("looks", {"prompt_token_ids": [5, 6]}, params)
        for _ in range(num_steps):
            engine.step()
        engine.abort_request(["looks"])
        while engine.has_unfinished_requests():
            engine.step()
        assert len(c.decode([5], parents=docs, sampling_params=GREEDY).generated_token_ids) == 4
    with Choreography(llm) as c:
        assert c.stats()["num_free_blocks"] == free


def test_children_of_a_call_that_looks_wait_for_it(c: Choreography) -> None:
    docs = _documents(c, 7)
    looked = [{"tokens": [5, 6], "parents": docs, "repair": _by(0.5)} for _ in range(2)]
    one, two = c.prefill(looked)
    answer = c.decode([9], parents=[one, two], repair=_by(0.5), sampling_params=GREEDY)
    assert len(answer.generated_token_ids) == 4 and answer.usage.repaired_tokens == 2


def test_two_tenants_share_nothing(llm: Any) -> None:
    encoded = []
    for tenant in "ab":
        with Choreography(llm, tenant=tenant) as c:
            docs = _documents(c, 8)
            encoded.append(c.prefill([7], parents=docs, repair=_by(0.5)).usage)
    assert encoded[0] == encoded[1] and encoded[0].repaired_tokens > 0


def test_a_session_repairs_by_attention(llm: Any) -> None:
    with Choreography(llm, repair=_by(0.5)) as c:
        docs = _documents(c, 9)
        assert c.prefill([3], parents=docs).usage.repaired_tokens > 0
        assert c.prefill([3], parents=docs, repair="none").usage.repaired_tokens == 0


@pytest.mark.parametrize("share", [-0.1, 1.1, "half", True, None])
def test_bad_shares_are_refused(c: Choreography, share: Any) -> None:
    with pytest.raises(RepairError, match=r"share of the parents' tokens"):
        c.prefill([3], parents=_documents(c, 10, 1), repair=_by(share))


def test_an_engine_without_memory_for_hidden_states_says_so(
    engine_slot: Callable[..., Any], tiny_model_path: Callable[[str], Path]
) -> None:
    with Choreography(engine_slot(tiny_model_path("llama"))) as c:
        docs = _documents(c, 11)
        with pytest.raises(UnsupportedOptionError, match="hidden_memory_gib"):
            c.prefill([3], parents=docs, repair=_by(0.5))
        assert c.prefill([3], parents=docs, repair=_by(0)).usage.repaired_tokens == 0


# -- random programs, against the oracle ---------------------------------------------------------


@dataclass
class AttentionProgram(Program):
    """Calls that repair where they look.

    Attributes:
        variants: adapters, and the oracles of the model with them.
    """

    variants: Sequence[tuple[Any, Oracle]] = ()

    def options(self) -> tuple[dict[str, Any], list[Parent]]:
        spans, parents, offset = self.spans()
        adapter, _ = self.rng.choice([(None, self.oracle), *self.variants])
        options = {
            "parents": spans,
            "offsets": [parent.offset for parent in parents],
            "new_offset": offset + self.rng.choice((0, 0, 25)),
            "adapter": adapter,
            "repair": _by(self.rng.choice((0.2, 0.5, 0.9))),
        }
        return options, parents

    def oracle_of(self, options: dict[str, Any]) -> Oracle:
        models = [(None, self.oracle), *self.variants]
        return next(oracle for adapter, oracle in models if adapter is options["adapter"])

    def repaired(
        self, options: dict[str, Any], parents: list[Parent], header: list[int]
    ) -> list[Parent]:
        return AttentionOracle(self.oracle_of(options)).repair(
            header,
            parents,
            options["new_offset"],
            options["repair"]["share"],
            BLOCK_SIZE,
            self._num_unchanged(options["adapter"], parents),
        )

    def _num_unchanged(self, adapter: Any, parents: list[Parent]) -> int:
        """Of the first parents that were encoded after the very ones that stand before them."""
        for number, parent in enumerate(parents):
            named, read = self.reads[id(parent.message)]
            shift = parent.offset - named["new_offset"]
            seen = [(id(p.message), p.start, p.stop, p.offset + shift) for p in read]
            now = [(id(p.message), p.start, p.stop, p.offset) for p in parents[:number]]
            if parent.start or named["adapter"] is not adapter or seen != now:
                return number
        return len(parents)


def _run(llm: Any, program: Callable[[Choreography], Program], num_steps: int = 6) -> None:
    with Choreography(llm) as c:
        free, random_program = c.stats()["num_free_blocks"], program(c)
        for number in range(num_steps):
            random_program.step()
            if number == 5:
                c.evict(*(message for message, _ in random_program.made))
    with Choreography(llm) as c:
        assert c.stats()["num_free_blocks"] == free


@pytest.fixture(scope="module", params=sampled(("llama", "gemma3", "bloom", "qwen3", "glm4"), 3))
def tiny(
    request: pytest.FixtureRequest,
    engine_slot: Callable[..., Any],
    tiny_model_path: Callable[[str], Path],
    tiny_oracle: Callable[[str], Oracle],
) -> tuple[Any, Oracle]:
    llm = engine_slot(tiny_model_path(request.param), additional_config=_HIDDEN)
    return llm, tiny_oracle(request.param)


@pytest.mark.parametrize("seed", sampled(range(25), 2))
def test_random_calls(tiny: tuple[Any, Oracle], seed: int) -> None:
    llm, oracle = tiny
    _run(llm, lambda c: AttentionProgram(c, oracle, random.Random(seed)))


@pytest.mark.parametrize("seed", sampled(range(200, 210), 2))
def test_random_calls_of_variants(
    engine_slot: Callable[..., Any],
    tiny_model_path: Callable[[str], Path],
    tiny_oracle: Callable[[str], Oracle],
    tmp_path: Path,
    seed: int,
) -> None:
    path = tiny_model_path("llama")
    adapters = [Adapter(path, tmp_path, number) for number in (1, 2)]
    variants = [(adapter.request, adapter.oracle) for adapter in adapters]
    lora = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 8}
    llm = engine_slot(path, additional_config=_HIDDEN, **lora)
    oracle = tiny_oracle("llama")
    _run(llm, lambda c: AttentionProgram(c, oracle, random.Random(seed), variants=variants))


@pytest.mark.parametrize("seed", sampled(range(100, 110), 2))
@pytest.mark.parametrize("reposition", sampled(["in_place", "query"], 1))
def test_random_calls_in_a_small_pool(
    engine_slot: Callable[..., Any],
    tiny_model_path: Callable[[str], Path],
    tiny_oracle: Callable[[str], Oracle],
    reposition: str,
    seed: int,
) -> None:
    """What is looked at is evicted, encoded again, and longer than a step."""
    choreo = {"reposition": reposition, "host_memory_gib": 0.0005, "hidden_memory_gib": 2**-9}
    llm = engine_slot(
        tiny_model_path("llama"),
        num_gpu_blocks_override=30,
        max_model_len=640,
        max_num_batched_tokens=64,
        additional_config={"choreo": choreo},
    )
    oracle = tiny_oracle("llama")
    _run(llm, lambda c: AttentionProgram(c, oracle, random.Random(seed)), num_steps=8)
