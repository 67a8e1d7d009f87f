# SPDX-License-Identifier: Apache-2.0
"""Forecast of the tokens that `choreo_auto` would reuse of recorded chats, without an engine."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm_choreo.chat.cutter import Cutter
from vllm_choreo.chat.marks import marked
from vllm_choreo.chat.matching import ChatPlan, Matching, plan_chat
from vllm_choreo.chat.message_table import MessageTable
from vllm_choreo.chat.parts import Split
from vllm_choreo.chat.template import render_chat
from vllm_choreo.errors import ChoreoError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Chat = Sequence[Mapping[str, Any]]
_UNLIMITED = 2**62


@dataclass(frozen=True)
class SeenPart:
    """A part of a request.

    Attributes:
        role: role of its message; "": it has no text.
        messages: indices of the messages of the chat that it holds.
        num_tokens: its length.
        state: "new"; "same": known, behind the same parts as before; "moved": known, but encoded
            behind others. Where a part is "moved", mode "choreo" may answer otherwise than text.
    """

    role: str
    messages: tuple[int, ...]
    num_tokens: int
    state: str


@dataclass(frozen=True)
class Forecast:
    """Number of tokens that one request would reuse.

    Attributes:
        num_tokens: tokens of its prompt.
        prefix: tokens that vLLM's prefix cache holds, in whole blocks.
        exact: tokens that mode "exact" reuses.
        choreo: tokens that mode "choreo" reuses.
        parts: parts of the prompt; none: it is served as text.
        reason: the reason why there are none, or "".
    """

    num_tokens: int
    prefix: int
    exact: int
    choreo: int
    parts: tuple[SeenPart, ...]
    reason: str

    @property
    def may_differ(self) -> bool:
        """True if the answer of mode "choreo" may be another than that of the text."""
        return any(part.state == "moved" for part in self.parts)


class Forecaster:
    """Forecaster of recorded requests, all of one tenant, which follows them as a server would.

    Parts that mode "choreo" reads around an edit count as new.

    Args:
        tokenizer: tokenizer of the model, with its chat template.
        cutter: cuts its chats.
        block_size: tokens in a block of the engine's KV cache.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, cutter: Cutter, block_size: int = 16
    ) -> None:
        self._tokenizer = tokenizer
        self._cutter = cutter
        self._block_size = block_size
        self._book = MessageTable(_UNLIMITED, _UNLIMITED)
        self._count = 0
        self._texts: list[tuple[int, ...]] = []  # that vLLM's prefix cache has seen
        # Behind which messages each message is encoded: first of all, and by copies.
        self._first: dict[str, tuple[str, ...]] = {}
        self._chains: dict[str, set[tuple[str, ...]]] = {}

    def request(self, chat: Chat, answer: str | None, **rendering: object) -> Forecast:
        """Forecast the next request.

        Args:
            chat: its messages.
            answer: the answer that was given; None: it is not known.
            rendering: variables of the chat template, such as `tools`.

        Raises:
            ChoreoError: the template refuses the chat.
        """
        split = self._split(chat, True, rendering)
        plan = plan_chat(split, self._book, Matching(), lambda _: True, self._new_id)
        forecast = self._forecast(split, plan)
        self._made(plan)
        self._texts.append(split.token_ids)
        if answer is not None:
            self._answered(split, plan, chat, answer, rendering)
        return forecast

    def _split(self, chat: Chat, ends: bool, rendering: Mapping[str, Any]) -> Split:
        marks, contents = marked(chat)
        text = self._rendered(chat, ends, rendering)
        token_ids = self._tokenizer.encode(text, add_special_tokens=False)
        return self._cutter.split(token_ids, text, self._rendered(marks, ends, rendering), contents)

    def _rendered(self, chat: Chat, ends: bool, rendering: Mapping[str, Any]) -> str:
        def refusal(error: Exception) -> ChoreoError:
            size = f"{len(chat)} messages"
            return ChoreoError(
                f"the model's chat template refuses a chat of {size}: {error}", parameter="chat"
            )

        return render_chat(self._tokenizer, chat, ends, refusal, **rendering)

    def _forecast(self, split: Split, plan: ChatPlan) -> Forecast:
        ids = [entry.message_id for entry in plan.entries]
        new = {id(piece.entry) for piece in plan.new}
        spans = [(part.role, part.messages) for part in split.parts]
        parts, exact, choreo, seen = [], 0, 0, set()
        for number, (entry, (role, messages)) in enumerate(zip(plan.entries, spans, strict=True)):
            is_new = id(entry) in new and entry.message_id not in seen
            seen.add(entry.message_id)
            chain = tuple(ids[:number])
            moved = not is_new and self._first.get(entry.message_id) != chain
            state = "new" if is_new else "moved" if moved else "same"
            parts.append(SeenPart(role, messages, entry.num_tokens, state))
            choreo += 0 if is_new else entry.num_tokens
            is_exact = chain in self._chains.get(entry.message_id, ())
            exact += entry.num_tokens if is_exact else 0
        prefix = max((self._shared(split.token_ids, text) for text in self._texts), default=0)
        prefix = min(prefix, len(split.token_ids) - 1) // self._block_size * self._block_size
        reason = "" if parts else split.reason or "template"
        return Forecast(len(split.token_ids), prefix, exact, choreo, tuple(parts), reason)

    def _made(self, plan: ChatPlan) -> None:
        """Note that every part is encoded behind those before it, in mode "exact" as a copy."""
        for piece in plan.new:
            self._book.add(piece.entry)
        ids = tuple(entry.message_id for entry in plan.entries)
        for number, message_id in enumerate(ids):
            self._first.setdefault(message_id, ids[:number])
            self._chains.setdefault(message_id, set()).add(ids[:number])

    def _answered(
        self, split: Split, plan: ChatPlan, chat: Chat, answer: str, rendering: Mapping[str, Any]
    ) -> None:
        """Enter an answer as the next request would look for it."""
        then = self._split([*chat, {"role": "assistant", "content": answer}], False, rendering)
        header_start = len(split.token_ids) - len(plan.header)
        stops = {part.start: part.stop for part in then.parts}
        # Where nothing is written behind an answer, it is no part yet: parts leave the last token.
        stop = stops.get(split.header_start, len(then.token_ids))
        if then.token_ids[: len(split.token_ids)] != split.token_ids:
            return  # history has it otherwise than it is generated
        token_ids = then.token_ids[header_start:stop]
        entry = plan.answer_entry(self._new_id(), token_ids)
        self._book.add(entry)
        if self._book.has(entry):
            chain = tuple(parent.message_id for parent in plan.entries)
            self._first[entry.message_id], self._chains[entry.message_id] = chain, {chain}
        self._texts.append(then.token_ids[:stop])

    @staticmethod
    def _shared(one: Sequence[int], other: Sequence[int]) -> int:
        """Number of tokens that two texts begin with in common."""
        shared = 0
        for a, b in zip(one, other, strict=False):
            if a != b:
                break
            shared += 1
        return shared

    def _new_id(self) -> str:
        self._count += 1
        return str(self._count)


def requests_of(recorded: object) -> Iterator[tuple[Chat, str | None, dict[str, Any]]]:
    """Requests of a recording: their chats, their answers and the variables of the template.

    Args:
        recorded: an object with `messages` (and `tools`), or a list of such. Each answer in a chat
            is that of a request with the messages before it; a chat that does not end with an
            answer is one more request.

    Raises:
        ChoreoError: no such object.
    """
    for number, one in enumerate(recorded if isinstance(recorded, list) else [recorded]):
        messages = one.get("messages") if isinstance(one, Mapping) else None
        if not isinstance(messages, list) or not all(isinstance(m, Mapping) for m in messages):
            raise ChoreoError(
                'a recording is an object with "messages", a list of objects with "role" and '
                '"content", or a list of such objects',
                parameter="chat",
                value=f"number {number}",
            )
        rendering = {"tools": one["tools"]} if one.get("tools") else {}
        for index, message in enumerate(messages):
            answer = message.get("content")
            if index and message.get("role") == "assistant" and isinstance(answer, str):
                yield messages[:index], answer, rendering
        if messages and messages[-1].get("role") != "assistant":
            yield messages, None, rendering
