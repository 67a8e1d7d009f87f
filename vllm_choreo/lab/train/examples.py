# SPDX-License-Identifier: Apache-2.0
"""Recorded runs as examples: their calls and the text's distributions; several in one packing."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch

from vllm_choreo.errors import ChoreoError
from vllm_choreo.lab.record.likeliest import Likeliest
from vllm_choreo.lab.record.recording import RecordedRun, Recording
from vllm_choreo.lab.train.forward import PackedModel
from vllm_choreo.lab.train.loss import Teacher, text_logprobs
from vllm_choreo.lab.train.packing import PackedCall, Packing, pack
from vllm_choreo.lab.train.pieces import ContentCutter, pieces_of
from vllm_choreo.lab.train.recorded import calls_of, check_recorded_as_text
from vllm_choreo.trained_adapter import uses_adapter

_NEEDED = ("train", "development")
_NUM_LIKELIEST = 64  # of a text's tokens, where the recording has none


@dataclass(frozen=True)
class Example:
    """One recorded run to learn from.

    Attributes:
        name: name of its file, with the part.
        calls: all calls, as if choreographed.
        teacher: the text's distribution at every generated token; None: not recorded.
    """

    name: str
    calls: tuple[PackedCall, ...]
    teacher: Teacher | None = None

    @property
    def num_tokens(self) -> int:
        return sum(len(call.token_ids) for call in self.calls)


def examples_of(
    recording: Recording, cutter: ContentCutter | None = None
) -> dict[str, list[Example]]:
    """The examples of each part.

    Args:
        cutter: cuts the recorded texts into pieces, see `pieces_of`; None: calls read messages as
            they were recorded.

    Raises:
        ChoreoError: a part that training needs is empty, or a run cannot be learnt from.
    """
    for part in _NEEDED:
        if not recording.parts[part]:
            raise ChoreoError(
                f"the part {part!r} has no runs: record more of them, or with other shares",
                parameter="recorded",
                value=part,
            )
    return {part: [_example(run, cutter) for run in runs] for part, runs in recording.parts.items()}


def _example(run: RecordedRun, cutter: ContentCutter | None) -> Example:
    with _named(run.name):
        check_recorded_as_text(run.transcript)
        calls = tuple(pieces_of(run.transcript, cutter) if cutter else calls_of(run.transcript))
    return Example(run.name, calls, _teacher(run.likeliest))


def _teacher(likeliest: Likeliest | None) -> Teacher | None:
    if likeliest is None:
        return None
    return Teacher(torch.tensor(likeliest.token_ids), torch.tensor(likeliest.logprobs))


def check_examples(model: PackedModel, examples: Iterable[Example]) -> None:
    """Check that the model has every token and position of the examples.

    Raises:
        ChoreoError: an example has a token or a position that the model lacks; names the example.
    """
    for example in examples:
        with _named(example.name):
            model.check(pack(example.calls))


def check_placement(examples: Iterable[Example], placement: str) -> None:
    """Check that some call would use an adapter of this placement.

    Raises:
        ChoreoError: no call would, so none can learn.
    """
    calls = (call for example in examples for call in example.calls)
    if not any(uses_adapter(placement, call.is_decode) for call in calls):
        raise ChoreoError(
            f"no call of these runs uses a {placement} adapter, for all of them generate: train "
            "with placement decode or both",
            parameter="placement",
            value=placement,
        )


@contextmanager
def _named(name: str) -> Iterator[None]:
    """Prefix errors with the name of the run that they are about."""
    try:
        yield
    except ChoreoError as error:
        raise type(error)(
            f"{name}: {error.message}", parameter=error.parameter, value=error.value
        ) from error


def taught(model: PackedModel, example: Example) -> Example:
    """The example with its teacher; where none was recorded, the base model reads the text now."""
    if example.teacher is not None:
        return example
    logprobs = text_logprobs(model, pack(example.calls).to(model.device))
    values, ids = logprobs.topk(min(_NUM_LIKELIEST, logprobs.shape[1]), dim=1)
    return replace(example, teacher=Teacher(ids.cpu(), values.cpu()))


def concat_examples(examples: Sequence[Example]) -> tuple[Packing, Teacher | None]:
    """Several examples in one packing; no call of one reads those of another."""
    calls: list[PackedCall] = []
    for example in examples:
        first = len(calls)
        for call in example.calls:
            parents = tuple(replace(span, call=span.call + first) for span in call.parents)
            calls.append(replace(call, parents=parents))
    teachers = [example.teacher for example in examples if example.teacher is not None]
    return pack(calls), Teacher.concat(teachers) if len(teachers) == len(examples) else None


def packed_together(examples: Sequence[Example], pack_tokens: int) -> Iterator[list[Example]]:
    """Examples in their order, cut where one more would exceed `pack_tokens`."""
    group: list[Example] = []
    for example in examples:
        if group and sum(e.num_tokens for e in group) + example.num_tokens > pack_tokens:
            yield group
            group = []
        group.append(example)
    if group:
        yield group


def order(num_examples: int, batch: int, seed: int, epoch: int) -> list[list[int]]:
    """Numbers of the examples of every batch of an epoch, determined by the arguments alone."""
    generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
    numbers = torch.randperm(num_examples, generator=generator).tolist()
    return [numbers[start : start + batch] for start in range(0, num_examples, batch)]


def counts(examples: Mapping[str, Sequence[Example]]) -> dict[str, int]:
    """Number of examples of each part."""
    return {part: len(listed) for part, listed in examples.items()}
