# SPDX-License-Identifier: Apache-2.0
"""`save` and `load` of a session in process: which messages, under which names, on which engine."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from vllm_choreo.api.session import Session
from vllm_choreo.config import ChoreoConfig
from vllm_choreo.errors import ChoreoError
from vllm_choreo.semantics.call_options import Named
from vllm_choreo.semantics.message import Message, Saved
from vllm_choreo.semantics.naming import listed
from vllm_choreo.semantics.provenance import Trace
from vllm_choreo.snapshot.keys import own_key
from vllm_choreo.snapshot.loading import check_on_mismatch, loading
from vllm_choreo.snapshot.manifest import tenant_digest
from vllm_choreo.snapshot.origin import Origin
from vllm_choreo.snapshot.saving import check_mode_keeps, saving
from vllm_choreo.snapshot.signature import signature
from vllm_choreo.snapshot.steps import Steps
from vllm_choreo.snapshot.storage import SnapshotFolder

if TYPE_CHECKING:
    from vllm.config import VllmConfig


class Snapshots:
    """Saves and loads of one session.

    Args:
        session: session that owns the messages.
        vllm_config: configuration of its engine.
    """

    def __init__(self, session: Session, vllm_config: VllmConfig) -> None:
        self._session = session
        self._vllm_config = vllm_config

    def save(
        self,
        messages: Sequence[Named] | None,
        uri: str | Path | SnapshotFolder,
        *,
        encodings: bool,
        progress: bool | None,
        denied: Sequence[str] = (),
    ) -> Steps[Saved]:
        """Return the steps of `Choreography.save`. Raises as it does."""
        check_mode_keeps(self._session.mode)
        if not isinstance(encodings, bool):
            raise ChoreoError("choose true or false", parameter="encodings", value=encodings)
        entries = self._session.entries
        if messages is None:
            entries.check_open()
            found = list(entries.messages().values())
        else:
            named = listed(messages, "messages")
            found = [entries.complete("messages", message) for message in named]
        found = list({message.id: message for message in found}.values())
        if not found:
            raise ChoreoError("there are no messages to save", parameter="messages", value=[])
        for message in found:
            if message.trace is not None:
                Trace("save", (message.trace,)).check(denied)
        return saving(found, self._folder(uri), self._origin(), encodings, progress)

    def load(
        self, uri: str | Path | SnapshotFolder, *, on_mismatch: str, progress: bool | None
    ) -> Steps[list[Message]]:
        """Return the steps of `Choreography.load`. Raises as it does."""
        check_mode_keeps(self._session.mode)
        check_on_mismatch(on_mismatch)
        self._session.entries.check_open()
        return self._loading(self._folder(uri), on_mismatch, progress)

    def _loading(
        self, folder: SnapshotFolder, on_mismatch: str, progress: bool | None
    ) -> Steps[list[Message]]:
        """Load, and note by whom the messages are written."""
        loaded = yield from loading(
            folder,
            self._origin(),
            self._session.tenant,
            self._session.names_of,
            self._session.admit,
            self._session.entries.check_open,
            on_mismatch,
            progress,
        )
        if self._session.repair.asks_for_writers:
            for message, weights in zip(*loaded, strict=True):
                self._session.entries.set_writer(message.id, weights)
        return loaded.messages

    def _origin(self) -> Origin:
        return origin_of(self._vllm_config, self._session.id, self._session.tenant)

    def _folder(self, uri: str | Path | SnapshotFolder) -> SnapshotFolder:
        """Folder at a URI, with this program's key unless it has its own."""
        folder = uri if isinstance(uri, SnapshotFolder) else SnapshotFolder(uri)
        if folder.keep_key is None:
            folder.keep_key = own_key(ChoreoConfig.from_vllm(self._vllm_config).keep_key)
        return folder


def origin_of(config: VllmConfig, session: str, tenant: str) -> Origin:
    """Make the origin of messages of a session and a tenant, in an engine so configured."""
    return Origin(
        session,
        tenant_digest(tenant),
        signature(config),
        config.parallel_config.tensor_parallel_size,
        config.model_config.get_total_num_kv_heads(),
        config.model_config.get_vocab_size(),
    )
