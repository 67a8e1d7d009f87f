# SPDX-License-Identifier: Apache-2.0
"""Folder of a trained adapter: PEFT's files, and the facts that a reader of it needs.

    folder/adapter_config.json, adapter_model.safetensors    as PEFT writes them
    folder/choreo_train.json                                 `TrainedAdapter`

Imports neither torch nor vllm: training and serving share this file and nothing else.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields
from hashlib import blake2b
from pathlib import Path
from typing import Any, TypeVar

from vllm_choreo.errors import ChoreoError
from vllm_choreo.files import write_text

FORMAT = 1  # of choreo_train.json
FILE_NAME = "choreo_train.json"
PEFT_FILES = ("adapter_config.json", "adapter_model.safetensors")
PLACEMENTS = ("prefill", "decode", "both")
_FORMER = {"writer": "prefill", "reader": "decode"}  # understood for one release

Given = TypeVar("Given")

# The first that a folder has tells how it splits text into tokens.
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tekken.json")
_HEAD_BYTES = 4096  # of every tensor: whoever trains a tensor changes these, too


def current_placement(placement: Given) -> Given | str:
    """Return today's word for a placement; a former one, "writer" or "reader", warns.

    Anything else is returned as it is, and checked by `uses_adapter`.
    """
    if not isinstance(placement, str) or placement not in _FORMER:
        return placement
    current = _FORMER[placement]
    warnings.warn(
        f'the placement "{placement}" is called "{current}" now', DeprecationWarning, stacklevel=3
    )
    return current


def uses_adapter(placement: str, generates: bool) -> bool:
    """Return whether a call is encoded with an adapter of this placement.

    "prefill": calls that encode messages; "decode": those that generate; "both": all.

    Raises:
        ChoreoError: no such placement.
    """
    placement = current_placement(placement)
    if placement not in PLACEMENTS:
        raise ChoreoError(
            f"placement must be one of {PLACEMENTS}", parameter="placement", value=placement
        )
    return placement == "both" or generates == (placement == "decode")


@dataclass(frozen=True)
class ModelIdentity:
    """Identity of the model that recorded something or was trained on; compare by `same_as`.

    Attributes:
        name: name of the folder or of the model, for a reader.
        weights: hex digest of the names, shapes and first bytes of all tensors; "": unknown.
        tokenizer: hex digest of the file that splits text into tokens; "": unknown.
        vocabulary: hex digest of the numbers of all tokens; "": unknown.
    """

    name: str
    weights: str
    tokenizer: str
    vocabulary: str = ""

    @classmethod
    def of(cls, model: str | Path) -> ModelIdentity:
        """Identify a model, in a fraction of a second.

        Args:
            model: a folder, or a name whose files are in the cache of the model hub. For any other
                model nothing but the name is known.
        """
        folder = _folder_of(str(model))
        name = folder.name if Path(model).is_dir() else str(model)
        tokenizer, vocabulary = _tokenizer_digests(folder)
        return cls(name, _weights_digest(folder), tokenizer, vocabulary)

    def same_as(self, other: ModelIdentity) -> bool:
        """Return whether weights and tokenizer are the same, as far as both are known.

        Tokenizers are the same if their files are, or if all tokens have the same numbers: training
        writes the file anew, in other words.
        """
        if self.weights and other.weights and self.weights != other.weights:
            return False
        if not self.tokenizer or not other.tokenizer or self.tokenizer == other.tokenizer:
            return True
        return bool(self.vocabulary) and self.vocabulary == other.vocabulary


@dataclass(frozen=True)
class TrainedAdapter:
    """Record of an adapter's training, which says the calls that use it.

    Attributes:
        placement: kind of the calls that use it, see `uses_adapter`.
        base: the model that it was trained on.
        loss: "ce" or "kl".
        data: "digest" and "mode" of the recorded runs, and the number of examples of each part.
        settings: settings of the training, by name.
        seeds: seeds of the training, by name.
        versions: versions of the packages in use, by name.
        curves: lists of `[step, nats per token]`, by name.
    """

    placement: str
    base: ModelIdentity
    loss: str
    data: Mapping[str, Any] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)
    seeds: Mapping[str, int] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    curves: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        placement = current_placement(self.placement)
        uses_adapter(placement, generates=True)
        # A folder of before has the former word in its settings, too.
        renamed = {"placement": placement} if "placement" in self.settings else {}
        object.__setattr__(self, "placement", placement)
        object.__setattr__(self, "settings", {**self.settings, **renamed})

    def save(self, folder: Path) -> None:
        """Write `choreo_train.json`; an interrupted write leaves the old file or the new one."""
        text = json.dumps({"format": FORMAT, **asdict(self)}, ensure_ascii=False, indent=1)
        write_text(folder / FILE_NAME, text + "\n")

    @classmethod
    def load(cls, folder: str | Path) -> TrainedAdapter:
        """Read the folder that training wrote.

        Raises:
            ChoreoError: it is no such folder, or one of another format; says what is missing.
        """
        folder = Path(folder).expanduser()
        for name in (FILE_NAME, *PEFT_FILES):
            if not (folder / name).is_file():
                raise _refused(f"it has no {name}: give the folder that training wrote", folder)
        try:
            data = json.loads((folder / FILE_NAME).read_text("utf-8"))
        except (OSError, ValueError) as error:
            raise _refused(f"{FILE_NAME} cannot be read ({error})", folder) from None
        if not isinstance(data, dict) or data.get("format") != FORMAT:
            found = data.get("format") if isinstance(data, dict) else type(data).__name__
            raise _refused(f"{FILE_NAME} is of format {found}, {FORMAT} is needed", folder)
        return _from_json(data, folder)


def _from_json(data: Mapping[str, Any], folder: Path) -> TrainedAdapter:
    given = {setting.name: data.get(setting.name) for setting in fields(TrainedAdapter)}
    base = given.pop("base")
    names = [part.name for part in fields(ModelIdentity)]
    # A folder of before names no vocabulary.
    base = {"vocabulary": "", **base} if isinstance(base, dict) else {}
    if any(not isinstance(base.get(name), str) for name in names):
        raise _refused(f"`base` in {FILE_NAME} needs the texts {', '.join(names)}", folder)
    for name, value in given.items():
        expected = str if name in ("placement", "loss") else dict
        if not isinstance(value, expected):
            raise _refused(f"`{name}` in {FILE_NAME} is not as training writes it", folder)
    return TrainedAdapter(base=ModelIdentity(**{name: base[name] for name in names}), **given)  # type: ignore[arg-type]


def _refused(reason: str, folder: Path) -> ChoreoError:
    return ChoreoError(f"not a trained adapter: {reason}", parameter="adapter", value=str(folder))


# -- digests of a model --------------------------------------------------------------------------


def adapter_weights(folder: Path) -> str:
    """Hex digest of an adapter's weights, as `ModelIdentity.weights`; "": there are none."""
    return _weights_digest(folder)


def _folder_of(model: str) -> Path:
    if Path(model).is_dir():
        return Path(model).absolute()
    try:
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(model, local_files_only=True))
    except (ImportError, OSError, ValueError):
        return Path(model)


def _tokenizer_digests(folder: Path) -> tuple[str, str]:
    """Hex digests of a tokenizer's file, and of its vocabulary."""
    for name in _TOKENIZER_FILES:
        if (folder / name).is_file():
            content = (folder / name).read_bytes()
            return _digest(content), _vocabulary_digest(content)
    return "", ""


def _vocabulary_digest(content: bytes) -> str:
    """Hex digest of the numbers of all tokens; "": the file is none of the library `tokenizers`."""
    try:
        data = json.loads(content)
        # A number for each token; or, in the order of numbers, tokens with their scores.
        found = data["model"]["vocab"]
        tokens = sorted(found.items()) if isinstance(found, dict) else found
        added = sorted([token["id"], token["content"]] for token in data.get("added_tokens") or ())
    except (ValueError, LookupError, TypeError, AttributeError):
        return ""
    return _digest(json.dumps([tokens, added]).encode())


def _digest(content: bytes) -> str:
    return blake2b(content, digest_size=16).hexdigest()


def _weights_digest(folder: Path) -> str:
    """Hex digest of all safetensors files: their headers, and the first bytes of each tensor.

    Reading every byte would take minutes for large models.
    """
    paths = sorted(folder.glob("*.safetensors"))
    digest = blake2b(digest_size=16)
    for path in paths:
        for piece in _pieces(path):
            digest.update(len(piece).to_bytes(8, "little"))
            digest.update(piece)
    return digest.hexdigest() if paths else ""


def _pieces(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        num_header_bytes = int.from_bytes(file.read(8), "little")
        header = file.read(num_header_bytes)
        yield header
        first = file.tell()
        tensors = {k: v for k, v in json.loads(header).items() if k != "__metadata__"}
        for tensor in sorted(tensors.values(), key=lambda tensor: tensor["data_offsets"]):
            start, stop = tensor["data_offsets"]
            file.seek(first + start)
            yield file.read(min(stop - start, _HEAD_BYTES))
