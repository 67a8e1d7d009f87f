# SPDX-License-Identifier: Apache-2.0
"""Routes that save messages and load them, in the folder that the operator allows."""

from __future__ import annotations

import asyncio
from typing import Annotated

from fastapi import Path
from starlette.requests import Request

from vllm_choreo.errors import ChoreoError
from vllm_choreo.server.answers import JsonAnswer, ListAnswer, list_json
from vllm_choreo.server.errors import PATH_NAME
from vllm_choreo.server.responses import errors
from vllm_choreo.server.routes import OwnSession, choreo_router
from vllm_choreo.server.snapshot_bodies import (
    LoadBody,
    SaveBody,
    SavedAnswer,
    SavedDeletedAnswer,
    SavedEntry,
)
from vllm_choreo.server.snapshot_folders import SnapshotFolders
from vllm_choreo.server.tenants import tenant_of
from vllm_choreo.wire.messages import MessageAnswer, message_json

router = choreo_router()

SavedPath = Annotated[str, Path(description="The name under which messages were saved.")]


def _folders(request: Request) -> SnapshotFolders:
    """Folders in which tenants save messages.

    Raises:
        ChoreoError: the operator allows none.
    """
    folders: SnapshotFolders | None = request.app.state.choreo_snapshots
    if folders is None:
        raise ChoreoError(
            "this server keeps no messages: its operator can allow it, with --choreo-keep DIR",
            parameter="uri",
        )
    return folders


@router.post("/sessions/{session}/save", summary="Save messages", responses=errors(404, 413, 429))
async def save_messages(
    request: Request, session: OwnSession, body: SaveBody
) -> JsonAnswer[SavedAnswer]:
    """Save messages under a name. What was saved under it stays until all is written."""
    folders = _folders(request)
    folder = folders.folder(session.tenant, body.name)
    async with folders.lock(session.tenant):
        folder.max_bytes = await asyncio.to_thread(folders.room, session.tenant, body.name)
        with session.used() as choreography:
            saved = await choreography.save(
                body.messages, folder, encodings=body.encodings, progress=False
            )
    return JsonAnswer(
        {
            "name": body.name,
            "object": "choreo.kept",
            "messages": saved.messages,
            "encodings": saved.encodings,
            "tokens": saved.tokens,
            "bytes": saved.bytes,
        }
    )


@router.post(
    "/sessions/{session}/load", summary="Load messages", responses=errors(404, 409, 413, 429)
)
async def load_messages(
    request: Request, session: OwnSession, body: LoadBody
) -> JsonAnswer[ListAnswer[MessageAnswer]]:
    """Load what was saved under a name into the session; nothing is encoded for that.

    The answer has the messages in the order in which they were saved.
    """
    folders = _folders(request)
    folder = folders.folder(session.tenant, body.name)
    with session.used() as choreography:
        messages = await choreography.load(folder, on_mismatch=body.on_mismatch, progress=False)
    return JsonAnswer(list_json(map(message_json, messages)))


@router.get("/kept", summary="List what is saved")
async def list_saved(request: Request) -> JsonAnswer[ListAnswer[SavedEntry]]:
    """The names under which messages were saved with this API key."""
    folders = _folders(request)
    sizes = await asyncio.to_thread(folders.sizes, tenant_of(request))
    entries: list[SavedEntry] = [
        {"name": name, "object": "choreo.kept", "bytes": size} for name, size in sizes.items()
    ]
    return JsonAnswer(list_json(entries))


@router.delete("/kept/{name}", summary="Delete what is saved", responses=errors(404))
async def delete_saved(request: Request, name: SavedPath) -> JsonAnswer[SavedDeletedAnswer]:
    """Delete what was saved under a name. Messages that were loaded from it stay."""
    tenant, folders = tenant_of(request), _folders(request)
    try:
        folder = folders.folder(tenant, name)
        async with folders.lock(tenant):
            await asyncio.to_thread(folder.delete)
    except ChoreoError as error:
        error.parameter = PATH_NAME
        raise
    return JsonAnswer({"name": name, "object": "choreo.kept.deleted", "deleted": True})
