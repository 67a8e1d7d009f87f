# SPDX-License-Identifier: Apache-2.0
"""Conversion of a GGUF file of a known architecture into a folder that `transformers` loads.

It needs the packages gguf, numpy, safetensors, tokenizers and tqdm only; neither torch nor vLLM.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_choreo.testing.models.architectures import Architecture, find_architecture
from vllm_choreo.testing.models.gguf_fields import CONTROL, ConversionError, Fields
from vllm_choreo.testing.models.tokenizer import tokenizer_config

if TYPE_CHECKING:
    import gguf
    import numpy as np
    from tqdm import tqdm

_PACKAGES = ("gguf", "numpy", "safetensors", "tokenizers", "tqdm")


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
        ConversionError: a package is missing, the architecture is not known, or the written files
            do not read back the same.
    """
    check_packages()
    import gguf
    import safetensors.numpy
    from tqdm import tqdm

    reader = gguf.GGUFReader(gguf_file)
    fields = Fields(reader)
    architecture = find_architecture(fields)
    config = architecture.config(fields)
    num_bytes = 4 * sum(int(tensor.n_elements) for tensor in reader.tensors)
    with tqdm(
        total=2 * num_bytes, unit="B", unit_scale=True, desc="Converting", disable=not progress
    ) as bar:
        weights = _weights(reader, architecture, config, bar)
        safetensors.numpy.save_file(weights, folder / "model.safetensors", {"format": "pt"})
        _write_json(folder / "config.json", config)
        _write_json(folder / "generation_config.json", _generation_config(config))
        architecture.tokenizer(fields).save(str(folder / "tokenizer.json"))
        _write_json(folder / "tokenizer_config.json", tokenizer_config(fields))
        bar.set_description("Verifying")
        _verify_weights(weights, folder / "model.safetensors", bar)
        _verify_tokenizer(fields, architecture, folder / "tokenizer.json")
    # safetensors makes files that only their owner can read.
    os.chmod(folder / "model.safetensors", (folder / "config.json").stat().st_mode)


def _generation_config(config: dict[str, Any]) -> dict[str, Any]:
    """Token ids alone: vLLM would silently make sampling settings defaults of all requests."""
    return {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}


def _weights(
    reader: gguf.GGUFReader, architecture: Architecture, config: dict[str, Any], bar: tqdm[Any]
) -> dict[str, np.ndarray]:
    """Tensors as float32 under the names of transformers, `[out_features, in_features]`."""
    import gguf
    import numpy as np

    weights = {}
    for tensor in reader.tensors:
        value = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        value = architecture.restore(tensor.name, value.astype(np.float32, copy=False), config)
        weights[architecture.transformers_name(tensor.name)] = np.ascontiguousarray(value)
        bar.update(4 * int(tensor.n_elements))
    return weights


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


def _verify_tokenizer(fields: Fields, architecture: Architecture, file: Path) -> None:
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
        for text in architecture.round_trip_texts
    )
    if not (same_ids and whole and lossless):
        raise ConversionError(
            "The tokenizer does not give back its own text. Reinstall `tokenizers` and try again."
        )
