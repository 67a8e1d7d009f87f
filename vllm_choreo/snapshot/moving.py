# SPDX-License-Identifier: Apache-2.0
"""A message that goes from one engine to another: a save, and a load of it under a scratch name."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

from vllm_choreo.errors import KeptError
from vllm_choreo.semantics.message import Message, Metrics, Saved, Usage
from vllm_choreo.snapshot.loading import LoadedMessages, loading
from vllm_choreo.snapshot.origin import Origin
from vllm_choreo.snapshot.saving import saving
from vllm_choreo.snapshot.steps import Steps
from vllm_choreo.snapshot.storage import SnapshotFolder


class MoveOrder(NamedTuple):
    """A message that is moved.

    Attributes:
        session, message_id: the message, as its engine knows it.
        token_ids: its tokens.
        tenant: tenant of its session.
        scratch_session, scratch_id: session and name under which the other engine has it meanwhile.
        key: secret with which its files are signed; both sides have it from whoever orders this.
    """

    session: str
    message_id: str
    token_ids: Sequence[int]
    tenant: str
    scratch_session: str
    scratch_id: str
    key: bytes


def exporting(order: MoveOrder, path: Path, origin: Origin) -> Steps[Saved]:
    """Write the files of a message.

    Args:
        path: folder for them, which is not there yet.
        origin: the session and engine that it is in.

    Raises:
        ChoreoError: as `saving`.
    """
    return saving([_message(order)], _folder(path, order), origin, encodings=True, progress=False)


def importing(order: MoveOrder, path: Path, target: Origin) -> Steps[LoadedMessages]:
    """Load the message whose files these are, under its scratch name.

    Args:
        target: the scratch session, and the engine.

    Raises:
        KeptError: the files were not written by this order.
        ChoreoError: as `loading`.
    """
    return loading(
        _folder(path, order),
        target,
        order.tenant,
        lambda session, ids: dict.fromkeys(ids, order.scratch_id),
        partial(_check_trusted, path),
        lambda: None,
        "refuse",
        False,
    )


def _folder(path: Path, order: MoveOrder) -> SnapshotFolder:
    try:
        room = shutil.disk_usage(path.parent).free
    except OSError as error:
        raise KeptError(
            f"the folder for moves is not there any more ({error.strerror})",
            parameter="additional_config.choreo.move_folder",
            value=str(path.parent),
        ) from None
    return SnapshotFolder(path, "the exchange folder", room, order.key)


def _check_trusted(path: Path, messages: Sequence[Message]) -> None:
    """Check that what is loaded was signed with the key of its order.

    An engine would share nothing of it, and the move would have been for nothing.

    Raises:
        KeptError: somebody else has written it.
    """
    if any(message.usage.untrusted for message in messages):
        raise KeptError(
            "these files were not written by this move, for they are signed with another key: let "
            "nobody else write to the folder for moves",
            parameter="additional_config.choreo.move_folder",
            value=str(path),
        )


def _message(order: MoveOrder) -> Message:
    """A message as a save names it; of a move, the text and the times are nobody's."""
    return Message(
        id=order.message_id,
        text="",
        token_ids=tuple(order.token_ids),
        num_tokens=len(order.token_ids),
        position=0,
        parents=(),
        generated_text="",
        generated_token_ids=(),
        logprobs=None,
        finish_reason=None,
        usage=Usage(exact=False, reused_tokens=0, repositioned_tokens=0, encoded_tokens=0),
        metrics=Metrics(submitted=0.0, waiting=None, ttft=0.0, latency=0.0),
    )
