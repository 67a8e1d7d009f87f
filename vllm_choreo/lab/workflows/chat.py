# SPDX-License-Identifier: Apache-2.0
"""Chat turns as pieces of text, each a message of its own; see `ChatTurns`.

The functions write ChatML (SmolLM2, Qwen and others). A workflow writes the turns of the model that
it runs on, see `open_chat`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from vllm_choreo.api.facade_wrapper import FacadeWrapper, Item
from vllm_choreo.api.protocol import Facade
from vllm_choreo.chat.turns import ChatTurns
from vllm_choreo.semantics.message import Message
from vllm_choreo.transcript.transcript import Step, Transcript

# Texts around turns as a workflow is given them: None is ChatML, a mapping is `ChatTurns.to_json`.
Turns: TypeAlias = ChatTurns | Mapping[str, Any] | None

CHATML = ChatTurns()
system, user, assistant, restated = (
    CHATML.system,
    CHATML.user,
    CHATML.assistant,
    CHATML.restated,
)


def turns_of(turns: Turns) -> ChatTurns:
    """The texts around turns that a workflow is given.

    Raises:
        ChoreoError: a mapping has other texts than `ChatTurns`.
    """
    if turns is None:
        return CHATML
    return turns if isinstance(turns, ChatTurns) else ChatTurns.from_json(turns)


def open_chat(
    workflow: str,
    c: Facade,
    inputs: dict[str, Any],
    turns: Turns,
    on_step: Callable[[Step], None] | None,
) -> tuple[Facade, ChatTurns, Transcript]:
    """Begin a run of a workflow: its transcript, and the text that begins every conversation.

    That text, a BOS token for example, is encoded once; every call reads it before all else.

    Args:
        workflow: the name of its function.
        inputs: the arguments of the function, but for `c`, `turns` and `on_step`.

    Returns:
        The facade whose calls read that text, the texts around turns, and the transcript.
    """
    chat = turns_of(turns)
    if chat != CHATML:
        inputs = {**inputs, "turns": chat.to_json()}
    log = Transcript(workflow, c.mode, inputs, on_step)
    if chat.start:
        c = _Started(c, log.add("start", "start", c.prefill(chat.start, role="start")))
    return c, chat, log


class _Started(FacadeWrapper):
    """A `Facade` on `c` whose calls read a message before all others."""

    def __init__(self, c: Facade, start: Message) -> None:
        super().__init__(c)
        self._start = start

    def _prefill(self, calls: list[Item]) -> Sequence[Message]:
        return super()._prefill([self._behind_start(call) for call in calls])

    def _decode(self, calls: list[Item]) -> Sequence[Message]:
        return super()._decode([self._behind_start(call) for call in calls])

    def _behind_start(self, call: Item) -> Item:
        """The call behind the start: what it says of positions counts from the start's end on."""
        length = self._start.num_tokens
        moved: Item = {"parents": [self._start, *(call.get("parents") or ())]}
        if call.get("offsets") is not None:
            offsets = [None if at is None else at + length for at in call["offsets"]]
            moved["offsets"] = [0, *offsets]
        if call.get("new_offset") is not None:
            moved["new_offset"] = call["new_offset"] + length
        return {**call, **moved}
