# SPDX-License-Identifier: Apache-2.0
"""`save` and `load` of `Choreography`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vllm_choreo.api.keeping import Keeping
from vllm_choreo.semantics.call_options import Named
from vllm_choreo.semantics.message import Kept, Message
from vllm_choreo.snapshot.steps import Ask, drive
from vllm_choreo.snapshot.storage import KeptFolder


class SyncKeeping:
    """Mixin of the facade, whose session and engine it uses."""

    def save(
        self: Any,
        messages: Sequence[Named] | None,
        uri: str | Path | KeptFolder,
        *,
        encodings: bool = False,
        progress: bool | None = None,
    ) -> Kept:
        """Keep messages in a folder; until all is written, it has those that it had before.

        Args:
            messages: a list of complete messages; None: all of the session.
            uri: a path, or a URL of fsspec's (`s3://…`, `memory://…`).
            encodings: keep keys and values, too: with them nothing is encoded again.
            progress: show a bar; None: on a terminal.

        Raises:
            DeniedMessageError: one carries traces of a message that is denied.
            KeptError: the storage failed, or keeps no such keys; what it held is as it was.
            PoolFullError: a message whose keys and values were evicted does not come back.
            ChoreoError: a message is not complete, or the session is in baseline mode.
        """
        keeping = Keeping(self._session, self._llm.llm_engine.vllm_config)
        options: Any = {"encodings": encodings, "progress": progress, "denied": self._denied}
        kept: Kept = drive(keeping.save(messages, uri, **options), self._answer)
        return kept

    def load(
        self: Any,
        uri: str | Path | KeptFolder,
        *,
        on_mismatch: str = "refuse",
        progress: bool | None = None,
    ) -> list[Message]:
        """Load saved messages into this session, under their names; nothing is encoded for that.

        What has no keys and values in the folder, or no room here, is encoded when it is read.

        Args:
            on_mismatch: treatment of keys and values that another model made, or that were
                damaged: "refuse" the load, or "encode" their messages when they are read; those of
                a "variant" of the model, other weights of the same shapes, are taken as they are.
            progress: show a bar; None: on a terminal.

        Returns:
            The messages, in the order in which they were saved.

        Raises:
            UnknownKeptError: nothing was saved there.
            KeptError: another tenant's, another tokenizer's, or it does not fit; names the file.
            NameTakenError, TooLongError, AdapterError: what is in the way. Nothing was loaded.
        """
        keeping = Keeping(self._session, self._llm.llm_engine.vllm_config)
        steps = keeping.load(uri, on_mismatch=on_mismatch, progress=progress)
        messages: list[Message] = drive(steps, self._answer)
        return messages

    def _answer(self: Any, ask: Ask) -> Any:
        """Do what a save or a load asks of the engine."""
        from vllm_choreo.engine.utility import of_workers

        if ask.what == "session":
            function, *args = ask.args
            return function(*args)
        if ask.what == "operation":
            return self._utility(*ask.args)
        if ask.what == "workers":
            return of_workers(self._llm, *ask.args)
        # Whoever reads a message has it encoded.
        self.free(self.prefill([0], parents=list(ask.args), mode="choreo", repair="none"))
