"""The folder between who trains an adapter and who serves it."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from vllm_choreo.errors import ChoreoError
from vllm_choreo.semantics.session_options import SessionOptions
from vllm_choreo.trained_adapter import (
    FILE_NAME,
    PEFT_FILES,
    PLACEMENTS,
    ModelIdentity,
    TrainedAdapter,
    uses_adapter,
)

BASE = ModelIdentity("tiny", "ab", "cd")
ADAPTER = TrainedAdapter(
    "prefill",
    BASE,
    "kl",
    data={"digest": "ef", "train": 3},
    settings={"rank": 16},
    seeds={"seed": 1},
    versions={"torch": "2"},
    curves={"train": [[1, 0.5], [2, 0.25]]},
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in PEFT_FILES:
        (tmp_path / name).write_text("{}")
    ADAPTER.save(tmp_path)
    return tmp_path


def write_model(folder: Path, tensors: dict[str, bytes], tokenizer: str = "words") -> None:
    """A safetensors file by its definition: the header's length, the header, the bytes."""
    folder.mkdir(exist_ok=True)
    header, start = {}, 0
    for name, value in tensors.items():
        stop = start + len(value)
        header[name] = {"dtype": "U8", "shape": [len(value)], "data_offsets": [start, stop]}
        start = stop
    text = json.dumps(header).encode()
    content = struct.pack("<Q", len(text)) + text + b"".join(tensors.values())
    (folder / "model.safetensors").write_bytes(content)
    (folder / "tokenizer.json").write_text(tokenizer)


def test_what_is_saved_is_loaded(folder: Path) -> None:
    assert TrainedAdapter.load(folder) == ADAPTER
    assert TrainedAdapter.load(str(folder)) == ADAPTER
    assert json.loads((folder / FILE_NAME).read_text())["format"] == 1


_VOCABULARY: dict[str, Any] = {
    "model": {"type": "BPE", "vocab": {"a": 0, "b": 1}},
    "added_tokens": [{"id": 2, "content": "<end>"}],
}


def test_a_tokenizer_that_training_has_written_anew_is_the_same(tmp_path: Path) -> None:
    def identity(tokenizer: Any) -> ModelIdentity:
        write_model(tmp_path / "model", {"w": b"1"}, json.dumps(tokenizer))
        return ModelIdentity.of(tmp_path / "model")

    before = identity(_VOCABULARY)
    again = identity({"post_processor": None, **_VOCABULARY})
    assert again.tokenizer != before.tokenizer and again.same_as(before)
    other = {**_VOCABULARY["model"], "vocab": {"b": 0, "a": 1}}
    for changed in ({"model": other}, {"added_tokens": []}, {"model": {}}, {"model": 3}):
        assert not identity({**_VOCABULARY, **changed}).same_as(before)
    # In models that score tokens the order is their numbers.
    scored = [{"model": {"vocab": [[name, -1.0] for name in order]}} for order in ("ab", "ba")]
    assert not identity(scored[0]).same_as(identity(scored[1]))
    # As folders of before have it.
    assert replace(before, vocabulary="").same_as(before)
    assert not replace(before, vocabulary="").same_as(again)


def test_a_folder_of_before_names_no_vocabulary(folder: Path) -> None:
    data = json.loads((folder / FILE_NAME).read_text())
    del data["base"]["vocabulary"]
    (folder / FILE_NAME).write_text(json.dumps(data))
    assert TrainedAdapter.load(folder) == ADAPTER


def test_each_kind_of_call_is_encoded_by_whom_the_placement_says() -> None:
    used = {name: (uses_adapter(name, False), uses_adapter(name, True)) for name in PLACEMENTS}
    assert used == {"prefill": (True, False), "decode": (False, True), "both": (True, True)}
    with pytest.raises(ChoreoError, match=r"placement must be one of .*prefill") as error:
        uses_adapter("editor", True)
    assert (error.value.parameter, error.value.value) == ("placement", "editor")


_FORMER = pytest.mark.parametrize(("former", "word"), [("writer", "prefill"), ("reader", "decode")])


@_FORMER
def test_a_former_word_warns_and_means_the_same(former: str, word: str) -> None:
    for generates in (False, True):
        with pytest.warns(DeprecationWarning, match=f'"{former}" is called "{word}" now'):
            assert uses_adapter(former, generates) == uses_adapter(word, generates)
    with pytest.warns(DeprecationWarning, match=former):
        assert SessionOptions(placement=former).placement == word


@_FORMER
def test_a_folder_of_before_is_that_of_today(folder: Path, former: str, word: str) -> None:
    """Its settings, too: by them a training is found to be the same."""
    data = json.loads((folder / FILE_NAME).read_text())
    data |= {"placement": former, "settings": {"placement": former, "rank": 16}}
    (folder / FILE_NAME).write_text(json.dumps(data))
    with pytest.warns(DeprecationWarning, match=former):
        found = TrainedAdapter.load(folder)
    settings = {"placement": word, "rank": 16}
    assert found == replace(ADAPTER, placement=word, settings=settings)


@pytest.mark.parametrize("name", [FILE_NAME, *PEFT_FILES])
def test_a_folder_without_one_of_its_files_is_refused(folder: Path, name: str) -> None:
    (folder / name).unlink()
    with pytest.raises(ChoreoError, match=f"no {name}"):
        TrainedAdapter.load(folder)


def test_no_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ChoreoError, match=f"no {FILE_NAME}.*nowhere"):
        TrainedAdapter.load(tmp_path / "nowhere")


def _without(name: str) -> Callable[[dict[str, Any]], Any]:
    return lambda data: {key: value for key, value in data.items() if key != name}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda data: [data], "of format list"),
        (lambda data: {**data, "format": 2}, "of format 2, 1 is needed"),
        (_without("base"), "`base`"),
        (lambda data: {**data, "base": {"name": "tiny"}}, "name, weights, tokenizer"),
        (_without("data"), "`data`"),
        (lambda data: {**data, "loss": 1}, "`loss`"),
        (_without("placement"), "`placement`"),
        (lambda data: {**data, "placement": "editor"}, "one of"),
    ],
)
def test_a_file_of_another_form_is_refused(
    folder: Path, change: Callable[[dict[str, Any]], Any], reason: str
) -> None:
    data = json.loads((folder / FILE_NAME).read_text())
    (folder / FILE_NAME).write_text(json.dumps(change(data)))
    with pytest.raises(ChoreoError, match=reason):
        TrainedAdapter.load(folder)


def test_a_file_that_is_no_json_is_refused(folder: Path) -> None:
    (folder / FILE_NAME).write_text("{")
    with pytest.raises(ChoreoError, match="cannot be read"):
        TrainedAdapter.load(folder)


def test_models_are_told_apart_by_weights_and_tokenizer(tmp_path: Path) -> None:
    tensors = {"a": bytes(10_000), "b": bytes(10_000)}
    write_model(tmp_path / "one", tensors)
    write_model(tmp_path / "same", tensors)
    write_model(tmp_path / "tuned", {**tensors, "b": b"\1" + bytes(9_999)})
    write_model(tmp_path / "other names", {"a": bytes(10_000), "c": bytes(10_000)})
    write_model(tmp_path / "other words", tensors, "others")
    one = ModelIdentity.of(tmp_path / "one")
    assert one.name == "one"
    assert one.same_as(ModelIdentity.of(tmp_path / "same"))
    for name in ("tuned", "other names", "other words"):
        assert not one.same_as(ModelIdentity.of(tmp_path / name)), name


def test_of_a_model_elsewhere_the_name_is_known() -> None:
    unknown = ModelIdentity.of("nobody/nothing")
    assert unknown == ModelIdentity("nobody/nothing", "", "")
    assert unknown.same_as(BASE)
