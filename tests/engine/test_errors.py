# SPDX-License-Identifier: Apache-2.0
"""Every bad call on a real engine: refused by name, and nobody else is disturbed.

The client refuses most of them before they are submitted (`tests/api/test_facades.py`). Here the
same calls are also made without it, as a server would pass them on: the engine must refuse them
itself, in `RequestOutput.kv_transfer_params["choreo_error"]`, while the other requests of the batch
run on, and give every block back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from vllm import AsyncEngineArgs, SamplingParams
from vllm.exceptions import VLLMValidationError

from tests.grids import sampled
from vllm_choreo import Choreography
from vllm_choreo.engine import utility
from vllm_choreo.errors import (
    ChoreoError,
    CyclicParentsError,
    EmptyTokensError,
    FreedMessageError,
    NameTakenError,
    OffsetError,
    ParentFailedError,
    SpanError,
    TooLongError,
    UnknownMessageError,
    UnsupportedModelError,
    UnsupportedOptionError,
    UnsupportedVersionError,
    error_from_report,
)

SESSION = "raw"
DOC_TOKENS = 70
MAX_MODEL_LEN = 512
PLAIN_PROMPT = [(7 * i) % 480 + 5 for i in range(45)]
READER_HEADER = [9, 11, 13]


def _greedy(num_tokens: int = 6, **options: Any) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True, **options)


def _raw(wire: Any, num_tokens: int = 6, **options: Any) -> SamplingParams:
    """Sampling parameters with a call in its wire form, right or wrong."""
    if isinstance(wire, dict):
        wire = {"session": SESSION, **wire}
    return _greedy(num_tokens, extra_args={"choreo": wire}, **options)


def _generate(llm: Any, requests: list[tuple[list[int], SamplingParams]]) -> list[Any]:
    prompts = [{"prompt_token_ids": tokens} for tokens, _ in requests]
    return llm.generate(prompts, [params for _, params in requests], use_tqdm=False)


def _stats(llm: Any) -> dict[str, Any]:
    return utility.call(llm, "stats", None)


def _error(output: Any) -> ChoreoError:
    """The error with which the engine ended a request."""
    assert output.finished
    assert output.outputs[0].finish_reason == "error"
    report = output.kv_transfer_params["choreo_error"]
    assert set(report) == {"parameter", "value", "message", "type"}
    assert all(isinstance(entry, str) for entry in report.values())
    return error_from_report(report)


@pytest.fixture
def llm(engine_slot: Callable[..., Any], tiny_model_path: Callable[[str], Path]) -> Iterator[Any]:
    """The module's engine. A test must leave no call, no message and no block behind."""
    engine = engine_slot(tiny_model_path("llama"), max_model_len=MAX_MODEL_LEN)
    yield engine
    utility.call(engine, "close", SESSION)
    stats = _stats(engine)
    assert stats["num_calls"] == stats["num_messages"] == stats["num_blocks_all_sessions"] == 0
    assert stats["num_free_blocks"] == stats["num_pool_blocks"] - 1


@pytest.fixture
def doc(llm: Any) -> str:
    """A message of `SESSION` that all raw calls may read."""
    tokens = [(11 * i) % 450 + 20 for i in range(DOC_TOKENS)]
    _generate(llm, [(tokens, _raw({"save_as": "doc", "kind": "prefill"}))])
    return "doc"


class _Neighbours:
    """An ordinary and a choreographed request, whose answers must not depend on the batch."""

    def __init__(self, llm: Any, doc: str) -> None:
        self.llm = llm
        reader = {"parents": [doc], "offsets": [4], "new_offset": 100}
        self.requests = [(PLAIN_PROMPT, _greedy()), (READER_HEADER, _raw(reader))]
        self.free_blocks = _stats(llm)["num_free_blocks"]
        self.expected = [self._tokens(self._run([request])[0]) for request in self.requests]

    def _run(self, requests: list[tuple[list[int], SamplingParams]]) -> list[Any]:
        outputs = _generate(self.llm, requests)
        # A decode made a message that nobody names: give it up.
        made = [(output.kv_transfer_params or {}).get("choreo") for output in outputs]
        utility.call(self.llm, "free", SESSION, [report["id"] for report in made if report])
        return outputs

    @staticmethod
    def _tokens(output: Any) -> list[int]:
        assert output.outputs[0].finish_reason == "length"
        return list(output.outputs[0].token_ids)

    def run_with(self, *requests: tuple[list[int], SamplingParams]) -> list[Any]:
        """Run `requests` between the neighbours, check these, and return the others' outputs."""
        first, last = self.requests
        outputs = self._run([first, *requests, last])
        assert [self._tokens(outputs[0]), self._tokens(outputs[-1])] == self.expected
        assert _stats(self.llm)["num_free_blocks"] == self.free_blocks
        return outputs[1:-1]


@pytest.fixture
def neighbours(llm: Any, doc: str) -> _Neighbours:
    return _Neighbours(llm, doc)


@dataclass(frozen=True)
class Bad:
    """A call that must be refused: its wire form, and by which error about which parameter."""

    wire: Any
    error: type[ChoreoError]
    parameter: str
    options: dict[str, Any] = field(default_factory=dict)


# So far that two tokens and a sampled one do not fit behind it.
_FAR = MAX_MODEL_LEN - 2
BAD = {
    "unknown": Bad({"parents": ["nobody"]}, UnknownMessageError, "parents"),
    "foreign": Bad({"parents": ["doc"], "session": "other"}, UnknownMessageError, "parents"),
    "too few offsets": Bad({"parents": ["doc"], "offsets": []}, OffsetError, "offsets"),
    "too many offsets": Bad({"parents": ["doc"], "offsets": [0, 1]}, OffsetError, "offsets"),
    "negative offset": Bad({"parents": ["doc"], "offsets": [-1]}, OffsetError, "offsets"),
    "float offset": Bad({"parents": ["doc"], "offsets": [1.0]}, OffsetError, "offsets"),
    "bool offset": Bad({"parents": ["doc"], "offsets": [True]}, OffsetError, "offsets"),
    "text for offsets": Bad({"parents": ["doc"], "offsets": "0"}, OffsetError, "offsets"),
    "float new offset": Bad({"new_offset": 4.0}, OffsetError, "new_offset"),
    "negative new offset": Bad({"new_offset": -4}, OffsetError, "new_offset"),
    "offset beyond the model": Bad({"parents": ["doc"], "offsets": [_FAR]}, OffsetError, "offsets"),
    "new offset beyond the model": Bad({"new_offset": _FAR}, OffsetError, "new_offset"),
    "huge offset": Bad({"parents": ["doc"], "offsets": [2**60]}, OffsetError, "offsets"),
    "span too long": Bad({"parents": [["doc", 0, DOC_TOKENS + 1]]}, SpanError, "parents"),
    "span behind the end": Bad({"parents": [["doc", DOC_TOKENS, None]]}, SpanError, "parents"),
    "empty span": Bad({"parents": [["doc", 3, 3]]}, SpanError, "parents"),
    "negative span": Bad({"parents": [["doc", -3, None]]}, SpanError, "parents"),
    "bool in a span": Bad({"parents": [["doc", True, 5]]}, SpanError, "parents"),
    "too long in blocks": Bad({"parents": [["doc", 0, 1]] * 16}, TooLongError, "parents"),
    "too long in tokens": Bad({"parents": ["doc"] * 8}, TooLongError, "parents"),
    "save_as taken": Bad({"save_as": "doc"}, NameTakenError, "save_as"),
    "save_as is a number": Bad({"save_as": 3}, ChoreoError, "save_as"),
    "its own parent": Bad({"save_as": "me", "parents": ["me"]}, CyclicParentsError, "parents"),
    "unknown key": Bad({"parent": ["doc"]}, ChoreoError, "choreo.parent"),
    "unknown kind": Bad({"kind": "encode"}, ChoreoError, "kind"),
    "no dict": Bad(["doc"], ChoreoError, "choreo"),
    "parents no list": Bad({"parents": "doc"}, ChoreoError, "parents"),
    "parent of two entries": Bad({"parents": [["doc", 0]]}, ChoreoError, "parents"),
    "session no string": Bad({"session": 3}, ChoreoError, "session"),
}


@pytest.mark.parametrize("case", BAD.values(), ids=BAD.keys())
def test_the_engine_refuses_a_bad_call_and_nothing_else(neighbours: _Neighbours, case: Bad) -> None:
    (output,) = neighbours.run_with(([5, 6], _raw(case.wire, **case.options)))
    error = _error(output)
    assert type(error) is case.error
    assert error.parameter == case.parameter
    assert len(error.message) > 10
    assert not output.outputs[0].token_ids


@pytest.mark.parametrize("kind", ["decode", "prefill"])
def test_a_bad_call_leaves_nothing_that_a_later_one_could_read(
    neighbours: _Neighbours, kind: str
) -> None:
    long = {"save_as": "long", "parents": ["doc"] * 8, "kind": kind}
    first, child = neighbours.run_with(
        ([5], _raw(long)), ([6], _raw({"save_as": "child", "parents": ["long"]}))
    )
    assert isinstance(_error(first), TooLongError)
    assert isinstance(_error(child), ParentFailedError)
    (later,) = neighbours.run_with(([6], _raw({"parents": ["child"]})))
    assert isinstance(_error(later), ParentFailedError)


def test_keys_that_the_front_end_did_not_read_are_refused(llm: Any) -> None:
    params = _greedy(extra_args={"choreo_parents": ["doc"]})
    (output,) = _generate(llm, [(PLAIN_PROMPT, params)])
    report = output.kv_transfer_params["choreo_error"]
    assert report["parameter"] == "choreo_parents" and "--plugin choreo" in report["message"]


def test_a_freed_message_is_unknown(neighbours: _Neighbours) -> None:
    _generate(neighbours.llm, [([5, 6], _raw({"save_as": "gone", "kind": "prefill"}))])
    assert utility.call(neighbours.llm, "free", SESSION, ["gone", "never was"]) == 1
    (output,) = neighbours.run_with(([5], _raw({"parents": ["gone"]})))
    assert isinstance(_error(output), UnknownMessageError)


@pytest.mark.parametrize(
    ("operation", "arguments"), [("evict", ()), ("pin", (5.0,)), ("unpin", ())]
)
def test_an_operation_on_a_message_that_is_gone_is_refused_by_name(
    neighbours: _Neighbours, operation: str, arguments: tuple[float, ...]
) -> None:
    """Who loses a race with another one's `free` is told so; the engine raises nothing."""
    report = utility.call(neighbours.llm, operation, SESSION, ["doc", "gone"], *arguments)
    error = error_from_report(report["choreo_error"])
    assert isinstance(error, UnknownMessageError)
    assert (error.parameter, error.value) == ("messages", "gone")
    neighbours.run_with()


def test_a_sub_span_of_a_message_still_being_generated(neighbours: _Neighbours) -> None:
    """Only when its parent ends is it known that the sub-span lies beyond it."""
    parent, good, bad = neighbours.run_with(
        ([5, 6], _raw({"save_as": "parent"})),
        ([7], _raw({"save_as": "good", "parents": [["parent", 1, 8]]})),
        ([7], _raw({"save_as": "bad", "parents": [["parent", 1, 9]]})),
    )
    assert parent.kv_transfer_params["choreo"]["num_tokens"] == 8
    assert good.kv_transfer_params["choreo"]["reused_tokens"] == 7
    assert isinstance(_error(bad), SpanError)


def test_a_parent_that_is_aborted_takes_its_waiting_children_along(neighbours: _Neighbours) -> None:
    engine = neighbours.llm.llm_engine
    requests = {
        "parent": _raw({"save_as": "parent"}, 400),
        "child": _raw({"save_as": "child", "parents": ["doc", "parent"]}),
        "grandchild": _raw({"save_as": "grandchild", "parents": ["child"]}),
    }
    for name, params in requests.items():
        engine.add_request(name, {"prompt_token_ids": [5, 6]}, params)
    for _ in range(5):
        engine.step()
    engine.abort_request(["parent"])
    outputs = {}
    while engine.has_unfinished_requests():
        outputs.update({output.request_id: output for output in engine.step() if output.finished})
    assert isinstance(_error(outputs["child"]), ParentFailedError)
    assert isinstance(_error(outputs["grandchild"]), ParentFailedError)
    assert neighbours.run_with() == []


def test_children_that_are_aborted_while_they_wait_leave_nothing(neighbours: _Neighbours) -> None:
    engine = neighbours.llm.llm_engine
    engine.add_request("parent", {"prompt_token_ids": [5]}, _raw({"save_as": "parent"}, 20))
    child = _raw({"save_as": "child", "parents": ["parent", "doc"]})
    engine.add_request("child", {"prompt_token_ids": [6]}, child)
    for _ in range(4):
        engine.step()
    engine.abort_request(["child"])
    while engine.has_unfinished_requests():
        engine.step()
    utility.call(neighbours.llm, "free", SESSION, ["parent", "child"])
    assert neighbours.run_with() == []


def test_a_parent_freed_while_a_child_waits_is_still_read(neighbours: _Neighbours) -> None:
    engine = neighbours.llm.llm_engine
    engine.add_request("parent", {"prompt_token_ids": [5]}, _raw({"save_as": "parent"}, 12))
    child = _raw({"save_as": "child", "parents": ["parent"]})
    engine.add_request("child", {"prompt_token_ids": [6]}, child)
    for _ in range(4):
        engine.step()
    utility.call(neighbours.llm, "free", SESSION, ["parent"])
    outputs = {}
    while engine.has_unfinished_requests():
        outputs.update({output.request_id: output for output in engine.step() if output.finished})
    assert outputs["child"].kv_transfer_params["choreo"]["reused_tokens"] == 13
    utility.call(neighbours.llm, "free", SESSION, ["child"])
    assert neighbours.run_with() == []


def test_an_empty_prompt_is_refused_by_vllm_and_the_engine_goes_on(neighbours: _Neighbours) -> None:
    with pytest.raises(VLLMValidationError, match="empty"):
        _generate(neighbours.llm, [([], _raw({"parents": ["doc"]}))])
    assert neighbours.run_with() == []


# -- the same through the client -------------------------------------------------------------------


def _client_cases() -> dict[str, tuple[Callable[[Choreography, Any, Any], Any], type[ChoreoError]]]:
    """`call(session, its message of 70 tokens, another session's)`, and the error."""
    return {
        "unknown": (lambda c, m, o: c.decode("t5", parents=["nobody"]), UnknownMessageError),
        "foreign": (lambda c, m, o: c.decode("t5", parents=[o]), UnknownMessageError),
        "foreign id": (lambda c, m, o: c.decode("t5", parents=[o.id]), UnknownMessageError),
        "too few offsets": (lambda c, m, o: c.decode("t5", parents=[m], offsets=[]), OffsetError),
        "negative offset": (lambda c, m, o: c.decode("t5", parents=[m], offsets=[-1]), OffsetError),
        "float offset": (lambda c, m, o: c.decode("t5", parents=[m], offsets=[1.5]), OffsetError),
        "bool offset": (lambda c, m, o: c.prefill("t5", new_offset=True), OffsetError),
        "beyond": (lambda c, m, o: c.decode("t5", parents=[m], offsets=[_FAR]), OffsetError),
        "new beyond": (lambda c, m, o: c.prefill("t5", new_offset=_FAR + 1), OffsetError),
        "empty header": (lambda c, m, o: c.decode("", parents=[m]), EmptyTokensError),
        "empty tokens": (lambda c, m, o: c.prefill([]), EmptyTokensError),
        "span": (lambda c, m, o: c.decode("t5", parents=[(m, 0, DOC_TOKENS + 1)]), SpanError),
        "blocks": (lambda c, m, o: c.decode("t5", parents=[(m, 0, 1)] * 16), TooLongError),
        "tokens": (lambda c, m, o: c.decode("t5", parents=[m] * 8), TooLongError),
        "save_as taken": (lambda c, m, o: c.prefill("t5", save_as="doc"), NameTakenError),
        "itself": (lambda c, m, o: c.decode("t5", parents=["a"], save_as="a"), CyclicParentsError),
        "n": (
            lambda c, m, o: c.decode("t5", sampling_params=SamplingParams(n=2)),
            UnsupportedOptionError,
        ),
        "unknown key": (lambda c, m, o: c.decode([{"header": "t5", "parent": [m]}]), ChoreoError),
        "one of a list": (
            lambda c, m, o: c.decode(
                [{"header": "t5"}, {"header": "t6", "parents": [(m, 0, 1)] * 16}, {"header": "t7"}],
                sampling_params=_greedy(),
            ),
            TooLongError,
        ),
    }


@pytest.mark.parametrize("name", _client_cases())
def test_the_client_raises_the_same_errors(llm: Any, name: str) -> None:
    call, error = _client_cases()[name]
    with Choreography(llm) as c, Choreography(llm) as other:
        doc = c.prefill([7] * DOC_TOKENS, save_as="doc")
        foreign = other.prefill("t7 t8")
        before = _stats(llm)["num_free_blocks"]
        expected = c.decode("t9", parents=[doc], sampling_params=_greedy())
        with pytest.raises(error) as caught:
            call(c, doc, foreign)
        assert type(caught.value) is error
        assert caught.value.parameter
        again = c.decode("t9", parents=[doc], sampling_params=_greedy())
        assert again.token_ids == expected.token_ids
        c.free(expected, again, *[m for m in caught.value.results if hasattr(m, "num_tokens")])
        assert _stats(llm)["num_free_blocks"] == before


def test_freed_and_closed_through_the_client(llm: Any) -> None:
    with Choreography(llm) as c:
        doc = c.prefill("t7 t8")
        c.free(doc)
        for refused in (lambda: c.decode("t5", parents=[doc]), lambda: c.free(doc)):
            with pytest.raises(FreedMessageError):
                refused()
    with pytest.raises(FreedMessageError):
        c.prefill("t5")


def test_the_name_of_a_failed_call_may_be_used_again(llm: Any) -> None:
    with Choreography(llm) as c:
        doc = c.prefill([7] * DOC_TOKENS)
        with pytest.raises(TooLongError):
            c.decode("t5", parents=[(doc, 0, 1)] * 16, save_as="answer", sampling_params=_greedy())
        with pytest.raises(ParentFailedError):
            c.decode("t5", parents=["answer"], sampling_params=_greedy())
        answer = c.decode("t5", parents=[doc], save_as="answer", sampling_params=_greedy())
        assert (
            c.decode("t6", parents=["answer"], sampling_params=_greedy()).usage.reused_tokens == 7
        )
        assert answer.num_tokens == 7


# -- models ----------------------------------------------------------------------------------------


_SIZES = {"vocab_size": 512, "bos_token_id": 1, "eos_token_id": 2}
_LLAMA_SIZES = {
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "pad_token_id": 0,
    **_SIZES,
}


def _gpt2() -> transformers.PretrainedConfig:
    """Learned absolute positions."""
    return transformers.GPT2Config(n_positions=2048, n_embd=128, n_layer=2, n_head=4, **_SIZES)


def _phi3_longrope() -> transformers.PretrainedConfig:
    """Frequencies that change once the sequence is longer than 256 tokens."""
    rope = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "original_max_position_embeddings": 256,
        "short_factor": [1.0] * 16,
        "long_factor": [2.0] * 16,
    }
    return transformers.Phi3Config(
        original_max_position_embeddings=256, rope_parameters=rope, **_LLAMA_SIZES
    )


def _llama_dynamic() -> transformers.PretrainedConfig:
    """Dynamic NTK scaling, which vLLM computes once, for the greatest length."""
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    return transformers.LlamaConfig(rope_parameters=rope, **_LLAMA_SIZES)


def _write_model(config: transformers.PretrainedConfig, folder: Path, tokenizer: Path) -> Path:
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    transformers.AutoTokenizer.from_pretrained(tokenizer).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("config", sampled([_gpt2, _phi3_longrope], 1))
def test_a_model_that_cannot_be_choreographed_is_refused_at_start(
    config: Callable[[], transformers.PretrainedConfig],
    engine_slot: Callable[..., Any],
    tiny_model_path: Callable[[str], Path],
    tmp_path: Path,
) -> None:
    folder = _write_model(config(), tmp_path, tiny_model_path("llama"))
    with pytest.raises(UnsupportedModelError) as caught:
        engine_slot(folder)
    assert caught.value.parameter == "model"
    assert "cannot be choreographed" in caught.value.message
    assert 'VLLM_PLUGINS=""' in caught.value.message


def test_frequencies_that_vllm_fixes_at_start_are_accepted(
    engine_slot: Callable[..., Any], tiny_model_path: Callable[[str], Path], tmp_path: Path
) -> None:
    llm = engine_slot(_write_model(_llama_dynamic(), tmp_path, tiny_model_path("llama")))
    tokens, header = [(13 * i) % 470 + 9 for i in range(80)], [5, 6]
    (plain,) = _generate(llm, [([*tokens, *header], _greedy(8, logprobs=0))])
    with Choreography(llm) as c:
        second = c.prefill(tokens[33:], parents=[c.prefill(tokens[:33], save_as="first")])
        answer = c.decode(header, parents=["first", second], sampling_params=_greedy(8, logprobs=0))
    assert answer.usage.exact
    assert list(answer.generated_token_ids) == list(plain.outputs[0].token_ids)
    for one, other in zip(answer.logprobs, plain.outputs[0].logprobs, strict=True):
        (mine,), (theirs,) = one.values(), other.values()
        assert abs(mine.logprob - theirs.logprob) < 1e-4


# -- engine options --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "options", "reason"),
    [
        ("gpt_oss", {}, "share these"),
        ("llama", {"data_parallel_backend": "ray"}, "processes of its machine"),
        ("llama", {"data_parallel_size_local": 1}, "processes of its machine"),
    ],
)
def test_engines_that_are_no_engines_of_their_own_are_refused(
    model: str, options: dict[str, Any], reason: str, tiny_model_path: Callable[[str], Path]
) -> None:
    args = AsyncEngineArgs(
        str(tiny_model_path(model)), dtype="float32", max_model_len=256, data_parallel_size=2,
        **options,
    )  # fmt: skip
    with pytest.raises(ValueError, match=reason) as caught:
        args.create_engine_config()
    assert "start a server for each engine" in str(caught.value)


# -- another vLLM ----------------------------------------------------------------------------------


@pytest.mark.parametrize("version", ["0.31.2", "0.32.1", "0.33.0.dev1", "0.34.0"])
def test_another_vllm_is_refused(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import vllm

    from vllm_choreo.engine.compat import SUPPORTED_VLLM, check_version

    monkeypatch.setattr(vllm, "__version__", version)
    with pytest.raises(UnsupportedVersionError) as caught:
        check_version()
    assert caught.value.value == version
    for name in (*SUPPORTED_VLLM, "VLLM_PLUGINS"):
        assert name in caught.value.message
    for supported in SUPPORTED_VLLM:
        monkeypatch.setattr(vllm, "__version__", f"{supported}+cpu")
        check_version()
