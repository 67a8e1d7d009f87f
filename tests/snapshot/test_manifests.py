# SPDX-License-Identifier: Apache-2.0
"""Manifests of snapshots: whose are believed, and which were not written by a save."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.snapshot.saved_files import kept_of, load_whole, save, save_whole
from vllm_choreo.errors import (
    ChoreoError,
    KeptError,
)
from vllm_choreo.snapshot import file_locks, keys
from vllm_choreo.snapshot.manifest import (
    PICTURED_FORMAT,
    checked_manifest,
    manifest_bytes,
    read_manifest,
    tenant_digest,
)
from vllm_choreo.snapshot.signature import differences, is_same_text, is_variant
from vllm_choreo.snapshot.storage import SnapshotFolder


def test_no_byte_of_a_manifest_can_change(tmp_path: Path) -> None:
    save(str(tmp_path), 7)
    path = tmp_path / "manifest.json"
    content, rng = path.read_bytes(), random.Random(1)
    right = read_manifest(SnapshotFolder(tmp_path))
    for at in [*range(0, len(content), 37), len(content) - 1]:
        path.write_bytes(content[:at])
        with pytest.raises(KeptError, match="manifest"):
            read_manifest(SnapshotFolder(tmp_path))
        flipped = content[at] ^ (1 << rng.randrange(8))
        path.write_bytes(content[:at] + bytes([flipped]) + content[at + 1 :])
        try:
            assert read_manifest(SnapshotFolder(tmp_path)) == right  # white space, say
        except KeptError as error:
            assert error.value == f"{tmp_path}/manifest.json"


def test_who_has_the_key_is_believed_and_nobody_else(tmp_path: Path) -> None:
    mine, path = b"k" * 32, tmp_path / "manifest.json"
    kept = kept_of(7, None)

    def is_trusted(keep_key: bytes | None) -> bool:
        return checked_manifest(SnapshotFolder(tmp_path, keep_key=keep_key)).is_trusted

    path.write_bytes(manifest_bytes(kept, mine))
    assert is_trusted(mine) and not is_trusted(b"other key" * 4) and not is_trusted(None)
    forged = {**kept, "tenant": tenant_digest("b")}
    file = json.loads(path.read_bytes())
    for content in (
        manifest_bytes(forged),
        manifest_bytes(forged, b"other key" * 4),
        json.dumps({**json.loads(manifest_bytes(forged)), "hmac": file["hmac"]}).encode(),
        json.dumps({**file, "hmac": file["sha256"]}).encode(),
        json.dumps({**file, "hmac": 5}).encode(),
    ):
        path.write_bytes(content)
        assert not is_trusted(mine), "anybody can make the plain digest"


@pytest.mark.parametrize("name", ["../outside", "a/b", ".x", "a\0b", 3, ["x"], {"a": 1}, True])
def test_files_that_a_forged_manifest_names_are_not_opened(
    name: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files are locked before the manifest is checked, for others may remove them."""
    (tmp_path / "outside").touch()
    opened: list[str] = []
    monkeypatch.setattr(file_locks, "lock_shared", opened.append)
    uri = tmp_path / "kept"
    save_whole(str(uri), 1)
    load_whole(str(uri), lambda token: None)
    assert opened.pop().startswith(f"{uri}/") and not opened
    kept = json.loads((uri / "manifest.json").read_bytes())["kept"]
    kept["encodings"][0]["data"]["file"] = name
    (uri / "manifest.json").write_bytes(manifest_bytes(kept))
    with pytest.raises(KeptError, match="damaged"):
        load_whole(str(uri), lambda token: None)
    assert not opened


def test_a_programs_key_is_its_users(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    key = keys.own_key("")
    path = tmp_path / "config" / "vllm-choreo" / "keep.key"
    assert key is not None and len(key) == 64 and path.stat().st_mode & 0o777 == 0o600
    keys._users_key.cache_clear()
    assert keys.own_key("") == key, "the next process has the same"
    keys._make(path)  # two at once
    assert keys.key_of_file(str(path)) == key and list(path.parent.iterdir()) == [path]
    for content in (b"", b"short", None):
        path.unlink(missing_ok=True)
        if content is not None:
            path.write_bytes(content)
        with pytest.raises(ChoreoError, match="openssl") as refusal:
            keys.own_key(str(path))
        assert refusal.value.value == str(path)
    monkeypatch.setenv("XDG_CONFIG_HOME", "/proc/nowhere")
    assert keys.own_key("") is None


def _wrong() -> Iterator[dict[str, Any]]:
    def changed(**fields: Any) -> dict[str, Any]:
        kept = json.loads(json.dumps(kept_of(1, None)))
        kept["encodings"][0] |= fields
        return kept

    yield changed(parents=[0], spans=[[0, 1, 0]])
    yield changed(parents=[0])
    yield changed(spans=[[0, 1, 0]])
    yield changed(trace=1)
    yield changed(adapter=0)
    yield changed(tokens=[])
    yield changed(tokens=[-1])
    yield changed(new_offset=-1)
    yield changed(new_offset=True)
    yield changed(exact=1)
    yield changed(is_untrusted=0)
    for weights in ([0.9], [0.9, 0], [0.9, 1], [1e-300, 1.0], [0.9, -1.0], "0.9", 0.9):
        yield changed(weights=weights)
    yield changed(patch={"source": 0, "start": 0, "runs": []})
    yield changed(is_copy=True)
    yield changed(message="s/1")
    for file in ("../x", "a/b", ".x", 3):
        yield changed(data={"file": file, "bytes": 1, "sha256": "", "stored_position": 0})
    for layers in ([0], [2, 2], [1.0], None):
        yield changed(keeps=layers)
    for runs, ranges in (
        ([[0, 1]], []),
        ([[0, 1]], [[0, 0]]),
        ([[0, 1]], [[0, 2], [2, 3]]),
        ([], [[0, 2]]),
        ([[0, 1]], [[1, 2]]),  # the source does not keep what layer 1 was given
    ):
        kept = changed(patch={"source": 0, "start": 0, "runs": runs, "layers": ranges})
        source = {**kept_of(1, None)["encodings"][0], "keeps": [2]}
        kept["encodings"].insert(0, source)
        kept["messages"] = []
        yield kept
    picture = {"name": "a", "file": "a", "bytes": 1, "sha256": ""}
    for wrong in ({"file": "../x"}, {"bytes": -1}, {"name": 3}):
        yield {**kept_of(1, None), "pictures": [{**picture, **wrong}]}
    for shown in ([[1, 0]], [[0, 99]], [[0, 0.5]], [[0]]):
        yield {**changed(pictures=shown), "pictures": [picture]}
    yield {**kept_of(1, None), "format": PICTURED_FORMAT + 1}
    yield {**kept_of(1, None), "traces": [{"id": "s/0", "parents": [0], "origin": None}]}


@pytest.mark.parametrize("kept", list(_wrong()), ids=str)
def test_a_manifest_that_save_did_not_write(kept: dict[str, Any], tmp_path: Path) -> None:
    """Its digest is right, and yet none of it reaches the engine."""
    (tmp_path / "manifest.json").write_bytes(manifest_bytes(kept))
    with pytest.raises(KeptError, match="manifest"):
        read_manifest(SnapshotFolder(tmp_path))


def test_what_differs_between_two_models() -> None:
    mine = {"name": "a", "weights": "x", "tokenizer": "t", "dtype": "float32"}
    assert differences({**mine, "name": "b"}, mine) == []  # another folder of the same files
    assert "dtype" in differences({**mine, "dtype": "bfloat16"}, mine)[0]
    assert differences({**mine, "weights": ""}, mine)
    unknown = {**mine, "weights": ""}
    assert differences({**unknown, "name": "b"}, unknown) and not differences(unknown, unknown)


def test_a_tokenizer_is_the_same_if_its_tokens_have_the_same_numbers() -> None:
    mine = {"name": "a", "weights": "x", "tokenizer": "t", "vocabulary": "v"}
    again = {**mine, "tokenizer": "written anew"}
    assert differences(again, mine) == [] and is_same_text(again, mine)
    assert is_variant({**again, "weights": "y"}, mine)
    before = {"name": "a", "weights": "x", "tokenizer": "t"}  # without a vocabulary
    assert differences(before, mine) == [] and is_same_text(before, mine)
    for other in ({**again, "vocabulary": "w"}, {**before, "tokenizer": "u"}):
        assert "tokenizer" in differences(other, mine)[0]
        assert not is_same_text(other, mine) and not is_variant(other, mine)
    unknown = {**mine, "vocabulary": ""}
    assert not is_same_text({**unknown, "tokenizer": "u"}, unknown)
