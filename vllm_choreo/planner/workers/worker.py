# SPDX-License-Identifier: Apache-2.0
"""Protocol of workers, and the answers that they give."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from vllm_choreo.chat.turns import ChatTurns
from vllm_choreo.planner.logical.values import CHATML, PromptTurns

DEFAULT_WIDTH = 16  # calls of one worker at a time: vLLM's default batch on a CPU is larger


class HeldMessage(Protocol):
    """Handle of a message that a worker holds."""

    @property
    def id(self) -> str: ...

    @property
    def num_tokens(self) -> int: ...


ReadMessage = HeldMessage | tuple[HeldMessage, int, int]  # whole, or `(message, start, stop)`
Uri = str | Path  # of a folder with saved messages; over HTTP a name


@dataclass(frozen=True)
class Answer:
    """Answer to a call.

    Attributes:
        text: the generated text.
        num_out: tokens generated.
        num_prompt: tokens of parents and header.
        reused: tokens of these that were not encoded for this call.
        message: handle of the worker's message; None: there is none.
        span: (start, stop) of the generated tokens in the message, without the one that ended
            them; None: it cannot be read.
        token_ids: tokens of the span.
        exact: `Usage.exact` of the call.
        parents: parents of the call, as they were passed to it.
        beside: messages that were encoded for this call alone.
    """

    text: str
    num_out: int
    num_prompt: int
    reused: int
    message: HeldMessage | None = None
    span: tuple[int, int] | None = None
    token_ids: tuple[int, ...] = ()
    exact: bool = True
    parents: tuple[ReadMessage, ...] = ()
    beside: tuple[HeldMessage, ...] = ()

    def messages(self) -> list[HeldMessage]:
        """Messages that are freed with the answer."""
        return [*self.beside, *([] if self.message is None else [self.message])]


class Worker(Protocol):
    """A worker, which answers calls.

    Attributes:
        width: calls that it takes at a time.
        reads_messages: True if it reads prompts as messages, False if as text alone.
        min_moved_tokens: answers of fewer tokens are not worth moving from or to it as keys and
            values; infinite where they cannot be moved.
        identity: model on which answers depend besides the call, for JSON; None: it is not known.
        turns: texts around a chat's turns, as the model's template writes them; None: not known.
    """

    width: int
    reads_messages: bool
    min_moved_tokens: float

    @property
    def identity(self) -> object: ...

    @property
    def turns(self) -> PromptTurns | None: ...

    async def prefill(
        self, text: str, parents: Sequence[ReadMessage], exact: bool
    ) -> HeldMessage: ...

    async def decode(
        self, header: str, parents: Sequence[ReadMessage], exact: bool, sampling: Mapping[str, Any]
    ) -> Answer: ...

    async def pin(self, messages: Sequence[HeldMessage]) -> None: ...

    async def free(self, messages: Sequence[HeldMessage]) -> None: ...

    async def tokenize(self, text: str) -> tuple[int, ...] | None: ...

    # Given by a worker and taken by one of its kind: files, or a reference to them.
    async def give(self, message: HeldMessage) -> Any: ...

    async def take(self, given: Any) -> HeldMessage: ...

    async def save(self, messages: Sequence[HeldMessage], uri: Uri) -> None: ...

    async def load(self, uri: Uri) -> list[tuple[tuple[str, ...], HeldMessage]]: ...


def turns_of(worker: Worker, given: PromptTurns | None) -> PromptTurns:
    """Return the given texts around a chat's turns, else those of a worker's model, else ChatML."""
    found = given or getattr(worker, "turns", None) or CHATML
    return CHATML if found == ChatTurns() else found  # which has turns of tools, too
