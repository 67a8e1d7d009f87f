# SPDX-License-Identifier: Apache-2.0
"""Bad calls of a client on a real server: refused as `Choreography` refuses them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import transformers
from vllm import SamplingParams

from tests.server.test_client import ANNA, GREEDY, SHED
from vllm_choreo import ChoreoClient, Choreography
from vllm_choreo.errors import (
    ChoreoError,
    OffsetError,
    UnsupportedOptionError,
)
from vllm_choreo.semantics.message import Message
from vllm_choreo.testing.server import Server
from vllm_choreo.wire.sampling import SENT


class _NoEngine:
    """An LLM of which only tokenizer and limits are asked, as in baseline mode."""

    def __init__(self, folder: Path) -> None:
        self._tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        model_config = SimpleNamespace(
            model="folder",
            served_model_name="model",
            max_model_len=2048,
            get_vocab_size=lambda: 49_152,
            get_diff_sampling_param=dict,
        )
        self.llm_engine = SimpleNamespace(
            has_unfinished_requests=lambda: False,
            vllm_config=SimpleNamespace(model_config=model_config, lora_config=None),
        )

    def get_tokenizer(self) -> Any:
        return self._tokenizer


BAD: dict[str, Callable[[Any], Any]] = {
    "empty text": lambda c: c.prefill(""),
    "empty list": lambda c: c.decode([]),
    "nothing": lambda c: c.prefill(None),
    "a number": lambda c: c.decode(7),
    "bytes": lambda c: c.prefill(b"text"),
    "token beyond the vocabulary": lambda c: c.prefill([10**6]),
    "negative token": lambda c: c.prefill([-1]),
    "bool for a token": lambda c: c.prefill([True]),
    "unknown parent": lambda c: c.prefill("x", parents=["nobody"]),
    "foreign parent": lambda c: c.prefill("x", parents=["other/doc"]),
    "odd parent": lambda c: c.prefill("x", parents=["ä b/c\n"]),
    "freed parent": lambda c: c.prefill("x", parents=["gone"]),
    "parents no list": lambda c: c.prefill("x", parents="doc"),
    "parent no message": lambda c: c.prefill("x", parents=[3]),
    "parent of two entries": lambda c: c.prefill("x", parents=[("doc", 0)]),
    "span too long": lambda c: c.prefill("x", parents=[("doc", 0, 1000)]),
    "span behind the end": lambda c: c.prefill("x", parents=[("doc", 1000, None)]),
    "empty span": lambda c: c.prefill("x", parents=[("doc", 3, 3)]),
    "negative span": lambda c: c.prefill("x", parents=[("doc", -1, None)]),
    "bool in a span": lambda c: c.prefill("x", parents=[("doc", True, None)]),
    "too many offsets": lambda c: c.prefill("x", parents=["doc"], offsets=[0, 1]),
    "float offset": lambda c: c.prefill("x", parents=["doc"], offsets=[0.0]),
    "negative new offset": lambda c: c.prefill("x", new_offset=-1),
    "offsets no list": lambda c: c.prefill("x", parents=["doc"], offsets="0"),
    "name taken": lambda c: c.prefill("x", save_as="doc"),
    "name of a freed message": lambda c: c.prefill("x", save_as="gone"),
    "name twice": lambda c: c.prefill([{"tokens": "x", "save_as": "a"}] * 2),
    "name with a slash": lambda c: c.prefill("x", save_as="a/b"),
    "name that is a number": lambda c: c.prefill("x", save_as="12"),
    "name that is no text": lambda c: c.prefill("x", save_as=3),
    "empty name": lambda c: c.prefill("x", save_as=""),
    "its own parent": lambda c: c.prefill("x", save_as="me", parents=["me"]),
    "no such mode": lambda c: c.prefill("x", mode="fast"),
    "mode of a session": lambda c: c.prefill("x", mode="baseline"),
    "unknown denied": lambda c: c.prefill("x", deny=["nobody"]),
    "denied": lambda c: c.prefill("x", parents=["doc"], deny=["doc"]),
    "deny no list": lambda c: c.prefill("x", deny="doc"),
    "too many tokens": lambda c: c.prefill("word " * 3000),
    "far too much text": lambda c: c.prefill("word " * 100_000),
    "too long with parents": lambda c: c.prefill("x", parents=["doc"] * 300),
    "n": lambda c: c.decode("x", sampling_params=SamplingParams(n=2)),
    "sampling of a prefill": lambda c: c.prefill([{"tokens": "x", "sampling_params": GREEDY}]),
    "sampling no parameters": lambda c: c.decode("x", sampling_params=3),
    "the engine's own arguments": lambda c: c.decode(
        "x", sampling_params=SamplingParams(extra_args={"choreo": {}})
    ),
    "item of a list no dict": lambda c: c.prefill([{"tokens": "x"}, "y"]),
    "item without tokens": lambda c: c.prefill([{"parents": ["doc"]}]),
    "item with both": lambda c: c.prefill([{"tokens": "x", "header": "y"}]),
    "unknown key": lambda c: c.prefill([{"tokens": "x", "parent": "doc"}]),
    "parents beside a list": lambda c: c.prefill([{"tokens": "x"}], parents=["doc"]),
    "second of a list": lambda c: c.prefill([{"tokens": "x"}, {"tokens": ""}]),
    "copy of nobody": lambda c: c.reencode("nobody"),
    "copy of a freed message": lambda c: c.reencode("gone"),
    "copy of too much": lambda c: c.reencode(("doc", 0, 1000)),
    "free nobody": lambda c: c.free("nobody"),
    "free a freed message": lambda c: c.free("gone"),
    "free no message": lambda c: c.free(3),
    "evict nobody": lambda c: c.evict("nobody"),
    "pin nobody": lambda c: c.pin("nobody", ttl=5),
    "pin for no time": lambda c: c.pin("doc", ttl=0),
    "pin for ever": lambda c: c.pin("doc", ttl=float("inf")),
    "pin for True": lambda c: c.pin("doc", ttl=True),
    "unpin a freed message": lambda c: c.unpin("gone"),
}
# Where the server, which sees JSON, has a name of its own for what is wrong.
_OF_JSON = ("content", "copy_of", "name", "sampling_params.", "ttl")


@pytest.fixture(scope="module")
def local(shallow_model_path: Path) -> Choreography:
    """The same rules without a server or an engine."""
    return _with_messages(Choreography(_NoEngine(shallow_model_path), mode="baseline"))


@pytest.fixture(scope="module")
def remote(server: Server) -> Iterator[ChoreoClient]:
    with ChoreoClient(server.base_url, server.keys[0]) as c:
        yield _with_messages(c)


def _with_messages(c: Any) -> Any:
    c.prefill(SHED, save_as="doc")
    c.free(c.prefill(ANNA, save_as="gone"))
    return c


@pytest.mark.parametrize("name", BAD)
def test_a_bad_call_is_refused_as_without_a_server(
    name: str, local: Choreography, remote: ChoreoClient
) -> None:
    with pytest.raises(ChoreoError) as expected:
        BAD[name](local)
    with pytest.raises(ChoreoError) as refused:
        BAD[name](remote)
    assert type(refused.value) is type(expected.value)
    if not refused.value.parameter.startswith(_OF_JSON):
        assert refused.value.parameter == expected.value.parameter
    assert remote.stats()["messages"] == 1


def test_a_call_that_fails_in_the_engine_leaves_the_others(remote: ChoreoClient) -> None:
    far = {"header": "x", "new_offset": 2047, "sampling_params": GREEDY}
    with pytest.raises(OffsetError) as failed:
        remote.decode([{"header": "So", "sampling_params": GREEDY, "save_as": "good"}, far])
    good, bad = failed.value.results
    assert isinstance(good, Message) and bad is failed.value
    read = remote.decode("x", parents=["good"], sampling_params=GREEDY)
    assert read.usage.reused_tokens == good.num_tokens
    remote.free(good, read)


def test_all_sampling_options_of_the_server_can_be_sent() -> None:
    from vllm_choreo.server.schemas import SamplingBody

    assert set(SamplingBody.model_fields) == SENT


def test_an_unsupported_option_is_named(remote: ChoreoClient) -> None:
    with pytest.raises(UnsupportedOptionError, match="detokenize"):
        remote.decode("x", sampling_params=SamplingParams(detokenize=False))
    with pytest.raises(ChoreoError, match="max_token"):
        remote.decode("x", sampling_params={"max_token": 3})
