# SPDX-License-Identifier: Apache-2.0
"""Adapters that some calls only use: those that their placement names, and no others."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from vllm import SamplingParams
from vllm.lora.request import LoRARequest

from tests.engine.adapters import Adapter
from tests.engine.oracle import Oracle, assert_choices, random_tokens, whole
from vllm_choreo import ChoreoError, Choreography
from vllm_choreo.errors import AdapterError, UnsupportedOptionError
from vllm_choreo.semantics.message import Message
from vllm_choreo.trained_adapter import PLACEMENTS, ModelIdentity, TrainedAdapter

_ENGINE: dict[str, Any] = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 8}
_GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, logprobs=4)
_RNG = random.Random(1)
_DOC, _NEXT, _HEADER = (random_tokens(_RNG, n) for n in (45, 20, 3))


@pytest.fixture(scope="module")
def adapter(
    tiny_model_path: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Adapter:
    return Adapter(tiny_model_path("llama"), tmp_path_factory.mktemp("adapters"), 1)


@pytest.fixture
def llm(engine_slot: Callable[..., Any], tiny_model_path: Callable[[str], Path]) -> Any:
    return engine_slot(tiny_model_path("llama"), **_ENGINE)


def _used(placement: str) -> tuple[bool, bool]:
    """By calls that encode, and by those that generate."""
    return placement != "decode", placement != "prefill"


# -- nobody else notices -------------------------------------------------------------------------


def _ordinary(llm: Any) -> list[Any]:
    """Tokens and log-probabilities of requests that know nothing of adapters."""
    llm.reset_prefix_cache()
    prompts = [{"prompt_token_ids": tokens} for tokens in (_DOC, _NEXT, [*_DOC, *_HEADER])]
    outputs = llm.generate(prompts, _GREEDY, use_tqdm=False)
    return [_said(output.outputs[0]) for output in outputs]


def _said(output: Any) -> Any:
    return [
        {token: entry.logprob for token, entry in entries.items()} for entries in output.logprobs
    ]


def _choreographed(llm: Any, **options: Any) -> tuple[list[Message], list[Any]]:
    with Choreography(llm, **options) as c:
        docs = c.prefill([{"tokens": _DOC}, {"tokens": _NEXT}])
        answers = c.decode(
            [{"header": _HEADER, "parents": docs}, {"header": _HEADER, "parents": docs[1:]}],
            sampling_params=_GREEDY,
        )
        return answers, list(map(_said, answers))


def test_an_engine_without_adapters(
    engine_slot: Callable[..., Any], tiny_model_path: Callable[[str], Path], adapter: Adapter
) -> None:
    bare = engine_slot(tiny_model_path("llama"))
    _refused(bare, "enable_lora=True", UnsupportedOptionError, adapter=adapter.placed("prefill"))


def test_all_others_get_the_same_to_the_last_bit(
    engine_slot: Callable[..., Any], tiny_model_path: Callable[[str], Path], adapter: Adapter
) -> None:
    """As in an engine that takes no adapters, before and after both placements were used."""
    bare = engine_slot(tiny_model_path("llama"))
    expected = _ordinary(bare), _choreographed(bare)[1]
    llm = engine_slot(tiny_model_path("llama"), **_ENGINE)
    assert (_ordinary(llm), _choreographed(llm)[1]) == expected
    for placement in ("prefill", "decode"):
        _, said = _choreographed(llm, adapter=adapter.placed(placement))
        assert said != expected[1]  # or the adapter would prove nothing
    assert len(llm.llm_engine.list_loras()) == 2
    assert (_ordinary(llm), _choreographed(llm)[1]) == expected


# -- what is encoded by whom ---------------------------------------------------------------------


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("given", ["folder", "request", "placement="])
def test_calls_that_name_none_are_placed(
    llm: Any, adapter: Adapter, tiny_oracle: Callable[[str], Oracle], placement: str, given: str
) -> None:
    """Also copies, answers that are read on, and lists."""
    folder = adapter.placed(placement)
    options: dict[str, Any] = {
        "folder": {"adapter": folder},
        "request": {"adapter": LoRARequest(given, 7 + PLACEMENTS.index(placement), str(folder))},
        "placement=": {"adapter": adapter.path, "placement": placement},
    }[given]
    writer, reader = (adapter.oracle if used else tiny_oracle("llama") for used in _used(placement))
    with Choreography(llm, **options) as c:
        doc, other = c.prefill([{"tokens": _DOC}, {"tokens": _NEXT}])
        answer = c.decode(_HEADER, parents=[doc], offsets=[20], sampling_params=_GREEDY)
        copy = c.reencode(answer, parents=[other])
        last = c.decode(_HEADER, parents=[answer, copy], sampling_params=_GREEDY)
    read = [whole(writer.encode(_DOC), 20)]
    answered = reader.encode(answer.token_ids, read, answer.position)
    assert_choices(answered, len(_HEADER))
    copied = writer.encode(copy.token_ids, [whole(writer.encode(_NEXT), 0)], copy.position)
    both = [whole(answered, 0), whole(copied, len(answered))]
    assert_choices(reader.encode(last.token_ids, both, last.position), len(_HEADER))


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("mode", ["exact", "baseline"])
def test_text_is_read_by_whoever_generates(
    llm: Any,
    adapter: Adapter,
    tiny_oracle: Callable[[str], Oracle],
    placement: str,
    mode: str,
) -> None:
    """As a request on the concatenated text: with a writer, that is the plain model."""
    oracle = adapter.oracle if _used(placement)[1] else tiny_oracle("llama")
    with Choreography(llm, mode, adapter=adapter.placed(placement)) as c:
        answer = c.decode(_HEADER, parents=[c.prefill(_DOC)], sampling_params=_GREEDY)
    assert answer.usage.exact
    assert_choices(oracle.encode([*_DOC, *answer.token_ids]), len(_DOC) + len(_HEADER))


def test_a_call_gets_what_it_names(
    llm: Any, adapter: Adapter, tiny_oracle: Callable[[str], Oracle]
) -> None:
    """In a session of a writer: none; the same, where it is used; one that nobody has placed."""
    base, folder = tiny_oracle("llama"), adapter.placed("prefill")
    plain = llm.model_config.served_model_name
    with Choreography(llm, adapter=folder) as c:
        for named, writer in (
            (plain, base),
            (folder, adapter.oracle),
            (adapter.path, adapter.oracle),
        ):
            doc = c.prefill(_DOC, adapter=named)
            for reading, reader in ((plain, base), (adapter.path, adapter.oracle)):
                answer = c.decode(_HEADER, parents=[doc], adapter=reading, sampling_params=_GREEDY)
                read = reader.encode(answer.token_ids, [whole(writer.encode(_DOC), 0)], 45)
                assert_choices(read, len(_HEADER))


# -- folders and what they hold ----------------------------------------------------------------


def test_the_same_weights_are_the_same_adapter(llm: Any, adapter: Adapter) -> None:
    """Whatever else training leaves in their folders."""
    writer, both = adapter.placed("prefill"), adapter.placed("both")
    with Choreography(llm, adapter=writer) as one, Choreography(llm, adapter=both) as other:
        one.prefill(_DOC)
        assert other.prefill(_DOC).usage.reused_tokens == 32  # whole blocks


def test_only_calls_that_wear_it_bring_it(llm: Any, adapter: Adapter) -> None:
    """With a reader, messages are the plain model's: all adapters share them, and so do others."""
    with Choreography(llm) as plain, Choreography(llm, adapter=adapter.placed("decode")) as c:
        plain.prefill(_DOC)
        assert c.prefill(_DOC).usage.reused_tokens == 32  # whole blocks
    with Choreography(llm) as plain, Choreography(llm, adapter=adapter.placed("prefill")) as c:
        plain.prefill(_DOC)
        assert c.prefill(_DOC).usage.reused_tokens == 0


# -- what is refused -----------------------------------------------------------------------------


def _refused(llm: Any, match: str, error: type[ChoreoError] = AdapterError, **options: Any) -> None:
    with pytest.raises(error, match=match):
        Choreography(llm, **options)


def test_an_adapter_of_another_model(
    llm: Any, adapter: Adapter, tiny_model_path: Callable[[str], Path]
) -> None:
    folder = adapter.placed("both", tiny_model_path("qwen3"))
    _refused(llm, r"trained on .*qwen3.*llama, are others: serve that model", adapter=folder)
    with Choreography(llm) as c:
        with pytest.raises(AdapterError, match="trained on"):
            c.prefill(_DOC, adapter=folder)
        assert c.prefill(_DOC).num_tokens == 45, "the session goes on"


def test_a_folder_that_does_not_say_where_it_is_used(llm: Any, adapter: Adapter) -> None:
    _refused(llm, 'no choreo_train.json.*say placement="prefill"', adapter=adapter.path)
    _refused(llm, 'no choreo_train.json.*say placement="prefill"', adapter=str(adapter.path))


def test_placements_that_there_are_not(llm: Any, adapter: Adapter) -> None:
    wrong = {"adapter": adapter.path, "placement": "nobody"}
    _refused(llm, "placement must be one of", ChoreoError, **wrong)
    _refused(llm, "name the adapter, too", ChoreoError, placement="prefill")


@pytest.mark.parametrize("placement", ["prefill", "decode"])
def test_a_call_that_contradicts_the_placement(llm: Any, adapter: Adapter, placement: str) -> None:
    folder, plain = adapter.placed(placement), llm.model_config.served_model_name
    wrong = "decode" if placement == "prefill" else "prefill"
    with Choreography(llm, adapter=folder) as c:
        with pytest.raises(AdapterError, match=rf"a {wrong} names.*placement {placement}.*both"):
            getattr(c, wrong)(_DOC, adapter=folder)
        getattr(c, wrong)(_DOC, adapter=plain)
        getattr(c, wrong)(_DOC)
    with Choreography(llm, adapter=folder, placement="both") as c:
        getattr(c, wrong)(_DOC, adapter=folder)


def test_what_vllm_does_not_load(llm: Any, adapter: Adapter, tmp_path: Path) -> None:
    """Found out before a worker tries, which would end the engine."""
    folder = tmp_path / "adapter"
    shutil.copytree(adapter.placed("both"), folder)
    config = json.loads((folder / "adapter_config.json").read_text())
    for change, reason in (({"r": 64}, "rank 64 .* max_lora_rank 8"), ({"use_dora": True}, "DoRA")):
        (folder / "adapter_config.json").write_text(json.dumps({**config, **change}))
        _refused(llm, reason, adapter=folder)
    (folder / "adapter_config.json").unlink()
    _refused(llm, "No such file.*: adapter_config.json", adapter=folder)
    _refused(llm, "a folder that there is", ChoreoError, adapter=tmp_path / "nowhere")
    assert _ordinary(llm), "the engine goes on"


def test_a_damaged_file(llm: Any, adapter: Adapter, tmp_path: Path) -> None:
    folder = tmp_path / "adapter"
    shutil.copytree(adapter.placed("both"), folder)
    (folder / "choreo_train.json").write_text('{"format": 99}')
    _refused(llm, "format 99", ChoreoError, adapter=folder)


def test_a_folder_trained_anew_is_placed_anew(
    llm: Any, adapter: Adapter, tmp_path: Path, tiny_model_path: Callable[[str], Path]
) -> None:
    folder = tmp_path / "adapter"
    shutil.copytree(adapter.placed("prefill"), folder)
    with Choreography(llm, adapter=folder) as c:
        c.prefill(_DOC, adapter=folder)
        TrainedAdapter("decode", ModelIdentity.of(tiny_model_path("llama")), "kl").save(folder)
        with pytest.raises(AdapterError, match="placement decode"):
            c.prefill(_DOC, adapter=folder)
