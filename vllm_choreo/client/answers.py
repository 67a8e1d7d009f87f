# SPDX-License-Identifier: Apache-2.0
"""From the server's JSON to messages, errors and pieces. Pure functions, shared by both clients."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from vllm_choreo.api.choreography import raise_first_error
from vllm_choreo.client.failures import error_of
from vllm_choreo.errors import ChoreoError
from vllm_choreo.semantics.message import Message, Metrics, Usage
from vllm_choreo.semantics.params import ParentSpan
from vllm_choreo.semantics.provenance import Trace

_END = "[DONE]"


@dataclass(frozen=True)
class Logprob:
    """As `vllm.logprobs.Logprob`: of a token, natural; `rank` 1 is the likeliest."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


def message_of(body: Mapping[str, Any], submitted: float) -> Message:
    """The message of a message object.

    Args:
        body: of the answer.
        submitted: when the request was made, on the clock of `time.perf_counter`.
    """
    usage, metrics = body["usage"], body["metrics"]
    return Message(
        id=body["id"],
        text=body["text"],
        token_ids=tuple(body["token_ids"]),
        num_tokens=body["num_tokens"],
        position=body["position"],
        parents=tuple(ParentSpan(p["id"], p["start"], p["stop"]) for p in body["parents"]),
        generated_text=body["generated_text"],
        generated_token_ids=tuple(body["generated_token_ids"]),
        logprobs=_logprobs(body["logprobs"]),
        finish_reason=body["finish_reason"],
        usage=Usage(
            exact=usage["exact"],
            reused_tokens=usage["reused_tokens"],
            repositioned_tokens=usage["repositioned_tokens"],
            encoded_tokens=usage["encoded_tokens"],
        ),
        metrics=Metrics(submitted, metrics["waiting"], metrics["ttft"], metrics["latency"]),
        # The server tells the closure of the history, and the closure is all that a client reads.
        trace=Trace(body["id"], tuple(Trace(source) for source in body["provenance"])),
    )


def _logprobs(entries: Any) -> list[dict[int, Logprob]] | None:
    if entries is None:
        return None
    return [{int(token): Logprob(**found) for token, found in entry.items()} for entry in entries]


def result_of(body: Mapping[str, Any], submitted: float) -> Message | ChoreoError:
    """What a call of a list or of a stream came to."""
    if body["object"] == "error":
        return error_of(body["error"])
    return message_of(body, submitted)


def messages_of(body: Mapping[str, Any], submitted: float) -> list[Message | ChoreoError]:
    """The messages of a list.

    Raises:
        ChoreoError: a call failed; `results` tells what each one came to.
    """
    results = [result_of(item, submitted) for item in body["data"]]
    raise_first_error(results)
    return results


def is_chunk(event: Mapping[str, Any]) -> bool:
    """Whether an event of a stream is a piece of a message, not its end."""
    return event["object"] == "choreo.message.chunk"


def stats_of(body: Mapping[str, Any]) -> dict[str, Any]:
    """The numbers of a session object, all on one level."""
    about = {key: value for key, value in body.items() if key not in ("object", "usage")}
    return {**about, **body["usage"]}


class Events:
    """The objects of a stream of server-sent events, as the bytes come in.

    Bytes are cut at line feeds only: text in JSON may hold the other ends of lines.
    """

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> Iterator[dict[str, Any]]:
        """The objects that are complete with `data`."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            name, _, value = line.decode().partition(":")
            if name == "data" and value.strip() != _END:
                yield json.loads(value)
