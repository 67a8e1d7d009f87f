# SPDX-License-Identifier: Apache-2.0
"""LoRA adapters: calls with one are those of the model into which it was merged."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open
from vllm import SamplingParams

from tests.engine.adapters import Adapter
from tests.engine.oracle import Encoded, Oracle, Parent, assert_choices, random_tokens, whole
from vllm_choreo import Choreography
from vllm_choreo.engine import utility
from vllm_choreo.errors import AdapterError, ChoreoError

SESSION = "adapters"


@pytest.fixture(scope="module")
def adapters(
    tiny_model_path: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> list[Adapter]:
    folder = tmp_path_factory.mktemp("adapters")
    return [Adapter(tiny_model_path("llama"), folder, number) for number in (1, 2)]


@pytest.fixture
def llm(engine_slot: Callable[..., Any], tiny_model_path: Callable[[str], Path]) -> Iterator[Any]:
    engine = engine_slot(tiny_model_path("llama"), enable_lora=True, max_loras=2, max_lora_rank=8)
    yield engine
    utility.call(engine, "close", SESSION)
    stats = utility.call(engine, "stats", None)
    assert stats["num_calls"] == stats["num_messages"] == stats["num_blocks_all_sessions"] == 0


def _sampling(**wire: Any) -> SamplingParams:
    return SamplingParams(
        max_tokens=8,
        temperature=0.0,
        ignore_eos=True,
        extra_args={"choreo": {"session": SESSION, **wire}},
    )


def _call(llm: Any, tokens: Sequence[int], adapter: Adapter | None, **wire: Any) -> Any:
    """Run one call; `adapter` encodes it. Returns its output."""
    params = _sampling(**wire)
    prompt = {"prompt_token_ids": list(tokens)}
    request = adapter.request if adapter else None
    (output,) = llm.generate([prompt], params, lora_request=request, use_tqdm=False)
    assert output.outputs[0].finish_reason == "length", output.kv_transfer_params
    return output


def _ordinary(
    llm: Any, prompts: Sequence[Sequence[int]], adapters: Sequence[Adapter | None]
) -> list[Any]:
    """Requests without choreography."""
    params = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
    outputs: list[Any] = llm.generate(
        [{"prompt_token_ids": list(prompt)} for prompt in prompts],
        params,
        lora_request=[adapter.request if adapter else None for adapter in adapters],
        use_tqdm=False,
    )
    return outputs


def _prefill(llm: Any, name: str, tokens: Sequence[int], adapter: Adapter | None) -> dict[str, Any]:
    output = _call(llm, tokens, adapter, kind="prefill", save_as=name)
    report: dict[str, Any] = output.kv_transfer_params["choreo"]
    return report


def _assert_answer(
    output: Any, header: Sequence[int], oracle: Oracle, parents: Sequence[Parent], new_offset: int
) -> None:
    """Each token of an answer is the oracle's, given those before it."""
    tokens = [*header, *output.outputs[0].token_ids]
    assert_choices(oracle.encode(tokens, parents, new_offset), len(header))


def test_every_mix_of_encoders_and_readers(
    llm: Any, adapters: list[Adapter], tiny_oracle: Callable[[str], Oracle]
) -> None:
    """A message keeps what its own adapter made of it, whoever reads it."""
    rng, base = random.Random(1), tiny_oracle("llama")
    encoders: dict[str, tuple[Adapter | None, Oracle]] = {
        "base": (None, base),
        **{f"adapter{i}": (adapter, adapter.oracle) for i, adapter in enumerate(adapters)},
    }
    tokens = random_tokens(rng, 45)
    encoded: dict[str, Encoded] = {}
    for name, (adapter, oracle) in encoders.items():
        _prefill(llm, name, tokens, adapter)
        encoded[name] = oracle.encode(tokens)
    answers = set()
    for name in encoders:
        for adapter, oracle in encoders.values():
            output = _call(llm, [9, 11], adapter, parents=[name], offsets=[20], new_offset=70)
            _assert_answer(output, [9, 11], oracle, [whole(encoded[name], 20)], 70)
            answers.add(tuple(output.outputs[0].token_ids))
    assert len(answers) == 9  # or the adapters would prove nothing


def test_the_facade_takes_adapters_of_calls_and_sessions(
    llm: Any, adapters: list[Adapter], tiny_oracle: Callable[[str], Oracle]
) -> None:
    rng, base = random.Random(7), tiny_oracle("llama")
    one, two = adapters
    tokens, header = random_tokens(rng, 45), random_tokens(rng, 3)
    params = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
    with Choreography(llm, adapter=one.request) as c:
        own = c.prefill(tokens)
        clean = c.reencode(own, adapter=llm.model_config.served_model_name)
        doc = {True: one.oracle.encode(tokens), False: base.encode(tokens)}
        for parent in (own, clean):
            answers = c.decode(
                [{"header": header}, {"header": header, "adapter": two.request}],
                sampling_params=params,
            ) + [c.decode(header, parents=[parent], sampling_params=params)]
            for answer, oracle, read in zip(
                answers,
                (one.oracle, two.oracle, one.oracle),
                ([], [], [whole(doc[parent is own], 0)]),
                strict=True,
            ):
                encoded = oracle.encode(answer.token_ids, read, answer.position)
                assert_choices(encoded, len(header))
            assert answers[2].usage.exact == (parent is own)


def test_recipes_are_shared_by_their_adapter(llm: Any, adapters: list[Adapter]) -> None:
    tokens = random_tokens(random.Random(2), 64)
    for name, adapter in (("a", adapters[0]), ("b", adapters[1]), ("c", None)):
        assert _prefill(llm, name, tokens, adapter)["reused_tokens"] == 0
    for name, adapter in (("d", adapters[0]), ("e", adapters[1]), ("f", None)):
        assert _prefill(llm, name, tokens, adapter)["reused_tokens"] == 32  # whole blocks


def test_evicted_messages_are_encoded_again_by_their_adapter(
    llm: Any, adapters: list[Adapter]
) -> None:
    tokens = random_tokens(random.Random(3), 50)
    _prefill(llm, "a", tokens, adapters[0])
    before = _call(llm, [9], adapters[1], parents=["a"])
    utility.call(llm, "evict", SESSION, ["a"])
    after = _call(llm, [9], adapters[1], parents=["a"])
    assert after.outputs[0].token_ids == before.outputs[0].token_ids


def test_exact_calls_reuse_what_their_own_adapter_encoded(
    llm: Any, adapters: list[Adapter]
) -> None:
    rng = random.Random(4)
    tokens, header = random_tokens(rng, 64), random_tokens(rng, 3)
    _prefill(llm, "doc", tokens, adapters[0])
    for adapter in (*adapters, None):
        (plain,) = _ordinary(llm, [tokens + header], [adapter])
        exact = _call(llm, header, adapter, parents=["doc"], exact=True)
        assert exact.outputs[0].token_ids == plain.outputs[0].token_ids
        assert exact.kv_transfer_params["choreo"]["exact"]


def test_one_batch_of_ordinary_requests_with_and_without_adapters(
    llm: Any, adapters: list[Adapter], tiny_oracle: Callable[[str], Oracle]
) -> None:
    """The last adapter's place is taken: vLLM by itself would give it to those without one."""
    rng = random.Random(5)
    mix = [None, *adapters, None]
    prompts = [random_tokens(rng, 20 + i) for i in range(len(mix))]
    for prompt, adapter, output in zip(prompts, mix, _ordinary(llm, prompts, mix), strict=True):
        oracle = adapter.oracle if adapter else tiny_oracle("llama")
        _assert_answer(output, prompt, oracle, [], 0)


@pytest.mark.parametrize("in_place", [True, False], ids=["loaded in place", "only replaced"])
def test_replaced_weights_are_another_adapter(
    llm: Any,
    tiny_model_path: Callable[[str], Path],
    tmp_path: Path,
    in_place: bool,
) -> None:
    """The name, the number and the path stay; what was encoded by the old weights is told apart."""
    rng, model = random.Random(6), tiny_model_path("llama")
    number = 3 + in_place
    old = Adapter(model, tmp_path, number, seed=70)
    new = Adapter(model, tmp_path / "new", number, seed=71)
    tokens, header = random_tokens(rng, 64), random_tokens(rng, 3)
    assert _prefill(llm, "old", tokens, old)["reused_tokens"] == 0
    assert _call(llm, header, old, parents=["old"]).kv_transfer_params["choreo"]["exact"]

    shutil.copytree(new.path, old.path, dirs_exist_ok=True)
    old.request.load_inplace = in_place
    assert _prefill(llm, "new", tokens, old)["reused_tokens"] == 0, "another recipe"
    old.request.load_inplace = False
    # Read as it was encoded, and not called exact.
    output = _call(llm, header, old, parents=["old"])
    assert not output.kv_transfer_params["choreo"]["exact"]
    _assert_answer(output, header, new.oracle, [whole(old.oracle.encode(tokens), 0)], 64)
    exact = _call(llm, header, old, parents=["old"], exact=True)
    _assert_answer(exact, tokens + header, new.oracle, [], 0)
    # The old weights are gone: what they encoded cannot be encoded again.
    utility.call(llm, "evict", SESSION, ["old"])
    params = _sampling(parents=["old"])
    prompt = [{"prompt_token_ids": header}]
    (output,) = llm.generate(prompt, params, lora_request=old.request, use_tqdm=False)
    error = output.kv_transfer_params["choreo_error"]
    assert "have been replaced" in error["message"] and error["value"] == "old"


def test_a_look_at_replaced_weights_does_not_pass_for_loading_them(
    llm: Any, tiny_model_path: Callable[[str], Path], tmp_path: Path
) -> None:
    """A reader without adapter sees the new files first; the next call with it loads them."""
    rng, model = random.Random(7), tiny_model_path("llama")
    old = Adapter(model, tmp_path, 5, seed=72)
    new = Adapter(model, tmp_path / "new", 5, seed=73)
    tokens, header = random_tokens(rng, 64), random_tokens(rng, 3)
    _prefill(llm, "old", tokens, old)
    utility.call(llm, "evict", SESSION, ["old"])
    shutil.copytree(new.path, old.path, dirs_exist_ok=True)
    prompt = [{"prompt_token_ids": header}]
    (output,) = llm.generate(prompt, _sampling(parents=["old"]), use_tqdm=False)
    assert "have been replaced" in output.kv_transfer_params["choreo_error"]["message"]
    assert _prefill(llm, "new", tokens, old)["reused_tokens"] == 0
    assert not old.request.load_inplace, "it is the caller's own"
    exact = _call(llm, header, old, parents=["new"], exact=True)
    _assert_answer(exact, tokens + header, new.oracle, [], 0)


@pytest.mark.parametrize("way", [{"exact": True}, {"repair": "first:300"}], ids=["exact", "repair"])
def test_what_is_encoded_for_the_first_call_with_new_weights_has_them(
    llm: Any,
    tiny_model_path: Callable[[str], Path],
    tiny_oracle: Callable[[str], Oracle],
    tmp_path: Path,
    way: dict[str, Any],
) -> None:
    """Copies are encoded by requests of the engine's own, steps before the call itself runs."""
    rng, model, base = random.Random(9), tiny_model_path("llama"), tiny_oracle("llama")
    number = 6 + ("exact" in way)
    old = Adapter(model, tmp_path, number, seed=74)
    new = Adapter(model, tmp_path / "new", number, seed=75)
    tokens, header = random_tokens(rng, 400), random_tokens(rng, 3)
    _prefill(llm, "old", tokens, old)
    _prefill(llm, "base", tokens, None)
    shutil.copytree(new.path, old.path, dirs_exist_ok=True)
    output = _call(llm, header, old, parents=["base"], **way)
    if "exact" in way:
        _assert_answer(output, tokens + header, new.oracle, [], 0)
    else:
        repaired = new.oracle.repair([whole(base.encode(tokens), 0)], [[(0, 300)]])
        _assert_answer(output, header, new.oracle, repaired, 400)


def test_what_an_adapter_encoded_is_kept_under_its_weights(
    llm: Any, tiny_model_path: Callable[[str], Path], tmp_path: Path
) -> None:
    """Read with the adapter elsewhere, encoded again where it is, never with other weights."""
    folder, rng = tmp_path / "kept", random.Random(8)
    model = tiny_model_path("llama")
    home, other = (Adapter(model, tmp_path, number, seed=number).path for number in (80, 81))
    greedy = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    with Choreography(llm) as c:
        note = c.prefill(random_tokens(rng, 40), adapter=home, save_as="note")
        said = c.decode([5], parents=[note], sampling_params=greedy).token_ids
        c.save([note], folder, encodings=True)
        c.save([note], tmp_path / "recipe")
    (path,) = folder.glob("*.safetensors")
    with safe_open(path, "pt") as file:
        about = file.metadata()
    assert about["adapter"] == str(home) and about["model"] == model.name
    with Choreography(llm) as c:
        c.load(folder)
        assert c.decode([5], parents=["note"], sampling_params=greedy).token_ids == said
        c.evict("note")
        assert c.decode([5], parents=["note"], sampling_params=greedy).token_ids == said
    shutil.rmtree(home)
    shutil.copytree(other, home)  # another adapter under its name
    with Choreography(llm) as c:
        c.load(folder)
        assert c.decode([5], parents=["note"], sampling_params=greedy).token_ids == said
        c.evict("note")
        with pytest.raises(ChoreoError, match="weights of adapter"):
            c.decode([5], parents=["note"], sampling_params=greedy)
    with Choreography(llm) as c, pytest.raises(AdapterError, match="without its keys"):
        c.load(tmp_path / "recipe")


def test_how_likely_tokens_of_prompts_are(
    llm: Any, adapters: list[Adapter], tiny_oracle: Callable[[str], Oracle]
) -> None:
    """Each request's own adapter is in what its prompt's tokens are told, whoever is beside it."""
    rng, base = random.Random(11), tiny_oracle("llama")
    encoders = [(None, base), *((adapter, adapter.oracle) for adapter in adapters)]
    tokens = [random_tokens(rng, n) for n in (4, 30, 5, 17, 2, 9)]
    made = [encoders[number % 3] for number in range(len(tokens))]
    params = SamplingParams(max_tokens=2, temperature=0.0, prompt_logprobs=2)
    outputs = llm.generate(
        [{"prompt_token_ids": prompt} for prompt in tokens],
        params,
        lora_request=[adapter.request if adapter else None for adapter, _ in made],
        use_tqdm=False,
    )
    for prompt, (_, oracle), output in zip(tokens, made, outputs, strict=True):
        rows = oracle.encode(prompt).logprobs()
        for index, entries in enumerate(output.prompt_logprobs[1:], 1):
            for token, entry in entries.items():
                assert abs(entry.logprob - float(rows[index - 1][token])) < 1e-4
