# SPDX-License-Identifier: Apache-2.0
"""Repair by layers on the real engine, against the oracle that is entered at a layer."""

from __future__ import annotations

import math
import random
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.engine.adapters import Adapter
from tests.engine.choreographies import LOGPROB_TOLERANCE
from tests.engine.layer_oracle import LayerOracle
from tests.engine.oracle import Oracle, Parent, random_tokens
from tests.engine.programs import GREEDY, Program
from tests.grids import sampled
from vllm_choreo import Choreography
from vllm_choreo.engine.step import RequestSpans, StageRun
from vllm_choreo.engine.worker.stage_writer import batches
from vllm_choreo.errors import ChoreoError, LimitError, RepairError

_MIB = 2**-10
_HIDDEN = {"choreo": {"hidden_memory_gib": 2 * _MIB}}
_NUM_LAYERS = 3  # of all tiny models here
_RANGES = [(lo, hi) for hi in range(1, _NUM_LAYERS + 1) for lo in range(hi)]
_LAYERS: list[Any] = [(), *_RANGES, [(0, 1), (2, 3)]]


# -- laws ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def llm(engine_slot: Callable[..., Any], tiny_model_path: Callable[[str], Path]) -> Any:
    return engine_slot(tiny_model_path("llama"), additional_config=_HIDDEN)


@pytest.fixture
def c(llm: Any) -> Iterator[Choreography]:
    with Choreography(llm) as session:
        yield session
    with Choreography(llm) as after:
        assert after.stats()["num_hidden_bytes"] == 0


def _memory(llm: Any) -> Any:
    """What the worker itself knows."""
    executor = llm.llm_engine.engine_core.engine_core.model_executor
    return executor.driver_worker.worker.model_runner.partial_runs.memory


def _documents(c: Choreography, seed: int, count: int = 3) -> list[Any]:
    rng = random.Random(seed)
    return [c.prefill(random_tokens(rng, 70), keep_hidden=[1, 2]) for _ in range(count)]


def _logprobs(message: Any) -> list[dict[int, float]]:
    return [{t: entry.logprob for t, entry in step.items()} for step in message.logprobs]


def _distance(one: Any, other: Any) -> float:
    pairs = zip(_logprobs(one), _logprobs(other), strict=True)
    # Answers that part have no tokens in common in the end.
    return max((abs(a[t] - b[t]) for a, b in pairs for t in a.keys() & b.keys()), default=math.inf)


def test_no_layers_change_nothing_and_all_are_a_repair_of_all(c: Choreography) -> None:
    docs = _documents(c, 1)
    call = {"parents": docs, "sampling_params": GREEDY}
    c.decode([5, 6], **call)  # beside the first step of the next runs the last token of this one
    plain = c.decode([5, 6], **call)
    none = c.decode([5, 6], layers=(), **call)
    assert _logprobs(none) == _logprobs(plain) and none.usage == plain.usage
    everything = c.decode([5, 6], repair="all", **call)
    layers = c.decode([5, 6], layers=(0, _NUM_LAYERS), **call)
    assert _distance(layers, everything) < 1e-4 and layers.usage.exact
    # What the first of the layers stores depends on its hidden states alone.
    for first in range(_NUM_LAYERS):
        one = c.decode([5, 6], layers=(first, first + 1), **call)
        assert _distance(one, plain) < 1e-4 and one.usage.repaired_tokens == 140
    middle = c.decode([5, 6], layers=(1, 3), **call)
    assert _distance(middle, plain) > 1e-2 < _distance(middle, everything)


def test_keeping_changes_nothing(c: Choreography) -> None:
    prompt = random_tokens(random.Random(2), 40)
    c.decode(prompt, sampling_params=GREEDY)
    # A twin would be started from: each has a token of its own before it.
    plain, kept = (
        c.decode(prompt, parents=[c.prefill([9])], sampling_params=GREEDY, keep_hidden=keep)
        for keep in ([], [1, 2])
    )
    assert _logprobs(plain) == _logprobs(kept)


def test_readers_share_a_copy_and_its_price_is_that_of_its_layers(c: Choreography) -> None:
    docs = _documents(c, 3)
    calls = [{"tokens": [11, number], "parents": docs} for number in range(5)]
    readers = c.prefill(calls, layers=(1, 3))
    assert [reader.usage.repaired_tokens for reader in readers] == [140] * 5
    # 70 tokens through two of three layers, as 47 through all.
    assert sum(reader.usage.encoded_tokens for reader in readers) == 2 * 47 + 5 * 2
    assert c.stats()["num_copies"] == 2


def test_all_parents_and_the_reader_take_one_step(
    llm: Any, c: Choreography, monkeypatch: pytest.MonkeyPatch
) -> None:
    docs = _documents(c, 4)
    c.prefill([7])  # the step of the last document's last neighbours is over
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    steps: list[tuple[int, int]] = []
    schedule = scheduler.schedule

    def spy(*args: Any, **kwargs: Any) -> Any:
        output = schedule(*args, **kwargs)
        steps.append((output.total_num_scheduled_tokens, len(output.choreo.stages)))
        return output

    monkeypatch.setattr(scheduler, "schedule", spy)
    c.prefill([5, 6, 7], parents=docs, layers=(1, 3))
    assert [step for step in steps if any(step)] == [(3, 2)]


def test_hidden_states_are_counted_and_outlive_keys_and_values(llm: Any, c: Choreography) -> None:
    docs = _documents(c, 5)
    decoded = c.decode([8] * 30, parents=docs, sampling_params=GREEDY, keep_hidden=[1])
    rows = 3 * 2 * 96 + 64  # whole blocks of 32
    assert c.stats()["num_hidden_bytes"] == _memory(llm).num_bytes == rows * 128 * 4
    read = {"parents": [*docs, decoded], "layers": (1, 3), "sampling_params": GREEDY}
    before = c.decode([8], **read)
    c.evict(*docs, decoded, before)
    assert c.stats()["num_hidden_bytes"] == rows * 128 * 4
    assert _distance(before, c.decode([8], **read)) < LOGPROB_TOLERANCE
    c.free(*docs, decoded)
    for _ in range(2):  # the last answer is complete and reads no more; workers are told
        c.prefill([3])
    assert c.stats()["num_hidden_bytes"] == _memory(llm).num_bytes == 0


def test_two_tenants_share_nothing(llm: Any) -> None:
    encoded = []
    for tenant in "ab":
        with Choreography(llm, tenant=tenant) as c:
            docs = _documents(c, 6)
            encoded.append(c.prefill([7], parents=docs, layers=(1, 3)).usage.encoded_tokens)
    assert encoded == [95, 95]


def test_a_session_repairs_by_layers(llm: Any) -> None:
    with Choreography(llm, repair={"layers": [1, 3]}) as c:
        docs = [c.prefill([number] * 70) for number in (5, 6, 7)]
        assert c.prefill([3], parents=docs).usage.repaired_tokens == 140
        assert c.prefill([3], parents=docs, layers=()).usage.repaired_tokens == 0


@pytest.mark.parametrize(
    ("options", "error", "found"),
    [
        ({"layers": (1, 4)}, RepairError, "the model has 3 layers"),
        ({"layers": (2, 1)}, RepairError, "0 <= first < stop"),
        ({"layers": [(0, 1), (1, 2)]}, RepairError, "a layer between two of them"),
        ({"layers": [(0, 1), 2]}, RepairError, "0 <= first < stop"),
        ({"layers": [(0, 1), (2, 3)]}, RepairError, "keep_hidden=[2]"),
        ({"layers": "12"}, RepairError, '"reuse", "encode" or "auto"'),
        ({"layers": 12}, ChoreoError, "must be a list"),
        ({"layers": (1, 3), "repair": "all"}, RepairError, "either repair or layers"),
        ({"layers": (1, 3), "mode": "exact"}, RepairError, "mode 'exact'"),
        ({"layers": (2, 3)}, RepairError, "keep_hidden=[2]"),
        ({"keep_hidden": [3]}, ChoreoError, "the last one is 2"),
        ({"keep_hidden": [0]}, ChoreoError, "from 1 on"),
    ],
)
def test_bad_layers_are_refused_by_name(
    c: Choreography, options: dict[str, Any], error: type[ChoreoError], found: str
) -> None:
    docs = [c.prefill([number] * 40, keep_hidden=[1]) for number in (5, 6)]
    with pytest.raises(error, match=re.escape(found)):
        c.prefill([4], parents=docs, **options)
    assert c.prefill([4], parents=docs, layers=(1, 3)).usage.repaired_tokens == 40


def test_hidden_states_have_a_limit(c: Choreography) -> None:
    kept = [c.prefill([number] * 500, keep_hidden=[1, 2]) for number in range(3, 7)]
    with pytest.raises(LimitError, match="hidden_memory_gib"):
        c.prefill([7] * 500, keep_hidden=[1, 2])
    c.free(kept[0])
    c.prefill([7] * 500, keep_hidden=[1, 2])


def test_the_page_on_repair_runs(llm: Any) -> None:
    page = (Path(__file__).parents[2] / "docs" / "repair.md").read_text(encoding="utf-8")
    scope = {"llm": llm}
    blocks = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    assert len(blocks) == 6
    for block in blocks:
        exec(compile(block, "repair.md", "exec"), scope)
    scope["c"].close()


def test_runs_go_through_the_model_in_order_and_in_parts() -> None:
    rng = random.Random(0)
    for _ in range(50):
        lengths = [rng.randint(1, 20) for _ in range(rng.randint(0, 9))]
        spans = RequestSpans((), (), (), (), 0)
        runs = [
            StageRun((rng.choice([(0, 2), (1, 3)]),), spans, ((),), 0, (7,) * length, None, 0)
            for length in lengths
        ]
        run, done = 0, 0
        for batch in batches(runs, 8):
            assert 0 < sum(piece.num_tokens for piece in batch) <= 8
            assert len({piece.run.layers for piece in batch}) == 1
            for piece in batch:
                assert piece.run is runs[run] and piece.begin == done
                done = piece.end
                if done == lengths[run]:
                    run, done = run + 1, 0
        assert (run, done) == (len(runs), 0)


# -- random programs, against the oracle ---------------------------------------------------------


@pytest.fixture(scope="module", params=sampled(("llama", "qwen3", "bloom", "glm4"), 3))
def tiny(
    request: pytest.FixtureRequest,
    engine_slot: Callable[..., Any],
    tiny_model_path: Callable[[str], Path],
    tiny_oracle: Callable[[str], Oracle],
) -> tuple[Any, Oracle]:
    llm = engine_slot(tiny_model_path(request.param), additional_config=_HIDDEN)
    return llm, tiny_oracle(request.param)


@dataclass
class LayersProgram(Program):
    """Calls that repair by random layers.

    Attributes:
        oracle: of calls without an adapter.
        variants: of those with one: its request, and the oracle of the model with the adapter.
    """

    oracle: LayerOracle
    variants: Sequence[tuple[Any, LayerOracle]] = ()

    def options(self) -> tuple[dict[str, Any], list[Parent]]:
        rng = self.rng
        spans, parents, offset = self.spans()
        adapter, _ = rng.choice(self._models)
        options = {
            "parents": spans,
            "offsets": [parent.offset for parent in parents],
            "new_offset": offset + rng.choice((0, 0, 25)),
            "keep_hidden": [1, 2],
            "adapter": adapter,
            "layers": rng.choice(_LAYERS),
        }
        return options, parents

    def repaired(
        self, options: dict[str, Any], parents: list[Parent], header: list[int]
    ) -> list[Parent]:
        layers = options["layers"]
        ranges = [layers] if layers and isinstance(layers[0], int) else layers
        return self.oracle_of(options).repair(parents, [range(*ends) for ends in ranges])

    def oracle_of(self, options: dict[str, Any]) -> LayerOracle:
        return next(oracle for adapter, oracle in self._models if adapter is options["adapter"])

    @property
    def _models(self) -> list[tuple[Any, LayerOracle]]:
        return [(None, self.oracle), *self.variants]


@pytest.mark.parametrize("seed", sampled(range(25), 2))
def test_random_layers(tiny: tuple[Any, Oracle], seed: int) -> None:
    llm, oracle = tiny
    with Choreography(llm) as c:
        free = c.stats()["num_free_blocks"]
        program = LayersProgram(c, LayerOracle(oracle), random.Random(seed))
        for _ in range(6):
            program.step()
    with Choreography(llm) as c:
        stats = c.stats()
        assert (stats["num_free_blocks"], stats["num_hidden_bytes"]) == (free, 0)


@pytest.fixture(scope="module", params=sampled(("llama", "qwen3"), 1))
def variants(
    request: pytest.FixtureRequest,
    engine_slot: Callable[..., Any],
    tiny_model_path: Callable[[str], Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[Any, Path, list[Adapter]]:
    """An engine with two adapters for one place."""
    path, folder = tiny_model_path(request.param), tmp_path_factory.mktemp("variants")
    adapters = [Adapter(path, folder, number) for number in (1, 2)]
    lora = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 8}
    return engine_slot(path, additional_config=_HIDDEN, **lora), path, adapters


@pytest.mark.parametrize("seed", sampled(range(200, 220), 2))
def test_random_layers_of_variants(
    variants: tuple[Any, Path, list[Adapter]], tiny_oracle: Callable[[str], Oracle], seed: int
) -> None:
    """Messages of one adapter, or of none, are read by calls of another."""
    llm, path, adapters = variants
    base = LayerOracle(tiny_oracle(path.name))
    others = [(adapter.request, LayerOracle(adapter.oracle, base)) for adapter in adapters]
    with Choreography(llm) as c:
        program = LayersProgram(c, base, random.Random(seed), variants=others)
        for _ in range(6):
            program.step()


def test_a_variant_encodes_all_layers_or_none(variants: tuple[Any, Path, list[Adapter]]) -> None:
    llm, _, (one, two) = variants
    with Choreography(llm) as c:
        tokens = [random_tokens(random.Random(seed), 50) for seed in (1, 2)]
        docs = [c.prefill(t, adapter=one.request, keep_hidden=[1]) for t in tokens]
        own = [c.prefill(tokens[0], adapter=two.request)]
        own.append(c.prefill(tokens[1], parents=own, adapter=two.request))
        call: dict[str, Any] = {"sampling_params": GREEDY, "adapter": two.request}
        c.decode([5], parents=docs, **call)
        reused = c.decode([5], parents=docs, **call)
        none = c.decode([5], parents=docs, layers=(), **call)
        assert _logprobs(none) == _logprobs(reused)
        everything = c.decode([5], parents=docs, layers=(0, _NUM_LAYERS), **call)
        expected = c.decode([5], parents=own, **call)
        assert _distance(everything, expected) < 1e-4 and everything.usage.exact
        some = c.decode([5], parents=docs, layers=(1, 3), **call)
        assert _distance(some, expected) > 1e-3 < _distance(some, reused)
        assert some.usage.repaired_tokens == 100


@pytest.mark.parametrize("seed", sampled(range(100, 110), 2))
@pytest.mark.parametrize("reposition", sampled(["in_place", "query"], 1))
def test_random_layers_in_a_small_pool(
    engine_slot: Callable[..., Any],
    tiny_model_path: Callable[[str], Path],
    tiny_oracle: Callable[[str], Oracle],
    reposition: str,
    seed: int,
) -> None:
    """Copies and their sources are evicted and made again; runs are longer than a step."""
    choreo = {"reposition": reposition, "host_memory_gib": 0.0005, "hidden_memory_gib": 2 * _MIB}
    llm = engine_slot(
        tiny_model_path("llama"),
        num_gpu_blocks_override=30,
        max_model_len=640,
        max_num_batched_tokens=64,
        additional_config={"choreo": choreo},
    )
    with Choreography(llm) as c:
        free = c.stats()["num_free_blocks"]
        program = LayersProgram(c, LayerOracle(tiny_oracle("llama")), random.Random(seed))
        for number in range(8):
            program.step()
            if number == 5:
                c.evict(*(message for message, _ in program.made))
        assert c.stats()["num_evictions"] > 0
    with Choreography(llm) as c:
        stats = c.stats()
        assert (stats["num_free_blocks"], stats["num_hidden_bytes"]) == (free, 0)
