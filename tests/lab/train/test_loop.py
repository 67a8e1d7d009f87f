# SPDX-License-Identifier: Apache-2.0
"""From a recording to a folder: training learns, goes on where it was killed, refuses the rest."""

from __future__ import annotations

import argparse
import json
import math
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import peft
import pytest
import torch

from tests.grids import sampled
from tests.lab.train.packings import load
from tests.lab.train.recordings import read_pasted, record_runs
from vllm_choreo.cli import main as cli
from vllm_choreo.errors import ChoreoError
from vllm_choreo.lab.cli.train import command
from vllm_choreo.lab.record.recording import FILE_NAME as RECORD
from vllm_choreo.lab.record.recording import Recording
from vllm_choreo.lab.train.checkpoint import FILE_NAME as CHECKPOINT
from vllm_choreo.lab.train.checkpoint import load_checkpoint, save_checkpoint
from vllm_choreo.lab.train.examples import (
    concat_examples,
    examples_of,
    order,
    packed_together,
    taught,
)
from vllm_choreo.lab.train.forward import PackedModel
from vllm_choreo.lab.train.loop import TrainState, train
from vllm_choreo.lab.train.loss import (
    Teacher,
    adapted_calls,
    divergence,
    likeliest_divergence,
    text_logprobs,
    trained_logprobs,
)
from vllm_choreo.lab.train.packing import pack
from vllm_choreo.lab.train.settings import TrainSettings
from vllm_choreo.lab.train.training import adapted_model
from vllm_choreo.trained_adapter import PEFT_FILES, TrainedAdapter

SETTINGS = TrainSettings(
    "prefill", rank=4, alpha=8, learning_rate=3e-3, epochs=2, dropout=0.1, evaluations=2, patience=9
)


@pytest.fixture(scope="module")
def model_path(tiny_model_path: Callable[[str], Path]) -> str:
    return str(tiny_model_path("llama"))


@pytest.fixture(scope="module")
def recorded(model_path: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return record_runs(tmp_path_factory.mktemp("recorded"), Path(model_path), 40)


@pytest.fixture(scope="module")
def recording(recorded: Path) -> Recording:
    return Recording.load(recorded)


def weights(folder: Path) -> bytes:
    return (folder / PEFT_FILES[1]).read_bytes()


# -- it learns -----------------------------------------------------------------------------------


@pytest.mark.parametrize("placement", sampled(["both", "prefill", "decode"], 1))
@pytest.mark.parametrize("loss", ["kl", "ce"])
def test_the_loss_falls(
    model_path: str, recording: Recording, tmp_path: Path, placement: str, loss: str
) -> None:
    """On the runs that it sees; the model is random, so of others there is hardly more to learn."""
    settings = replace(SETTINGS, placement=placement, loss=loss, epochs=8, dropout=0.0)
    done = train(model_path, recording, settings, tmp_path)
    losses = [value for _, value in done.curves["train"]]
    assert sum(losses[-8:]) < 0.8 * sum(losses[:8])


def test_texts_that_are_cut_are_learnt_from(model_path: str, tmp_path: Path) -> None:
    """What generates is the plain model: only how pieces are encoded has changed."""
    recorded = record_runs(tmp_path / "recorded", Path(model_path), 20, program=read_pasted)
    recording = Recording.load(recorded)
    settings = replace(SETTINGS, cut="content", cut_tokens=16, epochs=8, dropout=0.0)
    done = train(model_path, recording, settings, tmp_path / "adapter")
    losses = [value for _, value in done.curves["train"]]
    assert sum(losses[-4:]) < 0.8 * sum(losses[:4])
    assert (done.settings["cut"], done.settings["cut_tokens"]) == ("content", 16)
    assert train(model_path, recording, settings, tmp_path / "adapter") == done
    with pytest.raises(ChoreoError, match="other settings"):
        train(model_path, recording, replace(settings, cut="messages"), tmp_path / "adapter")


def test_the_folder_tells_how_it_was_made(
    model_path: str, recording: Recording, tmp_path: Path
) -> None:
    """The weights are those of the smallest development loss, found again from the folder alone."""
    done = train(model_path, recording, SETTINGS, tmp_path)
    assert TrainedAdapter.load(tmp_path) == done
    assert (done.placement, done.loss, done.data["digest"]) == ("prefill", "kl", recording.digest)
    assert [done.data[part] for part in recording.parts] == [32, 4, 4]
    assert done.settings["rank"] == 4 and "cut" not in done.settings  # as before there was one
    assert done.seeds == {"seed": 0} and done.versions["torch"]
    assert not (tmp_path / CHECKPOINT).exists()
    steps = [step for step, _ in done.curves["development"]]
    assert steps == [0, 4, 8, 12, 16] and len(done.curves["train"]) == 16

    model = PackedModel(peft.PeftModel.from_pretrained(load(Path(model_path)), str(tmp_path)))
    packing, teacher = concat_examples(examples_of(recording)["development"])
    assert teacher is not None
    with torch.no_grad():
        logprobs = trained_logprobs(model, packing, adapted_calls(packing, done.placement))
        found = float(likeliest_divergence(logprobs, teacher))
    assert found == pytest.approx(min(value for _, value in done.curves["development"]), abs=1e-5)


def test_it_ends_when_nothing_gets_better(
    model_path: str, recording: Recording, tmp_path: Path
) -> None:
    settings = replace(SETTINGS, learning_rate=0.5, epochs=20, patience=2, clip=100.0)
    done = train(model_path, recording, settings, tmp_path)
    curve = [value for _, value in done.curves["development"]]
    assert curve.index(min(curve)) == len(curve) - 3
    assert len(done.curves["train"]) < 20 * 8


# -- the very same result ------------------------------------------------------------------------


class Killed(Exception):
    pass


@pytest.mark.parametrize("at", sampled([4, 1, 3, 11, 16], 1))
def test_a_run_that_was_stopped_goes_on(
    model_path: str, recording: Recording, tmp_path: Path, at: int
) -> None:
    """Between evaluations, at one, in the second epoch, after the last step; twice each."""

    def kill(progress: TrainState) -> None:
        if progress.step == at:
            raise Killed

    whole = train(model_path, recording, SETTINGS, tmp_path / "whole")
    with pytest.raises(Killed):
        train(model_path, recording, SETTINGS, tmp_path / "cut", kill, checkpoint_seconds=0)
    assert not (tmp_path / "cut" / PEFT_FILES[1]).exists()
    torch.manual_seed(99)  # another process would be anywhere
    seen: list[int] = []
    again = train(
        model_path,
        recording,
        SETTINGS,
        tmp_path / "cut",
        lambda progress: seen.append(progress.step),
    )
    assert seen[0] in (at - 1, at)  # it did go on, and did not begin anew
    assert weights(tmp_path / "cut") == weights(tmp_path / "whole")
    assert again == whole


@pytest.mark.exhaustive  # a process of its own
def test_a_process_that_was_killed_goes_on(model_path: str, recorded: Path, tmp_path: Path) -> None:
    """By the command, and a signal that nothing can catch."""
    command = [sys.executable, "-m", "vllm_choreo.cli.main", "train", str(recorded)]
    command += ["--model", model_path, "--placement", "both", "--rank", "4", "--epochs", "12"]
    command += ["--learning-rate", "1e-3", "--patience", "99", "--out"]
    cut, whole = tmp_path / "cut", tmp_path / "whole"
    process = subprocess.Popen([*command, str(cut)], stderr=subprocess.DEVNULL)
    while process.poll() is None and not (cut / CHECKPOINT).exists():
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert process.returncode == -signal.SIGKILL and not (cut / PEFT_FILES[1]).exists()
    arguments = command[3:]
    assert cli.main([*arguments, str(cut)]) == cli.main([*arguments, str(whole)]) == 0
    assert weights(cut) == weights(whole)
    assert TrainedAdapter.load(cut) == TrainedAdapter.load(whole)
    assert (whole / "curves.png").read_bytes()[1:4] == b"PNG"


def test_steps_count_their_tokens_and_seconds(
    model_path: str, recording: Recording, tmp_path: Path
) -> None:
    seen: list[tuple[int, float]] = []

    def note(state: TrainState) -> None:
        seen.append((state.num_tokens, state.seconds))

    train(model_path, recording, replace(SETTINGS, epochs=2), tmp_path, note)
    num_tokens = sum(example.num_tokens for example in examples_of(recording)["train"])
    assert seen[-1][0] == 2 * num_tokens and seen == sorted(seen) and seen[-1][1] > 0


def test_what_is_done_is_not_done_again(
    model_path: str, recording: Recording, tmp_path: Path
) -> None:
    settings = replace(SETTINGS, epochs=1)
    done = train(model_path, recording, settings, tmp_path)
    before = weights(tmp_path)
    assert train(model_path, recording, settings, tmp_path, lambda _: pytest.fail()) == done
    assert weights(tmp_path) == before


# -- the parts -----------------------------------------------------------------------------------


def test_several_runs_in_one_packing_are_as_each_alone(
    model_path: str, recording: Recording
) -> None:
    model = PackedModel(load(Path(model_path)))
    examples = examples_of(recording)["train"][:5]
    with torch.no_grad():
        together = trained_logprobs(model, concat_examples(examples)[0])
        alone = [trained_logprobs(model, pack(example.calls)) for example in examples]
    torch.testing.assert_close(together, torch.cat(alone), rtol=0, atol=1e-5)


def test_groups_keep_the_order_and_the_limit(recording: Recording) -> None:
    examples = examples_of(recording)["train"]
    for limit in (1, 100, 123, 10**6):
        groups = list(packed_together(examples, limit))
        assert [e for group in groups for e in group] == examples
        sizes = [sum(e.num_tokens for e in group) for group in groups]
        assert all(size <= limit or len(g) == 1 for size, g in zip(sizes, groups, strict=True))
    assert len(groups) == 1


def test_every_epoch_sees_every_run_once_in_an_order_of_its_own() -> None:
    epochs = [order(11, 4, seed, epoch) for seed in (0, 1) for epoch in (0, 1)]
    for batches in epochs:
        assert [len(batch) for batch in batches] == [4, 4, 3]
        assert sorted(sum(batches, [])) == list(range(11))
    assert len({str(batches) for batches in epochs}) == 4


def test_the_rest_counts_as_one_token(model_path: str, recording: Recording) -> None:
    """With the whole vocabulary it is the divergence; with less of it, less."""
    model = adapted_model(model_path, SETTINGS)
    packing, _ = concat_examples(examples_of(recording)["development"])
    text = text_logprobs(model, packing)
    with torch.no_grad():
        logprobs = trained_logprobs(model, packing, adapted_calls(packing, "prefill"))
    whole = float(divergence(logprobs, text))
    found = []
    for k in (text.shape[1], 300, 64, 8, 1):
        values, ids = text.topk(k, dim=1)
        found.append(float(likeliest_divergence(logprobs, Teacher(ids, values))))
    assert found[0] == pytest.approx(whole, abs=1e-4) and whole > 0.1
    assert found == sorted(found, reverse=True) and found[-1] > 0


def test_a_teacher_that_was_not_recorded_is_made(
    model_path: str, recording: Recording, tmp_path: Path
) -> None:
    """From the same text: what the recorder wrote, but for rounding."""
    model = adapted_model(model_path, SETTINGS)
    for example in examples_of(recording)["development"]:
        recorded = example.teacher
        made = taught(model, replace(example, teacher=None)).teacher
        assert recorded is not None and made is not None
        k = recorded.token_ids.shape[1]
        torch.testing.assert_close(made.logprobs[:, :k], recorded.logprobs, rtol=0, atol=1e-4)
    silent = record_runs(tmp_path / "recorded", Path(model_path), 10, num_likeliest=0)
    settings = replace(SETTINGS, epochs=1)
    done = train(model_path, Recording.load(silent), settings, tmp_path / "out")
    assert done.curves["development"][-1][1] > 0


# -- what is refused -----------------------------------------------------------------------------


def _edited(recorded: Path, folder: Path, change: Callable[[dict[str, Any]], Any]) -> Recording:
    """The recording with every run changed."""
    shutil.copytree(recorded, folder)
    for path in folder.rglob("0*.json"):
        path.write_text(json.dumps(change(json.loads(path.read_text()))))
    return Recording.load(folder)


def _silent(data: dict[str, Any]) -> dict[str, Any]:
    return {**data, "steps": data["steps"][:-1], "likeliest": None}


def _foreign(data: dict[str, Any]) -> dict[str, Any]:
    first = {**data["steps"][0], "token_ids": [512] * 8}
    return {**data, "steps": [first, *data["steps"][1:]]}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda data: {**data, "mode": "choreo"}, r"0000\d.json: .*mode baseline or exact"),
        (_silent, r"0000\d.json: .*without outputs"),
        (_foreign, r"0000\d.json: the model has 512 tokens"),
    ],
)
def test_runs_that_cannot_be_learnt_from(
    model_path: str,
    recorded: Path,
    tmp_path: Path,
    change: Callable[[dict[str, Any]], Any],
    said: str,
) -> None:
    edited = _edited(recorded, tmp_path / "edited", change)
    with pytest.raises(ChoreoError, match=said):
        train(model_path, edited, SETTINGS, tmp_path / "out")


def _without_prefills(data: dict[str, Any]) -> dict[str, Any]:
    """Every message is generated, as in a workflow whose agents read one another alone."""
    last = data["steps"][-1]
    alone = {**last, "parents": []}
    return {**data, "steps": [alone], "likeliest": None}


def test_a_writer_where_every_call_generates(
    model_path: str, recorded: Path, tmp_path: Path
) -> None:
    edited = _edited(recorded, tmp_path / "edited", _without_prefills)
    with pytest.raises(ChoreoError, match="no call of these runs uses a prefill adapter"):
        train(model_path, edited, replace(SETTINGS, placement="prefill"), tmp_path / "out")


@pytest.mark.parametrize("part", ["train", "development"])
def test_a_part_without_runs(model_path: str, recorded: Path, tmp_path: Path, part: str) -> None:
    shutil.copytree(recorded, tmp_path / "edited")
    shutil.rmtree(tmp_path / "edited" / part)
    with pytest.raises(ChoreoError, match=f"'{part}' has no runs"):
        train(model_path, Recording.load(tmp_path / "edited"), SETTINGS, tmp_path / "out")


def test_another_model_or_tokenizer(
    tiny_model_path: Callable[[str], Path], recorded: Path, tmp_path: Path
) -> None:
    with pytest.raises(ChoreoError, match="recorded with another model or tokenizer"):
        train(str(tiny_model_path("llama3")), Recording.load(recorded), SETTINGS, tmp_path / "out")
    shutil.copytree(recorded, tmp_path / "edited")
    about = json.loads((recorded / RECORD).read_text())
    about["base"]["tokenizer"] = "another"
    (tmp_path / "edited" / RECORD).write_text(json.dumps(about))
    model = shutil.copytree(tiny_model_path("llama"), tmp_path / "model")
    (model / "tokenizer.json").write_text("{}")
    with pytest.raises(ChoreoError, match="recorded with another model or tokenizer"):
        train(str(model), Recording.load(tmp_path / "edited"), SETTINGS, tmp_path / "out")


def test_a_folder_that_holds_something_else(
    model_path: str, recorded: Path, tmp_path: Path
) -> None:
    recording = Recording.load(recorded)
    settings = replace(SETTINGS, epochs=1)
    train(model_path, recording, settings, tmp_path / "done")
    with pytest.raises(Killed):
        train(model_path, recording, settings, tmp_path / "begun", _kill)
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "todo.txt").write_text("mine")
    other = _edited(recorded, tmp_path / "edited", lambda data: {**data, "seconds": 1.0})
    for name in ("done", "begun"):
        with pytest.raises(ChoreoError, match="a training with other data"):
            train(model_path, other, settings, tmp_path / name)
        with pytest.raises(ChoreoError, match="a training with other settings"):
            train(model_path, recording, replace(settings, seed=1), tmp_path / name)
    with pytest.raises(ChoreoError, match="holds something else"):
        train(model_path, recording, settings, tmp_path / "notes")
    (tmp_path / "begun" / CHECKPOINT).write_bytes(b"half")
    with pytest.raises(ChoreoError, match="cannot be read"):
        train(model_path, recording, settings, tmp_path / "begun")


@pytest.mark.parametrize(("former", "word"), [("writer", "prefill"), ("reader", "decode")])
def test_a_former_placement_is_the_same_training(tmp_path: Path, former: str, word: str) -> None:
    """On the command line, in settings, and in a checkpoint of before."""
    parser = argparse.ArgumentParser()
    command(parser)
    with pytest.warns(DeprecationWarning, match=f'"{former}" is called "{word}" now'):
        args = parser.parse_args(["recorded", "--placement", former])
    assert args.placement == word
    with pytest.warns(DeprecationWarning, match=former):
        assert TrainSettings(former) == TrainSettings(word)
    save_checkpoint(tmp_path, {"settings": {"placement": former}}, {"step": 1})
    with pytest.warns(DeprecationWarning, match=former):
        assert load_checkpoint(tmp_path, {"settings": {"placement": word}}) == {"step": 1}


def _kill(progress: TrainState) -> None:
    raise Killed


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"placement": "editor"}, "placement must be one of"),
        ({"loss": "mse"}, "loss must be one of"),
        ({"rank": 0}, "rank must be at least 1"),
        ({"learning_rate": math.nan}, "learning_rate must be above 0"),
        ({"dropout": 1.0}, "dropout must be from 0"),
        ({"targets": ()}, "targets must name"),
        ({"schedule": "steep"}, "schedule must be one of"),
        ({"device": "tpu"}, "device must be one of"),
    ],
)
def test_settings_that_are_none(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ChoreoError, match=said):
        replace(SETTINGS, **given)


def test_layers_that_the_model_does_not_have(
    model_path: str, recording: Recording, tmp_path: Path
) -> None:
    with pytest.raises(ChoreoError, match="query_key_value"):
        settings = replace(SETTINGS, targets=("query_key_value",))
        train(model_path, recording, settings, tmp_path)
    with pytest.raises(ChoreoError, match="transformers does not load it"):
        empty = tmp_path / "model"
        empty.mkdir()
        train(str(empty), recording, SETTINGS, tmp_path / "out")
