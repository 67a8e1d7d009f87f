# SPDX-License-Identifier: Apache-2.0
"""Pictures of saved messages: a file of each, by which a message can be encoded again.

A file holds what the model's encoder is given, as `engine/picture_files.py` writes it. It is read
into the engine only if whoever has the key has written it, for an engine with the same model and
the same processor of pictures: elsewhere the same name would stand for other numbers.
"""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import sha256
from typing import Any

from vllm_choreo.errors import KeptError
from vllm_choreo.snapshot.manifest import Manifest
from vllm_choreo.snapshot.steps import Steps, operation
from vllm_choreo.snapshot.storage import MANIFEST, SnapshotFolder, check_size, settle


def saving_pictures(
    folder: SnapshotFolder, told: Mapping[str, Any], num_bytes: int
) -> Steps[list[dict[str, Any]]]:
    """Write the pictures of messages.

    Args:
        told: their description, of `snapshot_describe`.
        num_bytes: bytes that the save has written.

    Returns:
        The entries of the manifest.

    Raises:
        LimitError: there is no room for one.
        UnsupportedOptionError: files do not hold such a one.
    """
    written = []
    for number, entry in enumerate(told["recipes"].get("pictures", ())):
        content = yield operation("picture", told["ticket"], number)
        num_bytes += len(content)
        check_size(num_bytes, folder.max_bytes)
        name, file = folder.create()
        with folder.naming(name), file:
            file.write(content)
            settle(file)
        digest = sha256(content).hexdigest()
        written.append({**entry, "file": name, "bytes": len(content), "sha256": digest})
    return written


def read_pictures(
    folder: SnapshotFolder, manifest: Manifest, mine: Mapping[str, Any], is_same: bool
) -> list[dict[str, Any]]:
    """Read the pictures of a manifest.

    Args:
        mine: signature of the engine, see `signature.py`.
        is_same: whether the engine's model is that of the manifest.

    Returns:
        `name` and `content` of each.

    Raises:
        KeptError: the engine cannot take them, or one is damaged.
    """
    entries = manifest.kept.get("pictures", ())
    if not entries:
        return []
    file, theirs = f"{folder.label}/{MANIFEST}", manifest.kept["model"]
    reasons = {
        "they were signed with another key": not manifest.is_trusted,
        "another model has encoded them": not is_same,
        "another processor of pictures has made them": theirs.get("processor") != mine["processor"],
    }
    if reason := next((reason for reason, holds in reasons.items() if holds), None):
        raise KeptError(
            f"messages with pictures are loaded as they were saved, and {reason}: load where the "
            "key, the model and its processor are the same, or make the messages anew from their "
            "texts and pictures",
            parameter="uri",
            value=file,
        )
    return [{"name": entry["name"], "content": _content(folder, entry)} for entry in entries]


def _content(folder: SnapshotFolder, entry: Mapping[str, Any]) -> bytes:
    file, size = folder.open(entry["file"])
    with folder.naming(entry["file"]), file:
        content: bytes = file.read(entry["bytes"] + 1)
    if len(content) != size or sha256(content).hexdigest() != entry["sha256"]:
        raise KeptError(
            "the file of a picture is damaged: save again, or load another copy",
            parameter="uri",
            value=f"{folder.label}/{entry['file']}",
        )
    return content
