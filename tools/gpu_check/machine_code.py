# SPDX-License-Identifier: Apache-2.0
"""What ptxas and the disassembler, which come with Triton, say of a compiled kernel."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import triton
from triton import knobs

# Operations of machine code (CUDA binary utilities, "Instruction Set Reference"), by what they do.
_KINDS = {
    "mma": ("HMMA", "HGMMA", "QGMMA", "UTCHMMA", "UTCQMMA", "IMMA", "DMMA"),
    "global": ("LDG", "STG", "LDGSTS", "UTMALDG", "UBLKCP", "RED", "ATOMG"),
    "local": ("LDL", "STL"),
    "barrier": ("BAR", "WARPSYNC", "SYNCS", "DEPBAR", "LDGDEPBAR", "WARPGROUP"),
}
_FEATURES = {
    "wgmma": "HGMMA",
    "tcgen05": "UTCHMMA",
    "mma": "HMMA",
    "tma": "UTMALDG",
    "cp.async": "LDGSTS",
    "ldmatrix": "LDSM",
}
_OPERATION = re.compile(r"\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_]*)")
_LABEL = re.compile(r"^(\.L_x_\d+):")
_BRANCH = re.compile(r"\bBRA\b.*`\((\.L_x_\d+)\)")


@dataclass(frozen=True)
class Assembled:
    """What ptxas says.

    Attributes:
        registers: of a thread.
        spill_bytes: stored and loaded for want of registers, of a thread.
        serialized: what it says of products that it had to run one after the other (C7508 to
            C7520).
    """

    registers: int
    spill_bytes: int
    serialized: tuple[str, ...]


def assemble(ptx: str, arch: int) -> Assembled:
    """Assemble a kernel with the options that Triton gives, and read what ptxas reports."""
    match = re.search(r"^\.target\s+(\w+)", ptx, re.MULTILINE)
    assert match, "PTX names its target"
    options = ["-lineinfo", "-v", f"--gpu-name={match[1]}"]
    if triton.__version__ >= "3.7":
        options.append("--regAllocOptLevel=2")
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "kernel.ptx")
        source.write_text(ptx)
        command = [_tool("ptxas", arch), *options, str(source), "-o", str(Path(folder, "cubin"))]
        log = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    numbers = (r"Used (\d+) registers", r"(\d+) bytes spill stores", r"(\d+) bytes spill loads")
    found = [re.search(pattern, log) for pattern in numbers]
    registers, stores, loads = (int(match[1]) if match else 0 for match in found)
    serialized = re.findall(r"\(C75\d\d\)[^\n]*serialized[^\n]*", log)
    return Assembled(registers, stores + loads, tuple(serialized))


def disassemble(cubin: bytes, arch: int) -> list[str]:
    """Lines of machine code."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [_tool("nvdisasm", arch), "-c", file.name]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    return done.stdout.split("\n")


def operations(lines: Sequence[str]) -> list[str]:
    """Operations of some lines of machine code, in order."""
    return [match[1] for line in lines if (match := _OPERATION.match(line))]


def main_loop(lines: Sequence[str]) -> list[str]:
    """Operations of the inner loop over a chunk of keys and values.

    That is the first of those with most products on tensor cores; without any, the longest.
    """
    loops = [operations(lines[first:last]) for first, last in _inner_loops(lines)]
    most = max((count(loop, "mma") for loop in loops), default=0)
    if most:
        return next(loop for loop in loops if count(loop, "mma") == most)
    return max(loops, key=len, default=[])


def _inner_loops(lines: Sequence[str]) -> list[tuple[int, int]]:
    """First and last line of each loop without another one in it: from a label to a branch back."""
    label_at: dict[str, int] = {}
    loops: list[tuple[int, int]] = []
    for number, line in enumerate(lines):
        if match := _LABEL.match(line):
            label_at[match[1]] = number
        elif (match := _BRANCH.search(line)) and match[1] in label_at:
            loops.append((label_at[match[1]], number))
    return sorted(
        loop
        for loop in loops
        if not any(other != loop and loop[0] <= other[0] and other[1] <= loop[1] for other in loops)
    )


def count(found: Sequence[str], kind: str) -> int:
    """Number of operations of a kind: "mma", "global", "local" (spills) or "barrier"."""
    counts = Counter(found)
    return sum(counts[name] for name in _KINDS[kind])


def features(found: Sequence[str]) -> str:
    """What of tensor cores and asynchronous copies a kernel uses, in words."""
    seen = set(found)
    return " ".join(sorted(word for word, name in _FEATURES.items() if name in seen))


def _tool(name: str, arch: int) -> str:
    if name == "ptxas" and arch >= 100:
        name = "ptxas_blackwell"
    return str(getattr(knobs.nvidia, name).path)
