# SPDX-License-Identifier: Apache-2.0
"""Settings of choreography, parsed once into frozen dataclasses.

They come from `additional_config={"choreo": {...}}` of `LLM(...)`, or `vllm serve`'s
`--additional-config '{"choreo": {...}}'`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_type_hints

from msgspec import Meta

from vllm_choreo.convert import convert
from vllm_choreo.errors import ChoreoError

if TYPE_CHECKING:
    from vllm.config import VllmConfig

_Count = Annotated[int, Meta(ge=1, description="choose an int > 0")]
_PieceTokens = Annotated[int, Meta(ge=16, description="choose an int of 16 or more")]
_Number = Annotated[float, Meta(ge=1e-9, description="choose a number > 0")]
_NumberOr0 = Annotated[float, Meta(ge=0, description="choose a number from 0 on")]
_Share = Annotated[float, Meta(ge=1e-9, le=1, description="choose a part of the whole, up to 1")]
_ShareOr0 = Annotated[float, Meta(ge=0, le=1, description="choose a part of the whole, up to 1")]
_Context = Annotated[Literal["", "seen", "alone"], Meta(description='choose "seen", "alone" or ""')]
_Switch = Annotated[bool, Meta(description="choose true or false")]

REPOSITION_POLICIES = ("query", "in_place")
_PATH = "additional_config.choreo"
_BYTES_PER_GIB = 2**30
_MIN_STATES = 2


@dataclass(frozen=True)
class ServerConfig:
    """Settings of the HTTP server, under the key `server`. All numbers must be positive.

    Attributes:
        max_sessions: sessions open at a time, of all tenants.
        max_sessions_per_tenant: sessions of a tenant open at a time.
        max_messages_per_session: messages that are not freed.
        max_tokens_per_session: tokens of all messages that are not freed.
        max_calls_per_request: calls in the list of a request.
        max_request_bytes: bytes of a request's body.
        session_ttl_seconds: seconds after which an unused session is closed; also the longest
            time that a client may ask for.
        max_pin_seconds: seconds that a message may be pinned for at most.
        max_schemas_per_tenant: schemas of prompts that are not deleted.
        max_tokens_per_schema: tokens of all modules of a schema.
        max_kept_gib_per_tenant: GiB that a tenant's saved messages may take.
        max_kept_names_per_tenant: names under which messages are saved.
        auto_min_tokens: tokens below which parts of chats that name no messages are joined
            (docs/on-ramps.md).
        auto_cut_tokens: tokens, on average, of the pieces into which long parts are cut by their
            content, where that is asked for.
        auto_context: behind what parts of chats are encoded in mode "choreo", where a request does
            not say: "seen" or "alone" (docs/on-ramps.md); "": "alone" on a server without API
            keys, else "seen".
        auto_max_messages, auto_max_tokens: messages, and their tokens, that a tenant's chats keep;
            half of the limits of a session, if that is less.
        pair_content: True if servers of a pair (`--choreo-pair`, `--choreo-keep`) exchange the
            parts of chats that name no messages, too, by what they hold (docs/variants.md).
        page: True to serve the page of a session's messages.
    """

    max_sessions: _Count = 1_000
    max_sessions_per_tenant: _Count = 100
    max_messages_per_session: _Count = 10_000
    max_tokens_per_session: _Count = 10_000_000
    max_calls_per_request: _Count = 1_000
    max_request_bytes: _Count = 16 * 2**20
    session_ttl_seconds: _Number = 3_600.0
    max_pin_seconds: _Number = 3_600.0
    max_schemas_per_tenant: _Count = 100
    max_tokens_per_schema: _Count = 1_000_000
    max_kept_gib_per_tenant: _Number = 64.0
    max_kept_names_per_tenant: _Count = 10_000
    auto_min_tokens: _Count = 16
    auto_cut_tokens: _PieceTokens = 128
    auto_context: _Context = ""
    auto_max_messages: _Count = 2_000
    auto_max_tokens: _Count = 2_000_000
    pair_content: _Switch = False
    page: _Switch = False

    def __post_init__(self) -> None:
        _check_values(self, f"{_PATH}.server")


@dataclass(frozen=True)
class ChoreoConfig:
    """Settings of an engine.

    Attributes:
        reposition: policy of reading a message at another position than that of its encoding.
            "query": keys stay as stored, the query is rotated; any number of calls read one copy
            at any positions. "in_place": its keys are rotated where they lie if no other live
            call reads them, else in a copy.
        shared_reading: True if calls of one batch that attend to the same message read its keys
            and values once for all of them; False: each for itself.
        tenant_share: the part of the KV cache that one tenant's idle messages may hold, and of
            the memory for pictures that its messages may.
        pinned_share: the part of the KV cache that pinned messages may hold.
        host_memory_gib: memory outside the KV cache that keeps evicted messages, in GiB; 0: they
            are encoded again.
        window_groups: True if layers with sliding windows are KV cache groups of their own, in
            which a message keeps what a reader right behind it sees; False: they keep all.
        hidden_memory_gib: memory of each worker for hidden states that calls have kept
            (`keep_hidden`), for repair by layers, in GiB; 0: neither is possible.
        picture_memory_gib: memory of the engine for pictures of messages, as the model's encoder is
            given them, in GiB; 0: calls have no pictures.
        tokens_per_state: in models with states in place of keys and values, the tokens of the KV
            cache for each state that the engine keeps, of a message or of a running request.
        composed_states: True if such models keep with each state what its message does to any,
            so that calls read messages in any order; False: they read chains alone.
        full_cuda_graphs: True if, on GPUs, steps in which choreographed requests decode replay full
            CUDA graphs of their own (docs/gpu.md).
        flash_prefills: True if, on GPUs, FlashAttention runs long prefills (docs/gpu.md).
        max_copies_per_session, max_copied_tokens_per_session: copies, and their tokens, that the
            engine keeps for exact and repaired calls of a session; a parent of a copy counts as a
            token. Beyond that, copies that were not read for longest make room, and are encoded
            again when they are read.
        keep_key: file of the key that tells own saved messages from those of others; "": a key of
            the user's own, see `snapshot/keys.py`.
        move_folder: folder in memory through which keys and values go from one of several engines
            to another; "": one of the system's.
        server: limits of the HTTP server.
    """

    reposition: str = "query"
    shared_reading: _Switch = True
    tenant_share: _Share = 1.0
    pinned_share: _ShareOr0 = 0.5
    host_memory_gib: _NumberOr0 = 0.0
    window_groups: _Switch = False
    hidden_memory_gib: _NumberOr0 = 0.0
    picture_memory_gib: _NumberOr0 = 4.0
    tokens_per_state: _Count = 256
    composed_states: _Switch = False
    full_cuda_graphs: _Switch = False
    flash_prefills: _Switch = False
    max_copies_per_session: _Count = 10_000
    max_copied_tokens_per_session: _Count = 10_000_000
    keep_key: str = ""
    move_folder: str = ""
    server: ServerConfig = field(default_factory=ServerConfig)

    def __post_init__(self) -> None:
        if self.reposition not in REPOSITION_POLICIES:
            raise ChoreoError(
                f"choose one of {REPOSITION_POLICIES}",
                parameter=f"{_PATH}.reposition",
                value=self.reposition,
            )
        _check_values(self, _PATH)

    def num_host_blocks(self, block_bytes: int) -> int:
        """Number of blocks that `host_memory_gib` has room for.

        Args:
            block_bytes: bytes of one block in all layers of a worker.
        """
        return int(self.host_memory_gib * _BYTES_PER_GIB) // block_bytes

    def num_states(self, num_tokens: int) -> int:
        """Number of states, one more than can be used.

        Args:
            num_tokens: tokens that the KV cache has room for.

        Raises:
            ChoreoError: there is no room for a message's state beside that of a call behind it.
        """
        num_states = num_tokens // self.tokens_per_state
        if num_states < _MIN_STATES:
            raise ChoreoError(
                f"a KV cache of {num_tokens} tokens has room for {num_states} states so, and "
                f"{_MIN_STATES} are needed: choose fewer tokens, or give it more memory",
                parameter=f"{_PATH}.tokens_per_state",
                value=self.tokens_per_state,
            )
        return num_states + 1

    @property
    def hidden_bytes(self) -> int:
        """`hidden_memory_gib` in bytes."""
        return int(self.hidden_memory_gib * _BYTES_PER_GIB)

    @property
    def picture_bytes(self) -> int:
        """`picture_memory_gib` in bytes."""
        return int(self.picture_memory_gib * _BYTES_PER_GIB)

    @classmethod
    def from_vllm(cls, vllm_config: VllmConfig) -> ChoreoConfig:
        """Read vLLM's configuration.

        Raises:
            ChoreoError: an unknown key, or a value that is none of the choices.
        """
        additional = vllm_config.additional_config
        given = additional.get("choreo", {}) if isinstance(additional, Mapping) else {}
        settings = _known(cls, given, _PATH)
        if "server" in settings:
            path = f"{_PATH}.server"
            settings["server"] = ServerConfig(**_known(ServerConfig, settings["server"], path))
        return cls(**settings)


def _known(cls: type[ChoreoConfig | ServerConfig], given: object, path: str) -> dict[str, Any]:
    """Check that `given` is an object all of whose keys are settings of `cls`, and copy it."""
    names = [field.name for field in fields(cls)]
    if not isinstance(given, Mapping):
        raise ChoreoError(
            f"an object with some of the keys {names} is needed", parameter=path, value=given
        )
    for key in given:
        if key not in names:
            raise ChoreoError(
                f"unknown setting; the settings are {names}",
                parameter=f"{path}.{key}",
                value=given[key],
            )
    return dict(given)


def _check_values(config: ChoreoConfig | ServerConfig, path: str) -> None:
    """Refuse values that are not as their settings declare."""
    for name, form in get_type_hints(type(config), include_extras=True).items():
        if hasattr(form, "__metadata__"):
            convert(getattr(config, name), form, f"{path}.{name}")
