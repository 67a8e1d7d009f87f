# SPDX-License-Identifier: Apache-2.0
"""Folders of snapshots: what becomes of a save that others overtake, or that is killed."""

from __future__ import annotations

import itertools
import os
import secrets
import signal
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.snapshot.saved_files import found, kept_of, load_whole, save, save_whole
from vllm_choreo.errors import (
    KeptError,
    UnknownKeptError,
)
from vllm_choreo.snapshot.manifest import (
    manifest_bytes,
    read_manifest,
)
from vllm_choreo.snapshot.storage import SnapshotFolder


@pytest.mark.parametrize("scheme", ["{}/kept", "memory://kept-{}"])
def test_a_save_replaces_what_was_there(scheme: str, tmp_path: Path) -> None:
    uri = scheme.format(tmp_path if "memory" not in scheme else tmp_path.name)
    with pytest.raises(UnknownKeptError):
        found(uri)
    for token in (1, 2):
        save(uri, token, bytes([token]))
        assert found(uri) == (token, bytes([token]))
    folder = SnapshotFolder(uri)
    names = [entry["name"] for entry in folder._fs.ls(folder._path, detail=True)]
    assert len(names) == 2, "the old data is gone"
    folder.delete()
    with pytest.raises(UnknownKeptError):
        found(uri)


def _save_and_be_killed(at: str, uri: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.snapshot.saved_files", at, uri], cwd=Path(__file__).parents[2]
    )
    assert done.returncode == -signal.SIGKILL


@pytest.mark.parametrize("at", ["data", "manifest", "move", "clean"])
def test_whoever_is_killed_leaves_the_old_or_the_new(at: str, tmp_path: Path) -> None:
    uri = str(tmp_path / "kept")
    save(uri, 1, b"old")
    _save_and_be_killed(at, uri)
    assert found(uri) == ((2, b"new") if at == "clean" else (1, b"old"))
    save(uri, 3, b"next")
    assert found(uri) == (3, b"next")


@pytest.mark.parametrize("at", ["data", "manifest", "move"])
def test_the_next_save_removes_what_a_killed_one_has_left(at: str, tmp_path: Path) -> None:
    uri = str(tmp_path / "kept")
    save(uri, 1)
    _save_and_be_killed(at, uri)
    assert len(list(Path(uri).iterdir())) > 2
    save(uri, 3)
    assert len(list(Path(uri).iterdir())) == 2


def test_a_save_removes_nothing_of_another_that_is_under_way(tmp_path: Path) -> None:
    mine = tmp_path / "notes.safetensors"
    mine.write_bytes(b"x")
    save(str(tmp_path), 1)
    other = SnapshotFolder(tmp_path)
    other.make()
    name, file = other.create()
    with file:
        file.write(b"x")
    save(str(tmp_path), 2)
    assert mine.exists() and (tmp_path / name).exists()
    other.publish(manifest_bytes(kept_of(3, name)), set())
    assert found(str(tmp_path)) == (3, b"x")
    save(str(tmp_path), 4)
    assert mine.exists() and not (tmp_path / name).exists()


def test_elsewhere_what_a_killed_save_has_left_is_removed_a_day_later() -> None:
    uri = f"memory://left-{secrets.token_hex(4)}"
    folder = SnapshotFolder(uri)
    folder.make()
    for day in ("20200101", "20990101"):
        folder._fs.pipe_file(f"{folder._path}/{day}T000000-00000000-00000.safetensors", b"x")
    save(uri, 1)
    names = [entry["name"].rpartition("/")[2] for entry in folder._fs.ls(folder._path)]
    assert len(names) == 3 and not any(name.startswith("2020") for name in names)


def test_a_save_leaves_what_is_read_until_that_is_read(tmp_path: Path) -> None:
    uri = str(tmp_path / "kept")
    save(uri, 1, b"old")
    reader = SnapshotFolder(uri)
    (entry,) = read_manifest(reader)["encodings"]
    with reader.reading({entry["data"]["file"]}):
        save(uri, 2)
        save(uri, 3)
        with reader.open(entry["data"]["file"])[0] as file:
            assert file.read() == b"old"
    assert len(list(Path(uri).iterdir())) == 3, "the second one was read by nobody"
    save(uri, 4)
    assert found(uri)[0] == 4 and len(list(Path(uri).iterdir())) == 2


def test_who_loads_while_another_process_saves_gets_the_old_or_the_new(tmp_path: Path) -> None:
    uri = str(tmp_path / "kept")
    command = [sys.executable, "-m", "tests.snapshot.saved_files", "again", uri]
    root = Path(__file__).parents[2]
    with subprocess.Popen(command, cwd=root, stdout=subprocess.PIPE, text=True) as saver:

        def overtaken(token: int) -> None:
            """Until what was read has been replaced."""
            assert saver.stdout is not None
            while int(saver.stdout.readline()) < token + 2:
                pass

        try:
            overtaken(0)
            tokens = []
            for _ in range(20):
                token, written = load_whole(uri, overtaken)
                assert written == np.full(8, token, np.float32).tobytes()
                tokens.append(token)
        finally:
            saver.kill()
    assert tokens == sorted(set(tokens))
    save_whole(uri, 1)
    assert len(list((tmp_path / "kept").iterdir())) == 2, "nothing is left of it"


@pytest.mark.parametrize("scheme", ["{}/kept", "memory://often-{}"])
def test_who_is_overtaken_again_and_again_loads_the_last_one(
    scheme: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each look at the folder is followed by a save, which removes what was to be read."""
    uri, looks = scheme.format(tmp_path), itertools.count(2)
    save_whole(uri, 1)
    look, is_saving = SnapshotFolder.manifest, False

    def overtaken(folder: SnapshotFolder) -> bytes:
        nonlocal is_saving
        content = look(folder)
        if not is_saving and (token := next(looks)) <= 60:
            is_saving = True
            save_whole(uri, token)
            is_saving = False
        return content

    monkeypatch.setattr(SnapshotFolder, "manifest", overtaken)
    token, written = load_whole(uri, lambda token: None)
    assert token == 60 and written == np.full(8, 60, np.float32).tobytes()


@pytest.mark.parametrize("scheme", ["{}/kept", "memory://gone-{}"])
def test_a_refused_save_leaves_nothing(scheme: str, tmp_path: Path) -> None:
    uri = scheme.format(tmp_path if "memory" not in scheme else tmp_path.name)
    folder = SnapshotFolder(uri)
    folder.make()
    folder.create()[1].close()
    folder.withdraw()
    assert uri.rpartition("/")[2] not in SnapshotFolder(uri.rpartition("/")[0]).names()
    save(uri, 1)
    folder.make()
    folder.create()[1].close()
    folder.withdraw()
    assert found(uri) == (1, b"new")


@pytest.mark.parametrize("scheme", ["{}/kept", "memory://half-{}"])
def test_what_was_never_finished_can_be_deleted(scheme: str, tmp_path: Path) -> None:
    uri = scheme.format(tmp_path if "memory" not in scheme else tmp_path.name)
    folder = SnapshotFolder(uri)
    folder.make()
    folder.create()[1].close()
    folder.delete()
    with pytest.raises(UnknownKeptError):
        folder.delete()


def test_all_that_lies_in_a_folder_has_its_size(tmp_path: Path) -> None:
    save(str(tmp_path / "one"), 1, b"x" * 10_000)
    (tmp_path / "empty").mkdir()
    left = SnapshotFolder(tmp_path / "left")
    left.make()
    with left.create()[1] as file:
        file.write(b"x" * 100_000)
    assert SnapshotFolder(tmp_path).sizes() == {
        "empty": 4096,
        "left": 25 * 4096 + 4096,
        "one": 3 * 4096 + 4096 + 4096,  # data, manifest, folder
    }


@pytest.mark.parametrize("what", ["pipe", "device", "folder"])
def test_what_one_could_read_for_ever_is_no_file(what: str, tmp_path: Path) -> None:
    save(str(tmp_path), 1)
    for path in list(tmp_path.iterdir()):
        path.unlink()
        if what == "pipe":
            os.mkfifo(path)
        elif what == "device":
            path.symlink_to("/dev/zero")
        else:
            path.mkdir()
        folder = SnapshotFolder(tmp_path)
        reads: list[Callable[[], Any]] = [partial(folder.open, path.name)]
        if path.name == "manifest.json":
            reads.append(folder.manifest)
        for read in reads:
            with pytest.raises(KeptError, match="no plain file") as refusal:
                read()
            assert str(refusal.value.value).endswith(path.name)


@pytest.mark.parametrize("uri", ["nowhere://x", "s3://bucket/x"])
def test_storage_that_there_is_not(uri: str) -> None:
    with pytest.raises(KeptError, match="cannot be reached"):
        SnapshotFolder(uri)
