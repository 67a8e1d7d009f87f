# SPDX-License-Identifier: Apache-2.0
"""The sources of a version of vLLM, with its tests, by pip as it is configured.

They come from the source distribution: its Python files are those of the wheel (which has besides
only what is copied there from other projects), at an eighth of the size, and it has the tests.
"""

from __future__ import annotations

import tarfile
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).parents[2]
# Ignored by git.
CACHE = REPOSITORY / ".check-vllm"


def fetch(version: str) -> Path:
    """The folder of a version: `sources/vllm` and `run/tests`; downloaded once.

    Raises:
        SystemExit: pip finds no such source distribution.
    """
    folder = CACHE / version
    if folder.is_dir():
        return folder
    CACHE.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=CACHE) as part:
        archive = _download(version, part)
        print(f"unpacking {archive.name}", flush=True)
        unpacked = Path(part) / "unpacked"
        with tarfile.open(archive) as tar:
            tar.extractall(unpacked, members=_wanted(tar), filter="data")
        (root,) = unpacked.iterdir()
        for name, place in {"vllm": "sources", "tests": "run"}.items():
            (root / place).mkdir()
            (root / name).rename(root / place / name)
        root.rename(folder)  # at last, so that an interrupted download is made again
    return folder


def _wanted(tar: tarfile.TarFile) -> list[tarfile.TarInfo]:
    return [m for m in tar if m.isfile() and m.name.split("/")[1:2] in (["vllm"], ["tests"])]


def latest() -> str:
    """The newest released version of vLLM that pip, as it is configured, finds the sources of.

    Raises:
        SystemExit: it finds none.
    """
    with _index() as (_, candidates):
        return newest([c.version for c in candidates if not c.link.is_wheel])


def newest(versions: Sequence[Any]) -> str:
    """The highest of some versions of `packaging`; one before its release is none.

    Raises:
        SystemExit: there is none.
    """
    released = [version for version in versions if not version.is_prerelease]
    if not released:
        raise SystemExit("pip finds no release of vLLM: look at its index (pip config list)")
    return str(max(released))


def _download(version: str, folder: str) -> Path:
    """Download the source distribution of a version."""
    from pip._internal.network.download import Downloader

    with _index() as (session, candidates):
        links = [c.link for c in candidates if str(c.version) == version and not c.link.is_wheel]
        if not links:
            versions = sorted({c.version for c in candidates})[-5:]
            raise SystemExit(
                f"pip finds no source distribution vllm=={version}; the latest that it finds: "
                f"{', '.join(map(str, versions)) or 'none'}"
            )
        print(f"downloading {links[0].filename}", flush=True)
        path, _ = Downloader(session, "off")(links[0], folder)
    return Path(path)


@contextmanager
def _index() -> Iterator[tuple[Any, list[Any]]]:
    """Session and candidates of pip's own finder: `pip download` would build the distribution."""
    from pip._internal.commands import create_command

    command: Any = create_command("download", isolated=False)
    options, _ = command.parse_args(["--no-deps", "--no-binary", ":all:", "vllm"])
    with command.main_context():
        session = command.get_default_session(options)
        yield session, command._build_package_finder(options, session).find_all_candidates("vllm")
