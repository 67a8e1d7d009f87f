# SPDX-License-Identifier: Apache-2.0
"""Repaired calls on the real engine, against the dense oracle's definition of repair."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.engine.choreographies import LOGPROB_TOLERANCE
from tests.engine.oracle import Oracle, Parent, random_tokens
from tests.engine.programs import GREEDY, Program
from tests.grids import sampled
from vllm_choreo import Choreography
from vllm_choreo.errors import DeniedMessageError, RepairError, UnsupportedOptionError
from vllm_choreo.semantics.message import Message

_MODELS = sampled(("llama", "qwen3", "gemma3", "bloom", "glm4", "paddleocr_vl"), 4)


# -- laws ----------------------------------------------------------------------------------------


@pytest.fixture
def llm(plain_llama: Any) -> Any:
    return plain_llama


@pytest.fixture
def c(llm: Any) -> Iterator[Choreography]:
    with Choreography(llm) as session:
        yield session


def _documents(c: Choreography, rng: random.Random, count: int = 3) -> list[Any]:
    return [c.prefill(random_tokens(rng, 70)) for _ in range(count)]


def _logprobs(message: Any) -> list[dict[int, float]]:
    return [{t: entry.logprob for t, entry in step.items()} for step in message.logprobs]


def test_no_runs_change_nothing(c: Choreography) -> None:
    """Bit for bit, whichever way one says it."""
    docs = _documents(c, random.Random(1))
    header = [5, 6, 7]
    # Beside the first step of a call runs the last token of the one before: here the same for all.
    c.decode(header, parents=docs, sampling_params=GREEDY)
    plain = c.decode(header, parents=docs, sampling_params=GREEDY)
    for rule in ("none", [[], [], []], {"share": 0, "by": "random"}):
        again = c.decode(header, parents=docs, repair=rule, sampling_params=GREEDY)
        assert _logprobs(again) == _logprobs(plain) and again.usage == plain.usage
    # Nothing stands before the first parent: it is what it would be.
    first = c.decode(header, parents=docs[:1], repair="first:9", sampling_params=GREEDY)
    assert first.usage.repaired_tokens == 0 and first.usage.exact


def test_all_tokens_are_exact_mode(c: Choreography) -> None:
    docs = _documents(c, random.Random(2))
    exact = c.decode([5, 6], parents=docs, mode="exact", sampling_params=GREEDY)
    repaired = c.decode([5, 6], parents=docs, repair="all", sampling_params=GREEDY)
    assert repaired.usage.exact and repaired.usage.repaired_tokens == 140
    for one, other in zip(_logprobs(exact), _logprobs(repaired), strict=True):
        assert all(abs(one[t] - other[t]) < 1e-4 for t in one.keys() & other.keys())
    # The very copies of exact mode.
    assert repaired.usage.encoded_tokens == repaired.num_tokens


def test_a_parent_is_right_only_where_it_was_encoded(c: Choreography) -> None:
    first = c.prefill([5] * 20)
    second = c.prefill([6] * 20, parents=[first])
    for offsets, repaired in (([0, 20], 0), ([7, 27], 0), ([0, 21], 8), ([0, 19], 8), ([30, 0], 8)):
        named = {"parents": [first, second], "offsets": offsets}
        assert c.prefill([7], repair="first:8", **named).usage.repaired_tokens == repaired
    assert c.prefill([7], parents=[second], repair="first:8").usage.repaired_tokens == 8


def test_readers_with_one_context_hold_one_copy(c: Choreography) -> None:
    """Five readers of three documents of three blocks: one private block per repaired head."""
    docs = _documents(c, random.Random(3))
    c.decode([9], parents=docs, sampling_params=GREEDY)  # whatever else needs blocks has them
    used = c.stats()["num_free_blocks"]
    calls = [{"tokens": [11, number], "parents": docs} for number in range(5)]
    readers = c.prefill(calls, repair="first:8")
    assert used - c.stats()["num_free_blocks"] == 2 + len(readers)
    assert [reader.usage.repaired_tokens for reader in readers] == [16] * 5
    assert sum(reader.usage.encoded_tokens for reader in readers) == 16 + 5 * 2


def test_one_step_for_heads_middles_and_the_reader(
    llm: Any, c: Choreography, monkeypatch: pytest.MonkeyPatch
) -> None:
    docs = _documents(c, random.Random(4))
    steps = _watched(llm, monkeypatch)
    runs = [[], [(0, 8), (33, 40), (60, 64)], [(0, 8), (69, 70)]]
    c.prefill([5, 6, 7], parents=docs, repair=runs)
    assert [count for count in steps if count] == [8 + 7 + 4 + 8 + 1 + 3]


def test_one_step_also_behind_what_was_just_said(
    llm: Any, c: Choreography, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Copies are not begun before what they read, while that waits for an answer's last token."""
    task = c.prefill(random_tokens(random.Random(5), 40))
    note = c.prefill([7] * 10, parents=[task])
    calls = [{"header": [9 + n] * 20, "parents": [task]} for n in range(2)]
    said = c.decode(calls, sampling_params=GREEDY)
    steps = _watched(llm, monkeypatch)
    c.prefill([5, 6, 7], parents=[task, *said, note], repair="first:12")
    assert [count for count in steps if count] == [2, 12 + 10 + 3]


def _watched(llm: Any, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows by the tokens of each step from now on."""
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    steps: list[int] = []
    schedule = scheduler.schedule

    def spy(*args: Any, **kwargs: Any) -> Any:
        output = schedule(*args, **kwargs)
        steps.append(output.total_num_scheduled_tokens)
        return output

    monkeypatch.setattr(scheduler, "schedule", spy)
    return steps


def test_two_tenants_share_no_repair(llm: Any) -> None:
    rng = random.Random(5)
    texts = [random_tokens(rng, 40) for _ in range(2)]
    encoded = []
    for tenant in "ab":
        with Choreography(llm, tenant=tenant) as c:
            docs = [c.prefill(text) for text in texts]
            reader = c.prefill([7], parents=docs, repair="first:8")
            encoded.append(reader.usage.encoded_tokens)
    assert encoded == [9, 9]


def test_a_repaired_message_is_made_again_as_it_was(c: Choreography) -> None:
    docs = _documents(c, random.Random(6))
    child = c.prefill(random_tokens(random.Random(7), 40), parents=docs, repair="first:16")
    before = c.decode([8], parents=[*docs, child], repair="first:16", sampling_params=GREEDY)
    c.evict(*docs, child)
    after = c.decode([8], parents=[*docs, child], repair="first:16", sampling_params=GREEDY)
    for one, other in zip(_logprobs(before), _logprobs(after), strict=True):
        assert all(abs(one[t] - other[t]) < LOGPROB_TOLERANCE for t in one)
    # The child was encoded with the repaired documents, and right behind them.
    assert after.usage.repaired_tokens == 2 * 16


def test_repairs_carry_traces_and_denial_holds(c: Choreography) -> None:
    secret = c.prefill([5, 6, 7])
    doc = c.prefill(random_tokens(random.Random(8), 40), parents=[secret])
    other = c.prefill(random_tokens(random.Random(9), 40))
    reader = c.prefill([4], parents=[other, doc], repair="first:8")
    assert {secret.id, doc.id, other.id} <= reader.provenance
    with pytest.raises(DeniedMessageError):
        c.prefill([4], parents=[other, doc], repair="first:8", deny=[secret])


def test_freed_messages_give_their_repairs_back(c: Choreography) -> None:
    free = c.stats()["num_free_blocks"]
    docs = _documents(c, random.Random(10))
    reader = c.prefill([4], parents=docs, repair={"share": 0.5, "by": "random"})
    c.free(*docs, reader)
    assert c.stats()["num_free_blocks"] == free


def test_a_session_repairs(llm: Any) -> None:
    with Choreography(llm, repair="first:8") as c:
        docs = _documents(c, random.Random(11))
        assert c.prefill([3], parents=docs).usage.repaired_tokens == 16
        assert c.prefill([3], parents=docs, repair="none").usage.repaired_tokens == 0
        assert c.prefill([3], parents=docs, mode="exact").usage.exact
    with Choreography(llm, mode="baseline", repair="first:8") as c:
        assert c.prefill([3], parents=[c.prefill([4, 5])]).usage.repaired_tokens == 0


@pytest.mark.parametrize(
    ("repair", "found"),
    [
        ([[(0, 8)], [], []], "behind the 5 tokens"),
        ([[(0, 2)]], "3 parents, 1 lists"),
        ([[(0, 3), (2, 4)], [], []], "overlap"),
        ({"share": 1.2, "by": "random"}, "from 0 to 1"),
        ("best:4", "a rule is"),
    ],
)
def test_bad_repairs_are_refused_by_name(c: Choreography, repair: Any, found: str) -> None:
    docs = [c.prefill([5, 6, 7, 8, 9]) for _ in range(3)]
    with pytest.raises(RepairError, match=re.escape(found)) as caught:
        c.prefill([4], parents=docs, repair=repair)
    assert caught.value.parameter.startswith("repair")
    assert c.prefill([4], parents=docs, repair="first:2").usage.repaired_tokens == 4


def test_a_session_in_exact_mode_has_no_rule(llm: Any) -> None:
    with pytest.raises(RepairError, match="mode 'exact'"):
        Choreography(llm, mode="exact", repair="first:8")


def test_an_engine_without_memory_for_hidden_states_says_so(c: Choreography) -> None:
    docs = _documents(c, random.Random(12), 2)
    for options in ({"layers": (0, 2)}, {"keep_hidden": [1]}):
        with pytest.raises(UnsupportedOptionError, match="hidden_memory_gib"):
            c.prefill([4], parents=docs, **options)


# -- random programs, against the oracle ---------------------------------------------------------


@pytest.fixture(scope="module", params=_MODELS)
def tiny(
    request: pytest.FixtureRequest,
    engine_slot: Callable[..., Any],
    tiny_model_path: Callable[[str], Path],
    tiny_oracle: Callable[[str], Oracle],
) -> tuple[Any, Oracle]:
    return engine_slot(tiny_model_path(request.param)), tiny_oracle(request.param)


def _random_runs(rng: random.Random, num_tokens: int) -> list[tuple[int, int]]:
    """Runs that do not touch, or none, or all tokens."""
    kind = rng.random()
    if kind < 0.2:
        return []
    if kind < 0.3:
        return [(0, num_tokens)]
    ends = sorted(rng.sample(range(num_tokens + 1), min(num_tokens + 1, 2 * rng.randint(1, 3))))
    return [(ends[i], ends[i + 1]) for i in range(0, len(ends) - 1, 2)]


class RunsProgram(Program):
    """Calls that repair random runs."""

    def options(self) -> tuple[dict[str, Any], list[Parent]]:
        spans, parents, offset = self.spans()
        new_offset = offset + self.rng.choice((0, 0, 25))
        runs = [_random_runs(self.rng, stop - start) for _, start, stop in spans]
        offsets = [parent.offset for parent in parents]
        named = {"parents": spans, "offsets": offsets, "new_offset": new_offset, "repair": runs}
        return named, parents

    def repaired(
        self, options: dict[str, Any], parents: list[Parent], header: list[int]
    ) -> list[Parent]:
        return self.oracle.repair(parents, options["repair"])

    def check(self, message: Message, options: dict[str, Any]) -> None:
        given = sum(stop - start for runs in options["repair"] for start, stop in runs)
        assert message.usage.repaired_tokens <= given


@pytest.mark.parametrize("seed", sampled(range(17), 2))
def test_random_repairs(tiny: tuple[Any, Oracle], seed: int) -> None:
    llm, oracle = tiny
    with Choreography(llm) as c:
        free = c.stats()["num_free_blocks"]
        program = RunsProgram(c, oracle, random.Random(seed))
        for _ in range(6):
            program.step()
    with Choreography(llm) as c:
        assert c.stats()["num_free_blocks"] == free


@pytest.mark.parametrize("seed", sampled(range(100, 105), 1))
@pytest.mark.parametrize("reposition", sampled(["in_place", "query"], 1))
def test_random_repairs_in_a_small_pool(
    engine_slot: Callable[..., Any],
    tiny_model_path: Callable[[str], Path],
    tiny_oracle: Callable[[str], Oracle],
    reposition: str,
    seed: int,
) -> None:
    """Patches and their sources are evicted, made again, and saved to host memory."""
    llm = engine_slot(
        tiny_model_path("llama"),
        num_gpu_blocks_override=26,
        max_model_len=640,
        max_num_batched_tokens=64,
        additional_config={"choreo": {"reposition": reposition, "host_memory_gib": 0.0005}},
    )
    with Choreography(llm) as c:
        free = c.stats()["num_free_blocks"]
        program = RunsProgram(c, tiny_oracle("llama"), random.Random(seed))
        for number in range(8):
            program.step()
            if number == 5:
                c.evict(*(message for message, _ in program.made))
        assert c.stats()["num_evictions"] > 0
    with Choreography(llm) as c:
        assert c.stats()["num_free_blocks"] == free
