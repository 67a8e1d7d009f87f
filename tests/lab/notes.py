# SPDX-License-Identifier: Apache-2.0
"""A choreography that only takes notes: a token is a character, answers are given beforehand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import bfcl_eval

from vllm_choreo.semantics.message import Message, Metrics, Usage
from vllm_choreo.semantics.naming import ParentSpan
from vllm_choreo.transcript.transcript import Transcript

# A user's requests, which BFCL's package has; none are made.
REQUESTS = Path(bfcl_eval.__path__[0], "data", "BFCL_v4_multi_turn_base.json")
# Arguments for tiny models, whose tokenizers have no template.
CHATML = ("--chat-template", str(Path(__file__).with_name("chatml.jinja")))


class Notes:
    """A `Facade` (vllm_choreo.api.protocol); answers the `replies` in turn, then "…".

    Attributes:
        batches: how many calls each decode made.
        sampling: sampling parameters by message id.
        places: (offsets, new_offset) by message id.

    The clock ticks once per call or list of calls: this is when its messages were submitted.
    """

    def __init__(self, *replies: str, mode: str = "choreo") -> None:
        self.mode = mode
        self.replies = list(replies)
        self.batches: list[int] = []
        self.sampling: dict[str, Any] = {}
        self.places: dict[str, Any] = {}
        self.count = 0
        self.clock = 0

    def prefill(self, tokens: Any, **options: Any) -> Any:
        many = isinstance(tokens, list)
        items = [{**options, **i} for i in tokens] if many else [{"tokens": tokens, **options}]
        messages = [self._message(item["tokens"], item, "") for item in items]
        self.clock += 1
        return messages if many else messages[0]

    def decode(self, header: Any, **options: Any) -> Any:
        many = isinstance(header, list)
        items = [{**options, **i} for i in header] if many else [{"header": header, **options}]
        self.batches.append(len(items))
        messages = []
        for item in items:
            params = item.get("sampling_params", options.get("sampling_params"))
            message = self._message(item["header"], item, self._reply(params))
            self.sampling[message.id] = params
            messages.append(message)
        self.clock += 1
        return messages if many else messages[0]

    def free(self, *messages: Any) -> None:
        """Nothing is kept."""

    def _reply(self, params: Any) -> str:
        extra = (params and params.extra_args) or {}
        if "forced_tokens" in extra:
            return "".join(map(chr, extra["forced_tokens"]))
        return self.replies.pop(0) if self.replies else "…"

    def _message(self, given: Any, item: Any, reply: str) -> Message:
        self.count += 1
        text = given if isinstance(given, str) else "".join(map(chr, given))
        parents = tuple(ParentSpan(parent.id) for parent in item.get("parents") or ())
        message = Message(
            id=f"m{self.count}",
            text=text + reply,
            token_ids=tuple(map(ord, text + reply)),
            num_tokens=len(text + reply),
            position=0,
            parents=parents,
            generated_text=reply,
            generated_token_ids=tuple(map(ord, reply)),
            logprobs=None,
            finish_reason="stop" if reply else None,
            usage=Usage(True, 0, 0, len(text + reply)),
            metrics=Metrics(float(self.clock), None, 0.0, 0.0),
            role=item.get("role"),
        )
        self.places[message.id] = (item.get("offsets"), item.get("new_offset"))
        return message


def problems_of(workflow: str) -> tuple[str, ...]:
    """Arguments that give a workflow its problems, where none are made for it."""
    return ("--data", str(REQUESTS)) if workflow == "function_calls" else ()


def reads(transcript: Transcript, stage: str, author: str) -> list[str]:
    """What a call read, as "stage/author" of each parent."""
    names = {step.message.id: f"{step.stage}/{step.author}" for step in transcript.steps}
    return [names[span.id] for span in message(transcript, stage, author).parents]


def message(transcript: Transcript, stage: str, author: str) -> Message:
    (step,) = (s for s in transcript.steps if (s.stage, s.author) == (stage, author))
    return step.message
