# SPDX-License-Identifier: Apache-2.0
"""What the HTTP clients send, and what they read: pure functions, no server."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.client.scripted_server import SESSION, body_of
from vllm_choreo.client import Logprob
from vllm_choreo.client.exchanges import (
    Events,
    Exchange,
    deleting_saved,
    fetching,
    opening,
    operating,
    tracing,
)
from vllm_choreo.errors import (
    ChoreoError,
    OffsetError,
    RepairError,
    SpanError,
    UnknownMessageError,
    UnsupportedOptionError,
)
from vllm_choreo.semantics.call import asked, asked_copy, linked_specs
from vllm_choreo.semantics.message import Message
from vllm_choreo.semantics.naming import ParentSpan
from vllm_choreo.semantics.session_options import SessionOptions
from vllm_choreo.wire.calls import call_json
from vllm_choreo.wire.messages import message_of
from vllm_choreo.wire.sampling import sampling_fields


def message(name: str = "doc") -> Message:
    return message_of(body_of(name), 0.0)


def calls_of(
    kind: str, tokens: Any, options: dict[str, Any], denied: Sequence[str] = ()
) -> tuple[list[dict[str, Any]], bool]:
    """The JSON of each call, and whether they are a list."""
    given = asked(kind, tokens, options, denied)
    return [call_json(spec) for spec in given.calls], given.is_list


def call(kind: str, tokens: Any, **options: Any) -> dict[str, Any]:
    """The JSON of one call."""
    (only,), many = calls_of(kind, tokens, options)
    assert not many
    return only


def copy(named: Any) -> dict[str, Any]:
    """The JSON of a copy."""
    return call_json(asked_copy(named, {}).calls[0])


# -- what is sent --------------------------------------------------------------------------------


def test_profiles_of_several_pairs_are_a_servers_own(tmp_path: Path) -> None:
    with pytest.raises(RepairError, match="choreo-pair"):
        opening(SessionOptions(repair=tmp_path))


def test_what_was_saved_is_deleted_by_its_name() -> None:
    request = deleting_saved("message.a/b").request
    assert (request.method, request.path) == ("DELETE", "/v1/choreo/kept/message%2Ea%2Fb")


def test_what_is_not_given_is_not_sent() -> None:
    assert call("prefill", "text") == {"type": "prefill", "content": "text"}
    assert call("decode", (5, 6), parents=[], offsets=None, deny=()) == {
        "type": "decode",
        "content": [5, 6],
    }


def test_all_ways_to_name_a_parent() -> None:
    parents = [message(), "doc", f"{SESSION}/doc", (message(), 1, None), ("doc", None, 4)]
    sent = call("prefill", "x", parents=parents, offsets=range(5), new_offset=9, save_as="me")
    assert sent == {
        "type": "prefill",
        "content": "x",
        "parents": [
            *(f"{SESSION}/doc", "doc", f"{SESSION}/doc"),
            *({"id": f"{SESSION}/doc", "start": 1}, {"id": "doc", "stop": 4}),
        ],
        "offsets": [0, 1, 2, 3, 4],
        "new_offset": 9,
        "save_as": "me",
    }


def test_a_copy_names_the_message_or_its_part() -> None:
    assert copy(message())["copy_of"] == f"{SESSION}/doc"
    part = copy((message(), 1, 2))
    assert part == {"type": "prefill", "copy_of": {"id": f"{SESSION}/doc", "start": 1, "stop": 2}}


def test_what_is_given_for_all_reaches_each_item_that_has_none() -> None:
    own = {"sampling_params": {"seed": 2}, "mode": "choreo"}
    items = [{"header": "a", "deny": ["late"]}, {"tokens": "b", **own}]
    shared = {"sampling_params": {"seed": 1}, "mode": "exact", "deny": ["early"]}
    sent, many = calls_of("decode", items, shared, ["always"])
    assert many and sent == [
        {
            "type": "decode",
            "content": "a",
            "mode": "exact",
            "deny": ["always", "early", "late"],
            "sampling_params": {"seed": 1},
        },
        {
            "type": "decode",
            "content": "b",
            "mode": "choreo",
            "deny": ["always", "early"],
            "sampling_params": {"seed": 2},
        },
    ]


def test_an_adapter_is_sent_by_its_name() -> None:
    from vllm.lora.request import LoRARequest

    for adapter in ("one", LoRARequest("one", 1, "folder")):
        assert call("decode", "a", adapter=adapter)["adapter"] == "one"
    for wrong in (3, "", object()):
        with pytest.raises(ChoreoError, match="as the server knows it"):
            call("decode", "a", adapter=wrong)


def test_layers_in_words_are_sent_as_rules() -> None:
    in_words = {"reuse": {"by": "none"}, "encode": {"by": "all"}, "auto": "auto"}
    for word, rule in in_words.items():
        assert call("decode", "a", parents=["x"], layers=word)["repair"] == rule


def test_calls_of_both_kinds_tell_by_their_keys() -> None:
    specs = linked_specs([{"tokens": "a"}, {"header": "b"}, {"copy_of": "c"}], ["x"])
    sent = [call_json(spec) for spec in specs]
    assert [(item["type"], item["deny"]) for item in sent] == [
        ("prefill", ["x"]),
        ("decode", ["x"]),
        ("prefill", ["x"]),
    ]
    assert sent[2]["copy_of"] == "c" and "content" not in sent[2]


@pytest.mark.parametrize(
    ("tokens", "shared", "error", "parameter"),
    [
        (None, {}, ChoreoError, "header"),
        (7, {}, ChoreoError, "header"),
        (b"bytes", {}, ChoreoError, "header"),
        ([1, 2.0], {}, ChoreoError, "header"),
        ([1, True], {}, ChoreoError, "header"),
        ("x", {"parents": "doc"}, ChoreoError, "parents"),
        ("x", {"parents": message()}, ChoreoError, "parents"),
        ("x", {"parents": [3]}, ChoreoError, "parents"),
        ("x", {"parents": [("doc", 1)]}, ChoreoError, "parents"),
        ("x", {"parents": [("doc", 1.0, None)]}, SpanError, "parents"),
        ("x", {"parents": [("doc", True, None)]}, SpanError, "parents"),
        ("x", {"parents": [("doc", 3, 3)]}, SpanError, "parents"),
        ("x", {"parents": ["doc"], "offsets": [1.0]}, OffsetError, "offsets"),
        ("x", {"parents": ["doc"], "offsets": []}, OffsetError, "offsets"),
        ("x", {"parents": ["doc"], "offsets": 3}, OffsetError, "offsets"),
        ("x", {"new_offset": -1}, OffsetError, "new_offset"),
        ("x", {"deny": "doc"}, ChoreoError, "deny"),
        ("x", {"deny": [None]}, ChoreoError, "deny"),
        ("x", {"sampling_params": 3}, UnsupportedOptionError, "sampling_params"),
        ("x", {"sampling_params": {"temperature": float("nan")}}, ChoreoError, "temperature"),
        ("x", {"sampling_params": {"stop": {"a"}}}, UnsupportedOptionError, "stop"),
        ([{"header": "a"}], {"parents": ["doc"]}, ChoreoError, "parents"),
        ([{"header": "a"}, "b"], {}, ChoreoError, "tokens"),
        ([{"header": "a", "tokens": "b"}], {}, ChoreoError, "tokens"),
        ([{"header": "a", "parent": "b"}], {}, ChoreoError, "parent"),
        ([{"parents": ["doc"]}], {}, ChoreoError, "tokens"),
    ],
)
def test_what_is_refused_before_it_is_sent(
    tokens: Any, shared: dict[str, Any], error: type[ChoreoError], parameter: str
) -> None:
    with pytest.raises(error) as refused:
        calls_of("decode", tokens, shared)
    assert refused.value.parameter == parameter


def test_a_prefill_samples_nothing() -> None:
    with pytest.raises(UnsupportedOptionError, match="prefill samples nothing"):
        calls_of("prefill", [{"tokens": "a", "sampling_params": {"seed": 1}}], {})


def test_where_messages_are() -> None:
    path = f"/v1/choreo/sessions/{SESSION}/messages"
    request = fetching(SESSION, message("a")).request
    assert (request.method, request.path) == ("GET", f"{path}/a")
    assert tracing(SESSION, "a").request.path == f"{path}/a/provenance"
    named = [f"{SESSION}/a", message("b")]

    def sent(exchange: Exchange[None]) -> tuple[str, str, Any]:
        request = exchange.request
        return request.method, request.path, json.loads(request.body or b"null")

    messages = {"messages": [f"{SESSION}/a", f"{SESSION}/b"]}
    assert sent(operating(SESSION, "free", named)) == ("POST", f"{path}/free", messages)
    assert sent(operating(SESSION, "evict", named)) == ("POST", f"{path}/evict", messages)
    assert sent(operating(SESSION, "unpin", named)) == ("POST", f"{path}/unpin", messages)
    assert sent(operating(SESSION, "pin", named, None)) == ("POST", f"{path}/pin", messages)
    timed = {**messages, "ttl_seconds": 5.0}
    assert sent(operating(SESSION, "pin", named, 5.0)) == ("POST", f"{path}/pin", timed)


@pytest.mark.parametrize("name", ["other/a", f"{SESSION}/", "", f"{SESSION}/a/b", "/a"])
def test_messages_of_others_are_unknown_without_asking(name: str) -> None:
    with pytest.raises(UnknownMessageError):
        fetching(SESSION, name)


@pytest.mark.parametrize("name", ["..", ".", "a b", "ä?#%"])
def test_a_name_is_never_a_way_to_something_else(name: str) -> None:
    last = fetching(SESSION, name).request.path.rpartition("/")[2]
    assert not set(last) & set("./?# ")


# -- sampling parameters -------------------------------------------------------------------------


def test_sampling_parameters_are_sent_by_what_is_not_the_default() -> None:
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

    assert sampling_fields(None) is None
    assert sampling_fields(SamplingParams()) == {}
    given = {"max_tokens": 5, "temperature": 0.5, "stop": ["x"], "logprobs": 2, "n": 2}
    assert sampling_fields(SamplingParams(**given)) == given
    assert sampling_fields(SamplingParams(output_kind=RequestOutputKind.DELTA)) == {}
    choice = StructuredOutputsParams(choice=["a", "b"])
    fields = sampling_fields(SamplingParams(structured_outputs=choice))
    assert fields is not None and fields["structured_outputs"]["choice"] == ["a", "b"]
    assert not any(name.startswith("_") for name in fields["structured_outputs"])
    assert sampling_fields({"seed": 3}) == {"seed": 3}


def test_sampling_parameters_survive_the_way() -> None:
    from vllm import SamplingParams

    given = SamplingParams(max_tokens=7, seed=3, top_k=5, stop="x", logit_bias={7: 1.5})
    fields = json.loads(json.dumps(sampling_fields(given)))
    fields["logit_bias"] = {int(token): bias for token, bias in fields["logit_bias"].items()}
    assert SamplingParams(**fields) == given


def test_no_limit_is_one_that_no_context_reaches() -> None:
    from vllm import SamplingParams

    assert sampling_fields(SamplingParams(max_tokens=None)) == {"max_tokens": 2**31 - 1}
    assert sampling_fields({"max_tokens": None}) == {"max_tokens": 2**31 - 1}


def test_options_that_cannot_be_sent_are_named() -> None:
    from vllm import SamplingParams
    from vllm.sampling_params import BeamSearchParams

    for name, value in (("detokenize", False), ("stream_interval", 4)):
        with pytest.raises(UnsupportedOptionError) as refused:
            sampling_fields(SamplingParams(**{name: value}))
        assert refused.value.parameter == name
    with pytest.raises(UnsupportedOptionError) as refused:
        sampling_fields(SamplingParams(extra_args={"mask": object()}))
    assert refused.value.parameter == "extra_args"
    assert sampling_fields(SamplingParams(prompt_logprobs=1)) == {"prompt_logprobs": 1}
    with pytest.raises(UnsupportedOptionError) as refused:
        sampling_fields(SamplingParams(skip_reading_prefix_cache=True))
    assert refused.value.parameter == "skip_reading_prefix_cache"
    with pytest.raises(UnsupportedOptionError, match="beam search"):
        sampling_fields(BeamSearchParams(beam_width=2, max_tokens=4))


# -- what is read --------------------------------------------------------------------------------


def test_a_message_is_made_again() -> None:
    entry = {"98": {"logprob": -0.5, "rank": 1, "decoded_token": "b"}}
    body = body_of(logprobs=[entry], offsets=[None], new_offset=9)
    made = message_of(body, submitted=3.0)
    assert (made.id, made.text, made.token_ids, made.num_tokens) == (
        f"{SESSION}/0",
        "ab",
        (97, 98),
        2,
    )
    assert made.parents == (ParentSpan(f"{SESSION}/doc", None, 3),)
    assert (made.generated_text, made.generated_token_ids) == ("b", (98,))
    assert (made.offsets, made.new_offset) == ((None,), 9)
    assert made.logprobs == [{98: Logprob(-0.5, 1, "b")}]
    assert (made.position, made.finish_reason) == (7, "length")
    assert (made.usage.exact, made.usage.reused_tokens) == (False, 3)
    assert (made.metrics.submitted, made.metrics.waiting) == (3.0, None)
    assert (made.metrics.ttft, made.metrics.latency) == (0.25, 0.5)
    with pytest.raises(ChoreoError, match=r"ask for it by c\.provenance"):
        _ = made.provenance


def test_events_however_the_bytes_are_cut() -> None:
    # Ends of lines for Python, none for server-sent events.
    texts = ["a\u2028b", "\x85ä\x0b", "data: x"]
    stream = "".join(
        f"data: {json.dumps({'text': text}, ensure_ascii=False)}\n\n" for text in texts
    )
    data = (": comment\n\n" + stream + "data: [DONE]\n\n").encode()
    for size in (1, 7, len(data)):
        events = Events()
        parts = [data[i : i + size] for i in range(0, len(data), size)]
        assert [event["text"] for part in parts for event in events.feed(part)] == texts
