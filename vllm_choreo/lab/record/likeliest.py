# SPDX-License-Identifier: Apache-2.0
"""The likeliest tokens at every token that a run generated, which a student is to match."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from msgspec import Struct

from vllm_choreo.transcript.check import check_form
from vllm_choreo.transcript.transcript import Transcript

_DIGITS = 6  # of a log-probability


class _Form(Struct):
    token_ids: list[list[int]]
    logprobs: list[list[float]]


@dataclass(frozen=True)
class Likeliest:
    """The likeliest tokens at each generated token of a transcript, call after call.

    Attributes:
        token_ids: `[num_generated][k]`, the likeliest first.
        logprobs: natural log-probabilities of these tokens.
    """

    token_ids: tuple[tuple[int, ...], ...]
    logprobs: tuple[tuple[float, ...], ...]

    def to_json(self) -> dict[str, Any]:
        """Plain data; log-probabilities with six digits after the point."""
        logprobs = [[round(value, _DIGITS) for value in row] for row in self.logprobs]
        return {"token_ids": [list(row) for row in self.token_ids], "logprobs": logprobs}

    @classmethod
    def from_json(cls, data: Mapping[str, Any], transcript: Transcript) -> Likeliest:
        """Read the data of `to_json`.

        Raises:
            ValueError: the data have another form, or do not fit to the transcript.
        """
        check_form(data, _Form, "likeliest")
        ids, logprobs = (tuple(map(tuple, data[name])) for name in ("token_ids", "logprobs"))
        num = sum(len(step.message.generated_token_ids) for step in transcript.steps)
        if (
            len(ids) != num
            or [*map(len, ids)] != [*map(len, logprobs)]
            or len({*map(len, ids)}) > 1
        ):
            raise ValueError(f"likeliest must hold as many tokens for each of the {num} generated")
        return cls(ids, logprobs)


def likeliest_of(transcript: Transcript) -> Likeliest | None:
    """The likeliest tokens of a run whose calls asked for `logprobs`; None: some call did not."""
    rows: list[Mapping[int, Any]] = []
    for step in transcript.decodes():
        if not step.message.logprobs:
            return None
        rows += step.message.logprobs
    if not rows:
        return None
    ranked = [_ranked(row) for row in rows]
    # The sampled token comes along where it is none of them.
    num = min(map(len, ranked))
    ids = tuple(tuple(token for token, _ in row[:num]) for row in ranked)
    return Likeliest(ids, tuple(tuple(value for _, value in row[:num]) for row in ranked))


def _ranked(row: Mapping[int, Any]) -> Sequence[tuple[int, float]]:
    return sorted(
        ((token, entry.logprob) for token, entry in row.items()), key=lambda pair: -pair[1]
    )
