# SPDX-License-Identifier: Apache-2.0
"""Conversion of a GGUF file of a known architecture into a folder that `transformers` loads.

It needs the packages gguf, numpy, safetensors, tokenizers and tqdm only; neither torch nor vLLM.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_choreo.testing.models.architectures import Architecture, find_architecture
from vllm_choreo.testing.models.gguf_fields import CONTROL, ConversionError, Fields
from vllm_choreo.testing.models.tokenizer import make_tokenizer, tokenizer_config

if TYPE_CHECKING:
    import gguf
    import numpy as np
    from tqdm import tqdm

_PACKAGES = ("gguf", "numpy", "safetensors", "tokenizers", "tqdm")
_WEIGHTS = "model.safetensors"
_TRANSFORMERS_VERSION = "4.57.0"  # as which `config.json` is written: its names are of the 4s
# Of one file of weights, which is held in memory as a whole; larger models have several.
_MAX_FILE_BYTES = 2 * 10**9
_ROUND_TRIP_TEXTS = (
    "Ein  Beispiel mit\tUmlauten: äöü, 你好, 🙂\n\n  indented",
    "def f(x):\n    return x**2  # 3.14159",
)


def check_packages() -> None:
    """Raise `ConversionError` with what to install if a package is missing (imports none)."""
    missing = [name for name in _PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise ConversionError(
            f"Making the model folder needs {', '.join(missing)}: "
            f"run `{sys.executable} -m pip install {' '.join(missing)}`."
        )


def convert(gguf_file: Path, folder: Path, progress: bool = True) -> None:
    """Write a model folder from a GGUF file and verify it.

    Args:
        gguf_file: file with an architecture and a tokenizer that `ARCHITECTURES` has.
        folder: an existing empty folder.
        progress: show a progress bar on standard error.

    Raises:
        ConversionError: a package is missing, the file cannot be read, the architecture is not
            known, or the written files do not read back the same.
    """
    from tqdm import tqdm

    reader = open_gguf(gguf_file)
    fields = Fields(reader)
    architecture = find_architecture(fields)
    config = _config(architecture, fields, reader)
    with tqdm(
        total=2 * float32_bytes(reader.tensors),
        unit="B",
        unit_scale=True,
        desc="Converting",
        disable=not progress,
    ) as bar:
        _write_json(folder / "config.json", config)
        _write_json(folder / "generation_config.json", _generation_config(config))
        make_tokenizer(fields).save(str(folder / "tokenizer.json"))
        _write_json(folder / "tokenizer_config.json", tokenizer_config(fields))
        _verify_tokenizer(fields, folder / "tokenizer.json")
        _write_weights(reader, architecture, config, folder, bar)


def open_gguf(file: Path) -> gguf.GGUFReader:
    """Open a GGUF file.

    Raises:
        ConversionError: a package is missing, or the file is no whole GGUF file.
    """
    check_packages()
    import gguf

    try:
        return gguf.GGUFReader(file)
    except (ValueError, IndexError, KeyError) as error:  # by what is cut off, or is no GGUF
        raise ConversionError(
            f"{file} is no GGUF file, or not whole ({error}). Fetch it again."
        ) from error


def float32_bytes(tensors: Sequence[gguf.ReaderTensor]) -> int:
    """Bytes of tensors as float32."""
    return 4 * sum(int(tensor.n_elements) for tensor in tensors)


def _config(architecture: Architecture, fields: Fields, reader: gguf.GGUFReader) -> dict[str, Any]:
    """Content of `config.json`; outputs are those of the embedding where the file has no others."""
    names = {tensor.name for tensor in reader.tensors}
    config = architecture.config(fields)
    config["tie_word_embeddings"] = "output.weight" not in names
    # Without a version, transformers takes any tokenizer for one of Mistral's broken ones.
    config["transformers_version"] = _TRANSFORMERS_VERSION
    return {key: value for key, value in config.items() if value is not None}


def _generation_config(config: dict[str, Any]) -> dict[str, Any]:
    """Token ids alone: vLLM would silently make sampling settings defaults of all requests."""
    names = ("bos_token_id", "eos_token_id", "pad_token_id")
    return {key: config[key] for key in names if key in config}


def _write_weights(
    reader: gguf.GGUFReader,
    architecture: Architecture,
    config: dict[str, Any],
    folder: Path,
    bar: tqdm[Any],
) -> None:
    """Write and verify the weights: one file, or several and their index."""
    import safetensors.numpy

    parts = _parts(reader.tensors)
    files: dict[str, str] = {}
    for number, tensors in enumerate(parts, start=1):
        several = f"model-{number:05}-of-{len(parts):05}.safetensors"
        file = folder / (_WEIGHTS if len(parts) == 1 else several)
        bar.set_description("Converting")
        weights = _weights(tensors, architecture, config, bar)
        safetensors.numpy.save_file(weights, file, {"format": "pt"})
        bar.set_description("Verifying")
        _verify_weights(weights, file, bar)
        # safetensors makes files that only their owner can read.
        os.chmod(file, (folder / "config.json").stat().st_mode)
        files |= dict.fromkeys(weights, file.name)
    if len(parts) > 1:
        total = {"total_size": float32_bytes(reader.tensors)}
        index = {"metadata": total, "weight_map": files}
        _write_json(folder / f"{_WEIGHTS}.index.json", index)


def _parts(tensors: Sequence[gguf.ReaderTensor]) -> list[list[gguf.ReaderTensor]]:
    """Cut the tensors where a file would be too large."""
    parts: list[list[gguf.ReaderTensor]] = [[]]
    for tensor in tensors:
        if parts[-1] and float32_bytes([*parts[-1], tensor]) > _MAX_FILE_BYTES:
            parts.append([])
        parts[-1].append(tensor)
    return parts


def _weights(
    tensors: Sequence[gguf.ReaderTensor],
    architecture: Architecture,
    config: dict[str, Any],
    bar: tqdm[Any],
) -> dict[str, np.ndarray]:
    """Tensors as float32 under the names of transformers, `[out_features, in_features]`."""
    import numpy as np

    weights = {}
    for tensor in tensors:
        value = architecture.restore(tensor.name, _dequantized(tensor), config)
        weights[architecture.transformers_name(tensor.name)] = np.ascontiguousarray(value)
        bar.update(4 * int(tensor.n_elements))
    return weights


def _dequantized(tensor: gguf.ReaderTensor) -> np.ndarray:
    import gguf
    import numpy as np

    try:
        value = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
    except NotImplementedError as error:
        raise ConversionError(
            f"{tensor.name} is quantised in a way ({tensor.tensor_type.name}) that the package "
            "gguf does not read. Take a file of another one, as Q4_K_M or Q8_0."
        ) from error
    return value.astype(np.float32, copy=False)


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


# ---- verification ----


def _verify_weights(weights: dict[str, np.ndarray], file: Path, bar: tqdm[Any]) -> None:
    """Read the weights back from the disk and compare every bit of them."""
    import numpy as np
    from safetensors import safe_open

    with safe_open(file, framework="numpy") as stored:
        if set(stored.keys()) != set(weights):
            raise ConversionError(f"{file} lacks tensors. The disk may be failing; try again.")
        for name, expected in weights.items():
            if not np.array_equal(stored.get_tensor(name), expected):
                raise ConversionError(f"{name} reads back changed. The disk may be failing.")
            bar.update(expected.nbytes)


def _verify_tokenizer(fields: Fields, file: Path) -> None:
    """Check that tokens keep their ids, control tokens stay whole, and text comes back the same."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(file))
    tokens, control = fields["tokenizer.ggml.tokens"], fields.token_ids(CONTROL)
    encoded = tokenizer.encode_batch([tokens[i] for i in control], add_special_tokens=False)
    same_ids = tokenizer.get_vocab() == {token: index for index, token in enumerate(tokens)}
    whole = [encoding.ids for encoding in encoded] == [[i] for i in control]
    lossless = all(
        tokenizer.decode(
            tokenizer.encode(text, add_special_tokens=False).ids, skip_special_tokens=False
        )
        == text
        for text in (*_ROUND_TRIP_TEXTS, _turn(fields))
    )
    if not (same_ids and whole and lossless):
        raise ConversionError(
            "The tokenizer does not give back its own text. Reinstall `tokenizers` and try again."
        )


def _turn(fields: Fields) -> str:
    """Text between two control tokens, as in a turn of a chat."""
    tokens, control = fields["tokenizer.ggml.tokens"], fields.token_ids(CONTROL)
    begin, end = (tokens[i] for i in (control[0], control[-1])) if control else ("", "")
    return f"{begin}user\nWhat is 1234 + 5678?{end}\n"
