# SPDX-License-Identifier: Apache-2.0
"""Train an adapter on recorded runs: epochs, early stopping, checkpoints, one folder out."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

from vllm_choreo.errors import ChoreoError
from vllm_choreo.lab.record.recording import Recording
from vllm_choreo.lab.train.checkpoint import (
    FILE_NAME,
    check_identity,
    load_checkpoint,
    save_checkpoint,
)
from vllm_choreo.lab.train.examples import (
    Example,
    check_examples,
    check_placement,
    counts,
    examples_of,
    order,
    taught,
)
from vllm_choreo.lab.train.forward import PackedModel
from vllm_choreo.lab.train.pieces import ContentCutter
from vllm_choreo.lab.train.settings import TrainSettings
from vllm_choreo.lab.train.training import Training, adapted_model
from vllm_choreo.trained_adapter import FILE_NAME as ADAPTER_FILE
from vllm_choreo.trained_adapter import ModelIdentity, TrainedAdapter

CHECKPOINT_SECONDS = 60.0
_PACKAGES = ("torch", "transformers", "peft")


@dataclass
class TrainState:
    """Progress of a training.

    Attributes:
        num_steps: steps of the optimiser, if the training does not end early.
        step: steps that are done.
        curves: "train" and "development", lists of `[step, nats per token]`.
        best: development loss of the best weights.
        worse: evaluations since the best one.
        num_tokens: tokens that the steps have read, whether they are trained on or not.
        seconds: time that the steps took, evaluations not included.
    """

    num_steps: int
    step: int = 0
    curves: dict[str, list[list[float]]] = field(
        default_factory=lambda: {"train": [], "development": []}
    )
    best: float = math.inf
    worse: int = 0
    num_tokens: int = 0
    seconds: float = 0.0


def train(
    model: str,
    recording: Recording,
    settings: TrainSettings,
    out: Path,
    on_step: Callable[[TrainState], None] | None = None,
    checkpoint_seconds: float = CHECKPOINT_SECONDS,
) -> TrainedAdapter:
    """Train an adapter; where the same was begun before, go on from there.

    Args:
        model: folder or name of the base model, the one that recorded.
        recording: runs of the workflow that the adapter is for.
        out: folder of the adapter; is made.
        on_step: called after each step and each evaluation.
        checkpoint_seconds: least time between two checkpoints, but for those at evaluations.

    Returns:
        The adapter in `out`, with the weights that had the smallest development loss.

    Raises:
        ChoreoError: the recording does not suit the model or cannot be learnt from, the model
            cannot be choreographed, or `out` holds something else.
    """
    base = ModelIdentity.of(model)
    if not base.same_as(recording.base):
        raise ChoreoError(
            f"the runs were recorded with another model or tokenizer, {recording.base.name}: train "
            "that one, or record again",
            parameter="model",
            value=model,
        )
    identity = _identity(base, recording, settings)
    if (done := _finished(out, identity)) is not None:
        return done
    is_cut = settings.cut == "content"
    examples = examples_of(
        recording, ContentCutter.of(model, settings.cut_tokens) if is_cut else None
    )
    check_placement(examples["train"], settings.placement)
    state = load_checkpoint(out, identity)
    packed = adapted_model(model, settings)
    check_examples(packed, [*examples["train"], *examples["development"]])
    if settings.loss == "kl":
        examples = {part: [taught(packed, e) for e in listed] for part, listed in examples.items()}
    loop = _Loop(packed, settings, examples, out, identity, on_step, checkpoint_seconds)
    loop.run(state)
    adapter = TrainedAdapter(
        placement=settings.placement,
        base=base,
        loss=settings.loss,
        data={"digest": recording.digest, "mode": recording.mode, **counts(examples)},
        settings=identity["settings"],
        seeds={"seed": settings.seed},
        versions=identity["versions"],
        curves=loop.progress.curves,
    )
    packed.model.save_pretrained(str(out))
    adapter.save(out)
    (out / FILE_NAME).unlink(missing_ok=True)
    return adapter


class _Loop:
    """Steps and evaluations in their order, from any progress on."""

    def __init__(
        self,
        model: PackedModel,
        settings: TrainSettings,
        examples: Mapping[str, Sequence[Example]],
        out: Path,
        identity: Mapping[str, Any],
        on_step: Callable[[TrainState], None] | None,
        checkpoint_seconds: float,
    ) -> None:
        self._settings = settings
        self._examples = examples
        self._per_epoch = math.ceil(len(examples["train"]) / settings.batch)
        self.progress = TrainState(self._per_epoch * settings.epochs)
        self._training = Training(model, settings, self.progress.num_steps)
        self._best = self._training.snapshot()
        self._out, self._identity = out, identity
        self._on_step = on_step or (lambda progress: None)
        self._pause, self._saved = checkpoint_seconds, time.monotonic()

    def run(self, state: Mapping[str, Any] | None) -> None:
        """Train until the last epoch or until patience ends, then set the best weights."""
        progress = self.progress
        if state is None:
            self._evaluate()
        else:
            self._training.set_state(state["training"])
            self._best = state["best"]
            vars(progress).update(state["standing"])
            self._on_step(progress)
        while progress.step < progress.num_steps and progress.worse < self._settings.patience:
            batch, began = self._next_batch(), time.perf_counter()
            loss = self._training.step(batch)
            progress.seconds += time.perf_counter() - began
            progress.num_tokens += sum(example.num_tokens for example in batch)
            progress.step += 1
            progress.curves["train"].append([progress.step, loss])
            if self._is_time_to_evaluate():
                self._evaluate()
            elif time.monotonic() - self._saved >= self._pause:
                self._save()
            self._on_step(progress)
        self._training.restore(self._best)

    def _next_batch(self) -> list[Example]:
        epoch, number = divmod(self.progress.step, self._per_epoch)
        runs = self._examples["train"]
        batches = order(len(runs), self._settings.batch, self._settings.seed, epoch)
        return [runs[i] for i in batches[number]]

    def _is_time_to_evaluate(self) -> bool:
        """Return whether this step ends one of the `evaluations` equal parts of an epoch."""
        number = self.progress.step % self._per_epoch or self._per_epoch
        parts = [i * self._settings.evaluations // self._per_epoch for i in (number - 1, number)]
        return parts[0] != parts[1]

    def _evaluate(self) -> None:
        progress = self.progress
        loss = self._training.evaluate(self._examples["development"])
        progress.curves["development"].append([progress.step, loss])
        if loss < progress.best:
            progress.best, progress.worse = loss, 0
            self._best = self._training.snapshot()
        else:
            progress.worse += 1
        self._save()

    def _save(self) -> None:
        state = {
            "training": self._training.state(),
            "best": self._best,
            "standing": asdict(self.progress),
        }
        save_checkpoint(self._out, self._identity, state)
        self._saved = time.monotonic()


def _identity(base: ModelIdentity, recording: Recording, settings: TrainSettings) -> dict[str, Any]:
    """All that the result depends on, as plain data."""
    plain = {**asdict(settings), "targets": list(settings.targets)}
    if settings.cut == "messages":  # as before there was a choice
        del plain["cut"], plain["cut_tokens"]
    return {
        "model": [base.weights, base.tokenizer],
        "data": recording.digest,
        "settings": plain,
        "versions": {name: version(name) for name in _PACKAGES},
    }


def _finished(out: Path, identity: Mapping[str, Any]) -> TrainedAdapter | None:
    """The adapter that was trained in a folder before, or None; makes the folder.

    Raises:
        ChoreoError: the folder holds something else.
    """
    if (out / ADAPTER_FILE).exists():
        done = TrainedAdapter.load(out)
        found = {
            "model": [done.base.weights, done.base.tokenizer],
            "data": done.data.get("digest"),
            "settings": done.settings,
            "versions": done.versions,
        }
        check_identity(out, found, identity)
        return done
    try:
        out.mkdir(parents=True, exist_ok=True)
        is_empty = all(path.suffix == ".part" for path in out.iterdir())
    except OSError as error:
        raise ChoreoError(f"cannot use the folder {out}: {error.strerror}") from error
    if not is_empty and not (out / FILE_NAME).exists():
        raise ChoreoError(
            "the folder holds something else: choose another", parameter="out", value=str(out)
        )
    return None
