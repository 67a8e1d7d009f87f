# SPDX-License-Identifier: Apache-2.0
"""Results of calls and of operations as JSON, in the forms that /openapi.json describes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, Generic, Literal, TypeAlias, TypeVar

from pydantic import ConfigDict, with_config
from starlette.responses import JSONResponse

from vllm_choreo.api.fleet import EngineState, Fleet
from vllm_choreo.errors import ChoreoError
from vllm_choreo.semantics.call import Result
from vllm_choreo.semantics.message import Message
from vllm_choreo.server.errors import ErrorAnswer, error_json
from vllm_choreo.wire.answer import AnswerObject, Doc
from vllm_choreo.wire.messages import (
    MessageAnswer,
    UsageAnswer,
    message_json,
    total_usage_json,
)

# Of every form: keys of these types, and no others.
with_config(ConfigDict(strict=True, extra="forbid"))(AnswerObject)

_T = TypeVar("_T")


class JsonAnswer(JSONResponse, Generic[_T]):
    """Answer of a route: JSON of the form `_T`, which describes the route, and is not checked."""

    def __init__(self, content: _T) -> None:
        super().__init__(content)


class ListAnswer(AnswerObject, Generic[_T]):
    """A list, as OpenAI's API writes it."""

    object: Literal["list"]
    data: list[_T]


def list_json(items: Iterable[_T]) -> ListAnswer[_T]:
    """A list as OpenAI's API writes it."""
    return {"object": "list", "data": list(items)}


# -- sessions ------------------------------------------------------------------------------------

Mode: TypeAlias = Literal["choreo", "exact", "baseline"]
Placement: TypeAlias = Literal["writer", "reader", "both"]
Repair: TypeAlias = str | dict[str, Any]


class SessionUsage(AnswerObject):
    """Contents of a session, and how much it may hold."""

    messages: int
    tokens: int
    resident_tokens: Annotated[
        int,
        Doc(
            "Those whose keys and values are cached now; others are encoded again when they are "
            "read."
        ),
    ]
    pinned_messages: int
    max_messages: int
    max_tokens: int


class SessionAnswer(AnswerObject):
    """A session."""

    id: Annotated[str, Doc(example="8f14e45fceea167a5a36dedd4bea2543")]
    object: Literal["choreo.session"]
    created: Annotated[int, Doc("Seconds since 1970.")]
    mode: Mode
    ttl_seconds: float
    expires_at: Annotated[int, Doc("When it is closed if nobody uses it; seconds since 1970.")]
    max_model_len: Annotated[int, Doc("Tokens that a call reads and writes, at most.")]
    model: str
    adapter: Annotated[str | None, Doc("Of calls that name none; null: the model alone.")]
    placement: Annotated[
        Placement | None,
        Doc("Which calls use the adapter; null: there is none."),
    ]
    repair: Annotated[Repair | None, Doc("Of calls that name none; null: none.")]
    usage: SessionUsage


class ClosedAnswer(AnswerObject):
    """A session that was closed."""

    id: str
    object: Literal["choreo.session.deleted"]
    deleted: Literal[True]


class BlockAnswer(AnswerObject):
    """A block of the KV cache."""

    group: Annotated[int, Doc("Number of its KV cache group; 0 where there is one.")]
    block_id: int
    ref_cnt: Annotated[int, Doc("Holders of the block: messages, and requests that run.")]
    num_valid_slots: Annotated[int, Doc("Tokens in it.")]
    position: Annotated[int, Doc("Of its first key as stored now.")]


class MessageBlocksAnswer(AnswerObject):
    """A message's place in the KV cache."""

    id: str
    is_copy: Annotated[bool, Doc("It is the same tokens, encoded once more after other messages.")]
    engine: Annotated[int, Doc("Number of the engine; 0 where there is one.")]
    num_tokens: int
    num_readers: Annotated[int, Doc("Calls that read it now.")]
    num_waiting: Annotated[int, Doc("Calls that wait for it.")]
    bytes_by_group: Annotated[
        list[int], Doc("Bytes of its blocks in one worker, by group; none: it is evicted.")
    ]
    state_bytes: Annotated[int, Doc("Bytes of the state at its end in one worker; 0: none.")]
    host_bytes: Annotated[int, Doc("Bytes of its copy in host memory, state included.")]
    blocks: Annotated[list[BlockAnswer], Doc("By group, as its tokens; none: it is evicted.")]


class BlocksAnswer(AnswerObject):
    """Blocks of all messages of a session. In mode `baseline` the engine knows no messages."""

    object: Literal["choreo.blocks"]
    session: str
    block_size: Annotated[int, Doc("Tokens that a block has room for; 0 in mode `baseline`.")]
    data: list[MessageBlocksAnswer]


def blocks_json(session_id: str, stats: Mapping[str, Any]) -> BlocksAnswer:
    """Answer about the blocks of a session.

    Args:
        session_id: the session.
        stats: numbers of `AsyncChoreography.stats`.
    """
    described = stats["messages"] if "block_size" in stats else []
    return {
        "object": "choreo.blocks",
        "session": session_id,
        "block_size": stats.get("block_size", 0),
        "data": [
            {
                "id": message["id"],
                "is_copy": message["is_copy"],
                "engine": message.get("engine", 0),
                "num_tokens": message["num_tokens"],
                "num_readers": message["num_readers"],
                "num_waiting": message["num_waiting"],
                "bytes_by_group": message["bytes_by_group"],
                "state_bytes": message["state_bytes"],
                "host_bytes": message["host_bytes"],
                "blocks": message["blocks"],
            }
            for message in described
        ],
    }


# -- engines -------------------------------------------------------------------------------------


class MovesAnswer(AnswerObject):
    """Moves of keys and values to an engine, since the server started."""

    made: int
    failed: Annotated[int, Doc("What could not be moved was encoded.")]
    tokens: Annotated[int, Doc("Of the moves that were made.")]
    bytes: int


class EncodedAgain(AnswerObject):
    """Messages that an engine was made to encode though they had been encoded before."""

    messages: int
    tokens: int


class EngineAnswer(AnswerObject):
    """An engine of the fleet, as the server knows it; sums over all tenants."""

    engine: Annotated[int, Doc("Its number, as in the label `engine` of metrics.")]
    object: Literal["choreo.engine"]
    state: Annotated[Literal["running", "starting"], Doc("One that has ended is started again.")]
    restarts: int
    queued_calls: Annotated[int, Doc("Choreographed calls that were handed to it.")]
    queued_seconds: Annotated[float, Doc("What their tokens take, by measured rates.")]
    messages: Annotated[int, Doc("Encodings that lie there; equal ones of a tenant count once.")]
    tokens: int
    bytes: Annotated[int, Doc("Of the keys and values of these, about.")]
    moves: MovesAnswer
    encoded_again: EncodedAgain


class FleetAnswer(ListAnswer[EngineAnswer]):
    """All engines by their numbers, and the rates by which calls are placed."""

    encode_seconds_per_token: float
    move_seconds: Annotated[
        float | None, Doc("Of a move, besides those of its bytes; null: nothing is moved.")
    ]
    move_bytes_per_second: Annotated[float | None, Doc("Null: nothing is moved, or not measured.")]


def fleet_json(fleet: Fleet) -> FleetAnswer:
    """Answer about all engines."""
    start, per_second = fleet.measured.moves()
    return {
        "object": "list",
        "data": [engine_json(state) for state in fleet.describe()],
        "encode_seconds_per_token": fleet.measured.encode,
        "move_seconds": start,
        "move_bytes_per_second": per_second,
    }


def engine_json(state: EngineState) -> EngineAnswer:
    """Answer about one engine."""
    return {
        "engine": state.engine,
        "object": "choreo.engine",
        "state": "running" if state.is_running else "starting",
        "restarts": state.restarts,
        "queued_calls": state.queued_calls,
        "queued_seconds": state.queued_seconds,
        "messages": state.messages,
        "tokens": state.tokens,
        "bytes": state.bytes,
        "moves": {
            "made": state.moves.moved,
            "failed": state.moves.failed,
            "tokens": state.moves.tokens,
            "bytes": state.moves.bytes,
        },
        "encoded_again": {
            "messages": state.encoded_again_messages,
            "tokens": state.encoded_again_tokens,
        },
    }


# -- calls ---------------------------------------------------------------------------------------


class FailedCallAnswer(ErrorAnswer):
    """A call of a list that failed; the others are not affected, unless they read its message."""

    object: Literal["error"]


class ResultsAnswer(AnswerObject):
    """Results of all calls of a list, in its order; the usage of all of them."""

    object: Literal["list"]
    data: list[MessageAnswer | FailedCallAnswer]
    usage: UsageAnswer


class ChunkAnswer(AnswerObject):
    """An event of a stream: what a call generated since the last one."""

    object: Literal["choreo.message.chunk"]
    index: Annotated[int, Doc("Of the call in the list.")]
    id: str
    text: str
    token_ids: list[int]


class MessageEvent(MessageAnswer):
    """An event of a stream: a call's message."""

    index: int


class FailedCallEvent(FailedCallAnswer):
    """An event of a stream: a call that failed."""

    index: int


def results_json(results: Sequence[Result]) -> ResultsAnswer:
    """Results of a list of calls, in its order, with the usage of those that made a message."""
    messages = [result for result in results if isinstance(result, Message)]
    return {
        "object": "list",
        "data": [result_json(result) for result in results],
        "usage": total_usage_json(messages),
    }


def result_json(result: Result) -> MessageAnswer | FailedCallAnswer:
    """One item of a list of results."""
    return failed_json(result) if isinstance(result, ChoreoError) else message_json(result)


def failed_json(error: ChoreoError) -> FailedCallAnswer:
    """Error of a call of a list."""
    return {"object": "error", "error": error_json(error)}


# -- messages ------------------------------------------------------------------------------------


class ProvenanceAnswer(AnswerObject):
    """Messages that a message carries traces of."""

    id: str
    object: Literal["choreo.provenance"]
    provenance: Annotated[
        list[str], Doc("Ids of messages, freed ones among them; the message itself is left out.")
    ]


class FreedAnswer(AnswerObject):
    """A message that was freed."""

    id: str
    object: Literal["choreo.message.deleted"]
    deleted: Literal[True]


class EvictedAnswer(AnswerObject):
    """A message that is no longer cached, and is encoded again when it is read."""

    id: str
    object: Literal["choreo.message"]
    evicted: Literal[True]


class PinAnswer(AnswerObject):
    """A message that is evicted last until its pin expires, or that is not pinned."""

    id: str
    object: Literal["choreo.message"]
    pinned: bool
    ttl_seconds: float | None


def provenance_json(message: Message) -> ProvenanceAnswer:
    """Answer about whose traces a message carries."""
    sources = sorted(message.provenance)
    return {"id": message.id, "object": "choreo.provenance", "provenance": sources}


def freed_json(message: Message) -> FreedAnswer:
    """Answer about a message that was freed."""
    return {"id": message.id, "object": "choreo.message.deleted", "deleted": True}


def evicted_json(message: Message) -> EvictedAnswer:
    """Answer about a message that was evicted."""
    return {"id": message.id, "object": "choreo.message", "evicted": True}


def pin_json(message: Message, seconds: float | None = None) -> PinAnswer:
    """Answer about a message that was pinned for `seconds`; None: it was unpinned."""
    return {
        "id": message.id,
        "object": "choreo.message",
        "pinned": seconds is not None,
        "ttl_seconds": seconds,
    }
