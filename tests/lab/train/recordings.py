# SPDX-License-Identifier: Apache-2.0
"""Recordings of a tiny model: a real facade of text alone, sampled from the model's own logits."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from tests.engine.oracle import random_tokens
from tests.lab.train.packings import load
from vllm_choreo.chat.turns import ChatTurns
from vllm_choreo.lab.record.recording import Recorder
from vllm_choreo.semantics.message import Message, Metrics, Usage
from vllm_choreo.semantics.naming import ParentSpan
from vllm_choreo.testing.models.tiny import EOS_TOKEN_ID as END
from vllm_choreo.trained_adapter import ModelIdentity
from vllm_choreo.transcript.transcript import Transcript

# Tokens that begin the turns of a tiny model's chats, and how they are written.
SYSTEM, USER, ASSISTANT = 5, 6, 7
TURNS = ChatTurns(
    system_opening=f"t{SYSTEM} ",
    system_closing=f" t{END} ",
    user_opening=f"t{USER} ",
    user_closing=f" t{END} ",
    answer=f"t{ASSISTANT} ",
)
NUM_GENERATED = 5


class Text:
    """Calls as text: what is read, then the header; tokens are sampled at temperature 1."""

    mode = "baseline"

    def __init__(self, model: Any, seed: int, num_likeliest: int) -> None:
        self._model = model
        self._num_likeliest = num_likeliest
        self._generator = torch.Generator().manual_seed(seed)
        self._count = 0

    def prefill(
        self, tokens: list[int], parents: list[Message] | None = None, text: str = "…"
    ) -> Message:
        return self._message(tokens, parents or [], [], [], text)

    @torch.no_grad()
    def decode(self, header: list[int], parents: list[Message]) -> Message:
        tokens = [token for parent in parents for token in parent.token_ids] + header
        generated: list[int] = []
        rows = []
        for _ in range(NUM_GENERATED):
            logits = self._model(torch.tensor([tokens + generated])).logits[0, -1]
            values, ids = logits.log_softmax(-1).topk(max(1, self._num_likeliest))
            pairs = zip(ids.tolist(), values.tolist(), strict=True)
            rows.append({token: SimpleNamespace(logprob=value) for token, value in pairs})
            drawn = torch.multinomial(logits.softmax(-1), 1, generator=self._generator)
            generated.append(int(drawn))
        return self._message(header, parents, generated, rows if self._num_likeliest else None)

    def _message(
        self,
        given: list[int],
        parents: list[Message],
        generated: list[int],
        logprobs: Any,
        text: str = "…",
    ) -> Message:
        self._count += 1
        tokens = (*given, *generated)
        return Message(
            id=f"s/{self._count}",
            text=text,
            token_ids=tokens,
            num_tokens=len(tokens),
            position=0,
            parents=tuple(ParentSpan(parent.id) for parent in parents),
            generated_text="…" if generated else "",
            generated_token_ids=tuple(generated),
            logprobs=logprobs,
            finish_reason="length" if generated else None,
            usage=Usage(True, 0, 0, len(tokens)),
            metrics=Metrics(0.0, None, 0.0, 0.0),
        )


def read_two(c: Text, rng: random.Random) -> Transcript:
    """A reader of two documents that were encoded behind one instruction."""
    log = Transcript("read_two", c.mode)
    first = log.add("all", "instruction", c.prefill(list(range(10, 18))))
    documents = [
        log.add("all", f"document {i}", c.prefill(random_tokens(rng, 12), [first]))
        for i in range(2)
    ]
    answer = c.decode(random_tokens(rng, 3), [first, *documents])
    log.add("all", "answer", answer)
    return log.finish([answer.generated_text])


def read_pasted(c: Text, rng: random.Random) -> Transcript:
    """A reader of 80 tokens of a user's turn behind a system's."""
    log = Transcript("read_pasted", c.mode, {"turns": TURNS.to_json()})
    system = [SYSTEM, *random_tokens(rng, 30), END]
    first = log.add("all", "instruction", c.prefill(system, text=f"t{SYSTEM} …"))
    header = [USER, *random_tokens(rng, 80), END, ASSISTANT]
    log.add("all", "answer", c.decode(header, [first]))
    return log.finish(["…"])


def record_runs(
    folder: Path,
    model_path: Path,
    num: int,
    num_likeliest: int = 16,
    program: Callable[[Text, random.Random], Transcript] = read_two,
) -> Path:
    """A folder of runs of a program."""
    model = load(model_path)
    recorder = Recorder(folder, ModelIdentity.of(model_path))
    for number in range(num):
        path = recorder.place([str(number)])
        log = program(Text(model, number, num_likeliest), random.Random(number))
        recorder.save(path, log, [str(number)])
    return folder
