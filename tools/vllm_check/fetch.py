# SPDX-License-Identifier: Apache-2.0
"""The sources of a version of vLLM, with its tests, by pip as it is configured.

They come from the source distribution: its Python files are those of the wheel (which has besides
only what is copied there from other projects), at an eighth of the size, and it has the tests.
"""

from __future__ import annotations

import tarfile
import tempfile
from pathlib import Path

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


def _download(version: str, folder: str) -> Path:
    """By pip's own finder: `pip download` would try to build the distribution."""
    from pip._internal.commands import create_command
    from pip._internal.network.download import Downloader

    command = create_command("download", isolated=False)
    wanted = ["--no-deps", "--no-binary", ":all:", "--dest", folder, f"vllm=={version}"]
    options, _ = command.parse_args(wanted)
    with command.main_context():
        session = command.get_default_session(options)
        found = command._build_package_finder(options, session).find_all_candidates("vllm")
        links = [c.link for c in found if str(c.version) == version and not c.link.is_wheel]
        if not links:
            versions = sorted({c.version for c in found})[-5:]
            raise SystemExit(
                f"pip finds no source distribution vllm=={version}; the latest that it finds: "
                f"{', '.join(map(str, versions)) or 'none'}"
            )
        print(f"downloading {links[0].filename}", flush=True)
        path, _ = Downloader(session, "off")(links[0], folder)
    return Path(path)
