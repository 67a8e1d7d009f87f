# SPDX-License-Identifier: Apache-2.0
"""Settings of choreography, parsed once into frozen dataclasses.

They come from `additional_config={"choreo": {...}}` of `LLM(...)`, or `vllm serve`'s
`--additional-config '{"choreo": {...}}'`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

from vllm_choreo.errors import ChoreoError

if TYPE_CHECKING:
    from vllm.config import VllmConfig

REPOSITION_POLICIES = ("query", "in_place")
_PATH = "additional_config.choreo"
_BYTES_PER_GIB = 2**30


@dataclass(frozen=True)
class ServerConfig:
    """Limits of the HTTP server, under the key `server`. All must be positive.

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
        auto_max_messages, auto_max_tokens: messages, and their tokens, that a tenant's chats keep;
            half of the limits of a session, if that is less.
        page: True to serve the page of a session's messages.
    """

    max_sessions: int = 1_000
    max_sessions_per_tenant: int = 100
    max_messages_per_session: int = 10_000
    max_tokens_per_session: int = 10_000_000
    max_calls_per_request: int = 1_000
    max_request_bytes: int = 16 * 2**20
    session_ttl_seconds: float = 3_600.0
    max_pin_seconds: float = 3_600.0
    max_schemas_per_tenant: int = 100
    max_tokens_per_schema: int = 1_000_000
    max_kept_gib_per_tenant: float = 64.0
    max_kept_names_per_tenant: int = 10_000
    auto_min_tokens: int = 16
    auto_max_messages: int = 2_000
    auto_max_tokens: int = 2_000_000
    page: bool = False

    def __post_init__(self) -> None:
        _check_numbers(self, f"{_PATH}.server")


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
        tenant_share: the part of the KV cache that one tenant's idle messages may hold.
        pinned_share: the part of the KV cache that pinned messages may hold.
        host_memory_gib: memory outside the KV cache that keeps evicted messages, in GiB; 0: they
            are encoded again.
        hidden_memory_gib: memory of each worker for hidden states that calls have kept
            (`keep_hidden`), for repair by layers, in GiB; 0: neither is possible.
        max_copies_per_session, max_copied_tokens_per_session: copies, and their tokens, that the
            engine keeps for exact and repaired calls of a session; a parent of a copy counts as a
            token. Beyond that, copies that were not read for longest make room, and are encoded
            again when they are read.
        keep_key: file of the key that tells own saved messages from those of others; "": a key of
            the user's own, see `snapshot/keys.py`.
        server: limits of the HTTP server.
    """

    reposition: str = "query"
    shared_reading: bool = True
    tenant_share: float = 1.0
    pinned_share: float = 0.5
    host_memory_gib: float = 0.0
    hidden_memory_gib: float = 0.0
    max_copies_per_session: int = 10_000
    max_copied_tokens_per_session: int = 10_000_000
    keep_key: str = ""
    server: ServerConfig = field(default_factory=ServerConfig)

    def __post_init__(self) -> None:
        if self.reposition not in REPOSITION_POLICIES:
            raise ChoreoError(
                f"choose one of {REPOSITION_POLICIES}",
                parameter=f"{_PATH}.reposition",
                value=self.reposition,
            )
        _check_numbers(self, _PATH)

    def num_host_blocks(self, block_bytes: int) -> int:
        """Number of blocks that `host_memory_gib` has room for.

        Args:
            block_bytes: bytes of one block in all layers of a worker.
        """
        return int(self.host_memory_gib * _BYTES_PER_GIB) // block_bytes

    @property
    def hidden_bytes(self) -> int:
        """`hidden_memory_gib` in bytes."""
        return int(self.hidden_memory_gib * _BYTES_PER_GIB)

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


# The settings that may be 0.
_MAY_BE_ZERO = ("hidden_memory_gib", "host_memory_gib", "pinned_share")


def _check_numbers(config: ChoreoConfig | ServerConfig, path: str) -> None:
    """Refuse values of the wrong type or size; each field's default tells its type."""
    for setting in fields(config):
        value, default = getattr(config, setting.name), setting.default
        if isinstance(default, bool):
            is_right, expected = isinstance(value, bool), "true or false"
        elif isinstance(default, int):
            is_right, expected = type(value) is int and value > 0, "an int > 0"
        elif isinstance(default, float):
            least = 0 if setting.name in _MAY_BE_ZERO else 1e-9
            most = 1 if setting.name.endswith("_share") else float("inf")
            is_right = type(value) in (int, float) and least <= value <= most
            expected = "a number > 0" if most > 1 else "a part of the whole, up to 1"
        else:
            continue
        if not is_right:
            raise ChoreoError(f"choose {expected}", parameter=f"{path}.{setting.name}", value=value)
