# SPDX-License-Identifier: Apache-2.0
"""KV caches in 8 bits: every request against the dense pass over what the engine has stored.

Every test runs under a witness, see `fp8_witness.py`: whatever it does, all that was read and
stored on the way is compared. What tests say besides is what has to be read, and what has to stay.
"""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from vllm import SamplingParams

from tests.engine import fp8_kernels
from tests.engine.adapters import Adapter
from tests.engine.choreographies import Draw, Ran, draw_choreography, run_choreography, side_by_side
from tests.engine.fp8_witness import READ_TOLERANCE, Witness, dense_pass
from tests.engine.layer_oracle import LayerOracle
from tests.engine.oracle import Encoded, Oracle, random_tokens, whole
from tests.engine.test_tiers import BLOCK_GIB
from tests.grids import sampled
from tests.ops.cases import number_of
from vllm_choreo import Choreography
from vllm_choreo.config import ChoreoConfig
from vllm_choreo.engine import plugin
from vllm_choreo.errors import KeptError, UnsupportedModelError, UnsupportedOptionError
from vllm_choreo.snapshot.manifest import read_manifest
from vllm_choreo.snapshot.storage import SnapshotFolder

# Model, and the option of vLLM; windows of 8 to 24 tokens in Gemma 3, ALiBi in BLOOM.
_ENGINES = [("llama", "fp8"), ("gemma3", "fp8_e5m2"), ("gemma3", "fp8_e4m3"), ("bloom", "fp8"),
            ("llama", "fp8_e5m2"), ("gpt_oss", "fp8")]  # fmt: skip
# Each group of seeds is a test: its choreographies run side by side in one session.
_SEEDS = [range(5000, 5004), *(range(first, first + 8) for first in range(5004, 5028, 8))]
_NEAR = Draw(max_tokens=8, max_length=40)
_MEMORY = {
    "host_memory_gib": 100 * BLOCK_GIB / 4,
    "hidden_memory_gib": 0.01,
    "pinned_share": 0.3,
}


@dataclass
class Subject:
    """An engine in 8 bits, the oracle of its model, and a session under a witness."""

    llm: Any
    oracle: Oracle
    witness: Witness
    c: Choreography

    def tokens(self, count: int, seed: int) -> list[int]:
        return random_tokens(random.Random(seed), count)

    def stored(self, message: Any) -> Encoded:
        return self.witness.stored(message.id)

    def ordinary(self, *prompts: Sequence[int]) -> list[Any]:
        """Plain requests, compared with the dense pass; returns their outputs."""
        inputs = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
        outputs = self.llm.generate(inputs, _greedy(), use_tqdm=False)
        for output in outputs:
            self.witness.check_output(output)
        return list(outputs)

    def decode(self, header: Any, **options: Any) -> Any:
        """A call, or some in one batch, compared with the dense pass."""
        given = {"sampling_params": _greedy(), **options} if isinstance(header[0], int) else options
        made = self.c.decode(header, **given)
        for message in made if isinstance(made, list) else [made]:
            self.witness.check_message(message)
        return made


def _greedy(max_tokens: int = 4) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, logprobs=5)


@pytest.fixture(scope="module")
def adapters(
    tiny_model_path: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> list[Adapter]:
    folder = tmp_path_factory.mktemp("adapters")
    return [Adapter(tiny_model_path("llama"), folder, number) for number in (1, 2)]


@pytest.fixture
def start(
    engine_slot: Callable[..., Any],
    tiny_model_path: Callable[[str], Path],
    tiny_oracle: Callable[[str], Oracle],
    adapters: list[Adapter],
) -> Callable[..., tuple[Any, Witness]]:
    """`start(model, dtype)`: an engine, and its witness; host memory, hidden states, adapters."""

    def start(model: str = "llama", dtype: str = "fp8") -> tuple[Any, Witness]:
        options: dict[str, Any] = {
            "kv_cache_dtype": dtype,
            "num_gpu_blocks_override": 120,
            "additional_config": {"choreo": _MEMORY},
        }
        oracles = {0: tiny_oracle(model)}
        if model == "llama":
            options |= {"enable_lora": True, "max_loras": 2, "max_lora_rank": 8}
            oracles |= {number: one.oracle for number, one in enumerate(adapters, 1)}
        elif model != "gemma3":
            options["additional_config"] = {"choreo": {}}
        llm = engine_slot(tiny_model_path(model), **options)
        return llm, Witness(llm, oracles)

    return start


@pytest.fixture
def subject(start: Callable[..., tuple[Any, Witness]]) -> Iterator[Subject]:
    llm, witness = start()
    with witness.watching(), Choreography(llm) as c:
        yield Subject(llm, witness.oracles[0], witness, c)


# -- any choreography ------------------------------------------------------------------------------


def _check_spans(done: Sequence[Ran], witness: Witness) -> None:
    """What each call read is what it names, where it names it."""
    for ran in done:
        seen = witness.by_message[ran.message.id]
        spans = tuple(
            (done[number].message.id, start, stop, offset)
            for (number, start, stop), offset in zip(ran.spans, ran.offsets, strict=True)
        )
        assert (seen.spans, seen.new_offset) == (spans, ran.new_offset), ran
        assert seen.tokens == ran.message.token_ids[: len(seen.tokens)]
        assert len(seen.tokens) >= ran.message.num_tokens - (ran.call.sampling_params is not None)


@pytest.mark.parametrize("seeds", sampled(_SEEDS, 1), ids=str)
@pytest.mark.parametrize("engine", sampled(_ENGINES, 2), ids="-".join)
def test_random_choreographies(
    start: Callable[..., tuple[Any, Witness]], engine: tuple[str, str], seeds: range
) -> None:
    llm, witness = start(*engine)
    draw = _NEAR if engine[0] in ("gemma3", "gpt_oss") else None
    with witness.watching(), Choreography(llm) as c:
        batches = side_by_side([draw_choreography(seed, draw) for seed in seeds])
        done = run_choreography(c, batches)
        _check_spans(done, witness)
        for ran in done:
            if ran.call.sampling_params is not None:
                witness.check_message(ran.message)
    # Borders are rare: what was compared is almost all of it.
    assert witness.num_stored > 0 and witness.num_borders < 1e-3 * witness.num_stored


# -- laws ------------------------------------------------------------------------------------------


def _assert_same_answers(left: Any, right: Any) -> None:
    assert left.generated_token_ids == right.generated_token_ids
    for a, b in zip(left.logprobs, right.logprobs, strict=True):
        for token in a.keys() & b.keys():
            assert abs(a[token].logprob - b[token].logprob) < READ_TOLERANCE


def _num_unlike(left: Encoded, right: Encoded) -> int:
    """Numbers that differ; each by one step at most, of an eighth (of a quarter in E5M2)."""
    count = 0
    for a, b in zip((*left.keys, *left.values), (*right.keys, *right.values), strict=True):
        rows = min(a.shape[1], b.shape[1])
        one, other = a[:, :rows], b[:, :rows]
        step = 0.26 * torch.maximum(one.abs(), other.abs()) + 1e-2
        assert bool(((one - other).abs() <= step).all())
        count += int((one != other).sum())
    return count


def _assert_same(subject: Subject, left: Any, right: Any) -> None:
    """Two calls that read the same in another order, or with others in the batch.

    Sums differ in the last bit, and numbers at a border go to another byte; what reads that byte
    goes on from there. So where all bytes are equal answers are; where a few are not, each answer
    is still compared with the dense pass over its own, which `decode` has done.
    """
    unlike = _num_unlike(subject.stored(left), subject.stored(right))
    if unlike == 0:
        _assert_same_answers(left, right)
    assert unlike < 30


def test_shift_changes_not_even_a_byte(subject: Subject) -> None:
    first, second = subject.c.prefill(
        [{"tokens": subject.tokens(40, 1)}, {"tokens": subject.tokens(30, 2), "new_offset": 9}]
    )
    answers = [
        subject.decode(
            subject.tokens(10, 3),
            parents=[first, (second, 5, 30)],
            offsets=[25 + shift, 3 + shift],
            new_offset=50 + shift,
        )
        for shift in (0, 613)
    ]
    _assert_same_answers(*answers)
    assert _num_unlike(*map(subject.stored, answers)) == 0


def test_permutation(subject: Subject) -> None:
    parents = [subject.c.prefill(subject.tokens(length, length)) for length in (35, 64, 20)]
    offsets = [80, 0, 150]
    first, *others = (
        subject.decode(
            subject.tokens(12, 5),
            parents=[parents[i] for i in order],
            offsets=[offsets[i] for i in order],
            new_offset=110,
        )
        for order in ([0, 1, 2], [2, 0, 1], [1, 0, 2])
    )
    for other in others:
        _assert_same(subject, first, other)


def test_isolation(subject: Subject) -> None:
    parents = subject.c.prefill([{"tokens": subject.tokens(n, n)} for n in (50, 33)])
    calls = [
        {"header": subject.tokens(5 + 30 * index, 10 + index), "parents": named}
        for index, named in enumerate([parents, parents[::-1], parents[:1], []])
    ]
    single = [subject.decode(call["header"], parents=call["parents"]) for call in calls]
    together = subject.decode([{**call, "sampling_params": _greedy()} for call in calls])
    for left, right in zip(single, together, strict=True):
        _assert_same(subject, left, right)
    # And ordinary requests, which the witness compares, one by one.
    subject.ordinary(subject.tokens(70, 30), subject.tokens(3, 31))


def test_eviction_encodes_again_what_was_there(subject: Subject) -> None:
    c = subject.c
    document = c.prefill(subject.tokens(70, 50))
    notes = subject.decode(subject.tokens(9, 51), parents=[document], new_offset=200)
    read = {"parents": [notes, (document, 10, 60)]}
    before = subject.decode(subject.tokens(6, 52), **read)
    stored = subject.stored(document)
    scheduler = subject.llm.llm_engine.engine_core.engine_core.scheduler
    tier, scheduler.store.tier = scheduler.store.tier, None  # or it would come back as it was
    try:
        num_requests = subject.witness.num_requests
        c.evict(document, notes)
        again = subject.decode(subject.tokens(6, 52), **read)
        assert subject.witness.num_requests >= num_requests + 3  # both were encoded, then the call
    finally:
        scheduler.store.tier = tier
    assert _num_unlike(stored, subject.stored(document)) < 30
    _assert_same(subject, before, again)


def test_chain_and_split_are_exact_to_the_rounding_of_what_is_stored(subject: Subject) -> None:
    """A message of a chain lies at other positions than text does, hence is rounded otherwise.

    So its answers are those of text to the rounding of 8 bits; each of the two is compared with
    the dense pass over its own bytes. Where no padding stands between, they are stored alike.
    """
    pieces = [subject.tokens(length, seed) for seed, length in enumerate((64, 32, 12))]
    first = subject.c.prefill(pieces[0])
    second = subject.c.prefill(pieces[1], parents=[first])
    third = subject.decode(pieces[2], parents=[first, second])
    assert third.usage.exact
    (ordinary,) = subject.ordinary([*pieces[0], *pieces[1], *pieces[2]])
    whole_text = subject.decode([*pieces[0], *pieces[1], *pieces[2]])
    joined = subject.stored(whole_text)
    parts = [subject.stored(message) for message in (first, second, third)]
    unlike = sum(
        _num_unlike(part, _part_of(joined, start))
        for part, start in zip(parts, (0, 64, 96), strict=True)
    )
    assert unlike < 30
    if unlike == 0:
        _assert_same_answers(third, whole_text)
        completion = ordinary.outputs[0]
        answer = SimpleNamespace(
            generated_token_ids=tuple(completion.token_ids), logprobs=completion.logprobs
        )
        _assert_same_answers(third, answer)


def _part_of(encoded: Encoded, start: int) -> Encoded:
    keys, values = (
        tuple(part[:, start:] for part in parts) for parts in (encoded.keys, encoded.values)
    )
    tokens = encoded.token_ids[start:]
    return Encoded(tokens, encoded.position + start, keys, values, encoded.logits)


# -- with repair, layers, copies, adapters ---------------------------------------------------------


@pytest.mark.parametrize(
    "rule", ["first:8", "all", [[(3, 20)], [(0, 40)]], {"share": 0.4, "by": "attention"}]
)
def test_repair(subject: Subject, rule: Any) -> None:
    """Patches are requests: the witness compares what they read, and the tokens they wrote."""
    docs = subject.c.prefill([{"tokens": subject.tokens(n, 60 + n)} for n in (50, 70)])
    before = [subject.stored(doc) for doc in docs]
    num_requests = subject.witness.num_requests
    answer = subject.decode(subject.tokens(6, 3), parents=docs, repair=rule)
    assert answer.usage.repaired_tokens > 0
    assert subject.witness.num_requests > num_requests + 1
    assert [_num_unlike(*pair) for pair in zip(before, map(subject.stored, docs), strict=True)] == [
        0,
        0,
    ]


def test_no_repair_is_none_and_exact_mode_encodes_copies(subject: Subject) -> None:
    docs = subject.c.prefill([{"tokens": subject.tokens(n, 80 + n)} for n in (64, 32)])
    plain = subject.decode(subject.tokens(6, 3), parents=docs)
    none = subject.decode(subject.tokens(6, 3), parents=docs, repair=[[], []])
    _assert_same(subject, plain, none)
    exact = subject.decode(subject.tokens(6, 3), parents=docs, mode="exact")
    assert exact.usage.exact and subject.c.stats()["num_copies"] == 1
    assert subject.witness.by_message[exact.id].spans[1][1:] == (0, 32, 64)


def test_layers_are_those_of_the_hidden_states(subject: Subject) -> None:
    """In the layers that are encoded anew, bytes are those of the dense pass from that layer on."""
    oracle, witness = subject.oracle, subject.witness
    docs = subject.c.prefill(
        [{"tokens": subject.tokens(n, 90 + n), "keep_hidden": [1]} for n in (40, 60)]
    )
    answer = subject.decode(subject.tokens(5, 4), parents=docs, layers=(1, 3))
    assert answer.usage.repaired_tokens == 60
    stored = [subject.stored(doc) for doc in docs]
    layers, given = LayerOracle(oracle), []
    with layers._at([1], lambda hidden: given.append(hidden.clone())):
        dense_pass(oracle, stored[1], [], 0)
    scheduler = subject.llm.llm_engine.engine_core.engine_core.scheduler
    (message,) = [m for m in scheduler.store.messages(None) if m.id == docs[1].id]
    (patch,) = message.copies.values()
    patched = witness._encoded(patch, patch.stored_position)
    with layers._at([1], lambda _: given[0]):
        _, computed = dense_pass(oracle, patched, [whole(stored[0], 0)], 40)
    # Of layer 0 nothing was written: compared are the two behind it, and what is there is the copy.
    assert torch.equal(patched.values[0], stored[1].values[0])
    assert torch.equal(patched.keys[0], stored[1].keys[0])
    assert any(not torch.equal(a, b) for a, b in zip(patched.keys, stored[1].keys, strict=True))
    witness.compare(oracle, patched, computed, 0, 40 - patch.stored_position, "patch", (1, 2))
    witness.check()


def test_adapters_write_and_read(subject: Subject, adapters: list[Adapter]) -> None:
    mine, other = (one.request for one in adapters)
    a = subject.c.prefill(subject.tokens(40, 1), adapter=mine)
    b = subject.c.prefill(subject.tokens(30, 2))
    for adapter in (None, mine, other):
        answer = subject.decode(subject.tokens(6, 3), parents=[b, a], adapter=adapter)
        assert subject.witness.by_message[answer.id].spans[0][0] == b.id


# -- host memory, files ----------------------------------------------------------------------------


def test_host_memory_gives_back_the_very_bytes(subject: Subject) -> None:
    docs = subject.c.prefill([{"tokens": subject.tokens(n, 20 + n)} for n in (50, 33)])
    before = [subject.stored(doc) for doc in docs]
    subject.c.evict(*docs)
    assert subject.c.stats()["num_host_blocks_used"] == 4
    answer = subject.decode(subject.tokens(6, 3), parents=docs[::-1], offsets=[9, 70])
    assert answer.usage.reused_tokens == 83
    for one, doc in zip(before, docs, strict=True):
        assert _num_unlike(one, subject.stored(doc)) == 0


def test_a_block_takes_a_byte_for_a_number(subject: Subject) -> None:
    # 3 layers, keys and values, 2 heads of 32 numbers, 32 tokens.
    assert subject.c.stats()["block_bytes"] == 3 * 2 * 2 * 32 * 32
    core = subject.llm.llm_engine.engine_core.engine_core
    batcher = core.model_executor.driver_worker.worker.model_runner.batcher
    assert {kind.token_bytes for kind in batcher.kinds} == {2 * 2 * 32}


def test_snapshots_keep_bytes_dtype_and_scales(subject: Subject, tmp_path: Path) -> None:
    docs = subject.c.prefill([{"tokens": subject.tokens(n, 40 + n)} for n in (50, 33)])
    before = [subject.stored(doc) for doc in docs]
    subject.c.save(docs, tmp_path / "kept", encodings=True)
    kept = read_manifest(SnapshotFolder(tmp_path / "kept"))
    assert kept["model"]["kv_dtype"] == "float8_e4m3fn"
    file = tmp_path / "kept" / kept["encodings"][0]["data"]["file"]
    numbers = load_file(file)
    assert {str(t.dtype) for t in numbers.values()} == {"torch.float8_e4m3fn"}
    assert torch.equal(numbers["layers.1.values"].float().transpose(0, 1), before[0].values[1])
    num_requests = subject.witness.num_requests
    with Choreography(subject.llm) as again:
        loaded = again.load(tmp_path / "kept")
        for one, message in zip(before, loaded, strict=True):
            assert _num_unlike(one, subject.witness.stored(message.id)) == 0
        assert subject.witness.num_requests == num_requests  # nothing was encoded
        message = again.decode(
            subject.tokens(6, 3), parents=loaded[::-1], sampling_params=_greedy()
        )
        subject.witness.check_message(message)


def _changed(path: Path, change: Callable[[bytes], bytes]) -> None:
    """Change the first data file of a folder, and its digest as the manifest has it."""
    import hashlib

    from vllm_choreo.snapshot.manifest import manifest_bytes

    kept = read_manifest(SnapshotFolder(path))
    entry = kept["encodings"][0]["data"]
    content = change((path / entry["file"]).read_bytes())
    (path / entry["file"]).write_bytes(content)
    entry["bytes"], entry["sha256"] = len(content), hashlib.sha256(content).hexdigest()
    (path / "manifest.json").write_bytes(manifest_bytes(kept))


def _with_scales(content: bytes) -> bytes:
    size = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + size])
    header["__metadata__"]["kv_scales"] = json.dumps([[1.0, 2.0]] * 3)
    made = json.dumps(header).encode()
    made += b" " * (-len(made) % 8)
    return len(made).to_bytes(8, "little") + made + content[8 + size :]


def test_other_bytes_are_never_taken(subject: Subject, tmp_path: Path) -> None:
    """Of another dtype, of other scales, of no numbers: refused with the reason, or encoded."""
    doc = subject.c.prefill(subject.tokens(40, 7))
    subject.c.save([doc], tmp_path / "kept", encodings=True)

    def changes_dtype(path: Path) -> None:
        from vllm_choreo.snapshot.manifest import manifest_bytes

        kept = read_manifest(SnapshotFolder(path))
        del kept["model"]["kv_dtype"]  # as saved before: then it was the model's
        (path / "manifest.json").write_bytes(manifest_bytes(kept))

    changes: dict[str, Callable[[Path], None]] = {
        "kv_dtype": changes_dtype,
        "stored with other scales": lambda path: _changed(path, _with_scales),
        "not all of its numbers are finite": lambda path: _changed(
            path, lambda content: content[:-1] + b"\xff"
        ),
    }
    for number, (reason, change) in enumerate(changes.items()):
        folder = tmp_path / str(number)
        shutil.copytree(tmp_path / "kept", folder)
        change(folder)
        with Choreography(subject.llm) as c:
            with pytest.raises(KeptError, match=reason):
                c.load(folder)
            (loaded,) = c.load(folder, on_mismatch="encode")
            message = c.decode([5, 6], parents=[loaded], sampling_params=_greedy())
            subject.witness.check_message(message)


# -- checkpoints that declare it -------------------------------------------------------------------


def _declaring(model: Path, folder: Path, scales: Sequence[tuple[float, float]]) -> Path:
    """A copy of a model whose checkpoint declares a cache in 8 bits, with scales of each layer."""
    shutil.copytree(model, folder)
    tensors = load_file(folder / "model.safetensors")
    for layer, pair in enumerate(scales):
        for name, scale in zip(("k_scale", "v_scale"), pair, strict=True):
            tensors[f"model.layers.{layer}.self_attn.{name}"] = torch.tensor(scale)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "config_groups": {},
        "ignore": [],
        "kv_cache_scheme": {
            "num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False,
            "symmetric": True,
        },
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.exhaustive
def test_a_checkpoint_declares_it_with_scales_of_its_layers(
    engine_slot: Callable[..., Any],
    tiny_model_path: Callable[[str], Path],
    tiny_oracle: Callable[[str], Oracle],
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    scales = [(0.02, 0.013), (0.5, 1.7), (0.0041, 0.3)]
    folder = tmp_path_factory.mktemp("declared") / "llama"
    path = _declaring(tiny_model_path("llama"), folder, scales)
    fp8_kernels.install_where_missing()
    llm = engine_slot(path)
    assert llm.llm_engine.vllm_config.cache_config.cache_dtype == "fp8"
    found = [one["kv_scales"] for one in llm.collective_rpc("choreo_positions")[0]]
    assert found == [[float(torch.tensor(s)) for s in pair] for pair in scales]
    witness = Witness(llm, {0: tiny_oracle("llama")})
    with witness.watching(), Choreography(llm) as c:
        done = run_choreography(c, side_by_side([draw_choreography(s) for s in range(5100, 5104)]))
        _check_spans(done, witness)
        for ran in done:
            if ran.call.sampling_params is not None:
                witness.check_message(ran.message)
        c.save([done[0].message], folder.parent / "kept", encodings=True)
        with Choreography(llm) as other:
            (loaded,) = other.load(folder.parent / "kept")
            assert loaded.token_ids == done[0].message.token_ids


# -- what is refused -------------------------------------------------------------------------------


def _config(cache_dtype: str, skip_layers: Sequence[str] = ()) -> Any:
    cache = SimpleNamespace(cache_dtype=cache_dtype, kv_cache_dtype_skip_layers=[*skip_layers])
    model = SimpleNamespace(use_mla=False, is_hybrid=False, dtype=torch.bfloat16)
    return SimpleNamespace(cache_config=cache, model_config=model)


@pytest.mark.parametrize(
    ("cache_dtype", "options", "parameter"),
    [
        ("fp8_per_token_head", {}, "kv_cache_dtype"),
        ("nvfp4", {}, "kv_cache_dtype"),
        ("bfloat16", {}, "kv_cache_dtype"),
        ("fp8", {"skip_layers": ["0"]}, "kv_cache_dtype_skip_layers"),
        ("fp8_e5m2", {"reposition": "in_place"}, "additional_config.choreo.reposition"),
    ],
)
def test_what_does_not_go_with_it_is_refused_by_name(
    cache_dtype: str, options: dict[str, Any], parameter: str
) -> None:
    config = ChoreoConfig(reposition=options.get("reposition", "query"))
    with pytest.raises(UnsupportedOptionError) as refusal:
        plugin._refuse_quantized(_config(cache_dtype, options.get("skip_layers", ())), config)
    assert refusal.value.parameter == parameter
    for taken in ("auto", "fp8", "fp8_e4m3", "fp8_e5m2"):
        plugin._refuse_quantized(_config(taken), ChoreoConfig())


def test_on_gpus_it_is_refused_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.platforms import current_platform

    monkeypatch.setattr(type(current_platform), "is_cpu", lambda self: False)
    for taken in ("auto", "bfloat16"):
        plugin._refuse_quantized(_config(taken), ChoreoConfig())
    with pytest.raises(UnsupportedOptionError) as refusal:
        plugin._refuse_quantized(_config("float16"), ChoreoConfig())
    assert refusal.value.value == "float16", "the model computes in bfloat16"
    with pytest.raises(UnsupportedOptionError, match="rounds queries to 8 bits"):
        plugin._refuse_quantized(_config("fp8"), ChoreoConfig())


def test_scales_of_heads_are_refused() -> None:
    from vllm_choreo.engine.worker.quantized import quantized_kv

    layer: Any = SimpleNamespace(
        kv_cache_dtype="fp8", layer_name="model.layers.0", _k_scale=torch.ones(2),
        _v_scale=torch.ones(1), _k_scale_float=1.0, _v_scale_float=1.0,
    )  # fmt: skip
    with pytest.raises(UnsupportedModelError, match="for each head"):
        quantized_kv(layer)


# -- the kernels that stand in for vLLM's ----------------------------------------------------------


@pytest.mark.parametrize("fmt", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_what_is_stored_has_its_digits_left_out(fmt: torch.dtype) -> None:
    """The largest number of the format that is no larger, by its table; never what is no number."""
    table = torch.tensor([number_of(byte, fmt) for byte in range(128)])
    table = table[table.isfinite()].sort()[0].double()
    torch.manual_seed(0)
    drawn = torch.randn(20_000) * torch.exp(4 * torch.randn(20_000))
    special = [0.0, 448.0, 449.0, 57344.0, 1e30, float("inf"), 2.0**-9, 2.0**-10, 2.0**-16, 1e-30]
    numbers = torch.cat([drawn, torch.tensor(special), -torch.tensor(special)])
    for scale in (1.0, 0.37):
        scaled = numbers * (torch.tensor(1.0) / torch.tensor(scale))
        index = torch.searchsorted(table, scaled.abs().double(), right=True) - 1
        expected = table[index].float() * scaled.sign()
        stored = fp8_kernels.truncated(numbers, scale, fmt).view(fmt).float()
        assert torch.equal(stored, expected.where(scaled != 0, 0.0))
    largest = fp8_kernels.truncated(torch.tensor([float("nan")]), 1.0, fmt).view(fmt).float()
    assert float(largest) == float(table[-1])
