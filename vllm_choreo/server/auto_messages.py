# SPDX-License-Identifier: Apache-2.0
"""Messages of chats that name none, found by their tokens in a session of each tenant's own."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from vllm_choreo.api.pending import Pending
from vllm_choreo.api.picture_prompts import num_picture_bytes
from vllm_choreo.api.placeholders import placeholder_of
from vllm_choreo.chat.matching import ChatPlan, Matching, NewPart, plan_chat
from vllm_choreo.chat.message_table import Entry, MessageTable
from vllm_choreo.chat.parts import Split
from vllm_choreo.config import ChoreoConfig, ServerConfig
from vllm_choreo.engine.pictures import reason_for_no_pictures
from vllm_choreo.errors import ChoreoError, TooLongError
from vllm_choreo.semantics.call import CallSpec, Tokenized, linked_specs
from vllm_choreo.semantics.message import Message
from vllm_choreo.server.sessions import OpenSession, Sessions
from vllm_choreo.server.work_pool import WorkPool

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.inputs.engine import EngineInput

# What becomes of a chat that names no messages: its parts are messages; or it is served as text,
# for it asks for what makes no message, its template or tokenizer cannot be cut, or in parts it
# does not fit into the context, or into a limit.
AUTO_OUTCOMES = ("messages", "options", "template", "tokenizer", "context", "limit")
# A chat that names no end to its answer may have the rest of the context. Padding takes of that:
# up to this part of it.
_MAX_PADDED_SHARE = 0.25


@dataclass(eq=False)
class ReadChat:
    """A chat whose parts are messages: they are kept until `ChatMessages.leave`.

    Attributes:
        plan: messages that the chat reads, and its header.
        pending: calls that encode its new parts.
        is_exchanged: servers of other models may find its parts and its answer.
    """

    plan: ChatPlan
    pending: list[Pending] = field(default_factory=list)
    is_exchanged: bool = False

    @property
    def parents(self) -> list[str | tuple[str, int, int]]:
        return [span.parent for span in self.plan.parents]

    async def failure(self) -> ChoreoError | None:
        """The first error of the calls that encode its new parts; None: there is none."""
        results = [await pending.result() for pending in self.pending]
        return next((result for result in results if isinstance(result, ChoreoError)), None)

    async def num_encoded(self) -> int:
        """Tokens that were encoded for it before its header, copies in exact mode included."""
        results = [await pending.result() for pending in self.pending]
        return sum(m.usage.encoded_tokens for m in results if isinstance(m, Message))


class ChatMessages:
    """The messages of one tenant's chats.

    Args:
        sessions: open sessions of the server.
        session: the tenant's own session for these messages.
        config: the limits; half of those of a session at most, for answers are in it, too.
        max_model_len, block_size: lengths of the engine's context and blocks, in tokens.
        max_picture_bytes: bytes that its pictures may take.
        no_pictures: reason why it has none; None: it may.
        placeholder: token that stands for a picture; None: the model has none.
    """

    def __init__(
        self,
        sessions: Sessions,
        session: OpenSession,
        config: ServerConfig,
        max_model_len: int,
        block_size: int,
        max_picture_bytes: int,
        no_pictures: str | None,
        placeholder: int | None,
    ) -> None:
        self.session, self.placeholder = session, placeholder
        self.no_pictures = no_pictures
        self.book = MessageTable(
            min(config.auto_max_messages, config.max_messages_per_session // 2),
            min(config.auto_max_tokens, config.max_tokens_per_session // 2),
            max_picture_bytes,
        )
        self.sessions = sessions
        self._max_model_len, self._block_size = max_model_len, block_size
        self._count = 0
        # Servers exchange such messages: names of two must not be the same.
        self._tag = secrets.token_hex(4)
        # Who finds a message must come to the engine after the call that makes it.
        self._lock = asyncio.Lock()

    async def read(
        self,
        split: Split,
        prompt: EngineInput,
        mode: str,
        max_tokens: int,
        how: Matching,
        adapter: object,
    ) -> ReadChat:
        """Find or make the messages of a chat's parts.

        Args:
            split: the chat's tokens and parts.
            prompt: the chat as vLLM has rendered it, with its pictures.
            mode: mode of its calls.
            max_tokens: most tokens of the answer.
            how: which messages may be read.
            adapter: the adapter that encodes it, as calls take it, or None.

        Raises:
            TooLongError: in parts it takes too much of the context.
            ChoreoError: its calls are illegal.
        """
        is_exchanged = mode == "choreo" and not how.adapter
        async with self._lock:
            plan = plan_chat(split, self.book, how, self._is_live, self._new_id)
            self._check_fits(plan, max_tokens)
            self.book.enter(plan.found)
            try:
                for piece in plan.new:
                    piece.entry.num_bytes = num_picture_bytes(prompt, piece.start, piece.stop)
                num_bytes = sum(piece.entry.num_bytes for piece in plan.new)
                room = self.book.make_room(len(plan.new) + 1, plan.num_new_tokens, num_bytes)
                await self._free(room)
                left = await self._not_fetched(plan.new) if is_exchanged else plan.new
                contents = [self._content(piece, prompt) for piece in left]
                specs = _pieces(left, contents, mode, adapter)
                pending = await self.session.choreography.submit_all(specs) if specs else []
            finally:
                self.book.leave(plan.found)
            plan = replace(plan, new=left)
            for piece, handle in zip(plan.new, pending, strict=True):
                self.book.add(piece.entry)
                self.sessions.in_background(self._watch(piece.entry, handle, is_exchanged))
            self.book.enter(plan.entries)
            self.book.touch(plan.entries)
        return ReadChat(plan, pending, is_exchanged)

    def _content(self, piece: NewPart, prompt: EngineInput) -> tuple[int, ...] | Tokenized:
        """New tokens of a call, with the pictures among them."""
        if not piece.entry.num_bytes:
            return piece.token_ids
        return self.session.choreography.part_of_prompt(prompt, piece.start, piece.stop)

    async def _not_fetched(self, new: Sequence[NewPart]) -> list[NewPart]:
        """Load the new parts that a server of another model has encoded; return all others."""
        if (exchange := self.sessions.exchange) is None:
            return list(new)
        left = []
        for part in new:
            if part.entry.num_bytes:
                left.append(part)  # no model loads another's pictures
                continue
            found = await exchange.fetch_part(self.session, part.entry.key, part.token_ids)
            if found is None:
                left.append(part)
            else:
                part.entry.message_id = found.id
                self.book.add(part.entry)
        return left

    def leave(self, chat: ReadChat) -> None:
        """End the request: free messages that nobody reads or can find any more."""
        self.book.leave(chat.plan.entries)
        lost = [entry for entry in dict.fromkeys(chat.plan.entries) if self._is_lost(entry)]
        if lost:
            self.sessions.in_background(self._free(lost))

    def answered(self, message: Message, chat: ReadChat) -> None:
        """Keep an answer, with the header before it, for the chat that goes on from there.

        An answer with the same tokens that was made before, to the same chat, is given up for it.
        """
        entry = chat.plan.answer_entry(message.id, message.token_ids)
        known = self.book.find(entry.key, entry.context)
        victims = []
        if known is not None and known.context == entry.context:
            self.book.drop(known)
            victims = [] if known.num_users else [known]
        self.book.add(entry)
        victims += self.book.make_room(0, 0)
        if victims:
            self.sessions.in_background(self._free(victims))
        if chat.is_exchanged:
            self.sessions.in_background(self._export(entry, message))

    async def _export(self, entry: Entry, message: Message) -> None:
        """Save a part for servers of other models; it is not given up before that is done."""
        if self.sessions.exchange is None or message.num_pictures:
            return
        self.book.enter([entry])
        try:
            await self.sessions.exchange.export_part(self.session, message, entry.key)
        finally:
            self.book.leave([entry])
        if self._is_lost(entry):
            await self._free([entry])

    def _check_fits(self, plan: ChatPlan, max_tokens: int) -> None:
        room = self._max_model_len - plan.num_tokens
        padding = plan.num_padded_tokens(self._block_size) + len(plan.header) - plan.num_tokens
        # One place is that of the last token, which is encoded when the answer is complete.
        is_limited = max_tokens < room
        if padding + 1 > (room - max_tokens if is_limited else room * _MAX_PADDED_SHARE):
            raise TooLongError(
                f"in {len(plan.parents)} messages, each in whole blocks of {self._block_size} "
                f"tokens, the chat takes {padding} tokens more than as one text, and the answer "
                f"does not fit into the context of {self._max_model_len} behind it",
                parameter="auto",
                value=f"{plan.num_tokens} tokens",
            )

    def _new_id(self) -> str:
        self._count += 1
        return f"{self.session.id}/auto.{self._tag}.{self._count}"

    def _is_live(self, entry: Entry) -> bool:
        return self.session.choreography.is_live(entry.message_id)

    async def _free(self, entries: Sequence[Entry]) -> None:
        for entry in entries:
            with suppress(ChoreoError):  # the tenant has freed it, or it is not complete
                await self.session.choreography.free(entry.message_id)

    def _is_lost(self, entry: Entry) -> bool:
        """Return whether nobody reads a message and nobody can find it."""
        return not entry.num_users and not self.book.has(entry)

    async def _watch(self, entry: Entry, pending: Pending, is_exchanged: bool) -> None:
        """Forget a message that could not be made, or was given up before it was complete."""
        result = await pending.result()
        if isinstance(result, ChoreoError):
            self.book.drop(entry)
        elif self._is_lost(entry):
            await self._free([entry])
        elif is_exchanged:
            await self._export(entry, result)
        self.sessions.ended(self.session, "prefill", result)


def _pieces(
    new: Sequence[NewPart],
    contents: Sequence[tuple[int, ...] | Tokenized],
    mode: str,
    adapter: object,
) -> list[CallSpec]:
    """Calls that encode new parts, each behind what the plan says."""
    return linked_specs(
        [
            {
                "tokens": content,
                "parents": [span.parent for span in piece.parents],
                "save_as": piece.entry.message_id.partition("/")[2],
                "mode": mode,
                "adapter": adapter,
            }
            for piece, content in zip(new, contents, strict=True)
        ]
    )


class TenantChats:
    """The messages of all tenants' chats.

    Args:
        sessions: open sessions of the server.
        vllm_config: configuration of its engine.

    Attributes:
        keeps_states: its model has states in place of keys, see `Matching.of`.
    """

    def __init__(self, sessions: Sessions, vllm_config: VllmConfig) -> None:
        self._sessions = sessions
        self._max_model_len: int = vllm_config.model_config.max_model_len
        self._block_size: int = vllm_config.cache_config.block_size
        self.keeps_states: bool = vllm_config.model_config.is_hybrid
        settings = ChoreoConfig.from_vllm(vllm_config)
        # Half of a tenant's: other messages have pictures, too.
        self._max_picture_bytes = int(settings.picture_bytes * settings.tenant_share) // 2
        self._placeholder = placeholder_of(vllm_config.model_config)
        self._no_pictures = reason_for_no_pictures(vllm_config, settings.picture_bytes > 0)
        self._tenants: dict[str, ChatMessages] = {}

    def of(self, tenant: str) -> ChatMessages:
        """Messages of one tenant's chats; its session is opened if missing, closed or expired.

        Raises:
            LimitError: too many sessions are open.
        """
        chats = self._tenants.get(tenant)
        if chats is None or not self._sessions.is_usable(chats.session):
            session = self._sessions.open(tenant, is_journalled=False)
            self._drop_closed()
            chats = self._tenants[tenant] = ChatMessages(
                self._sessions, session, self._sessions.config, self._max_model_len,
                self._block_size, self._max_picture_bytes, self._no_pictures, self._placeholder,
            )  # fmt: skip
        return chats

    @property
    def work(self) -> WorkPool:
        """Pool for work that grows with a chat."""
        return self._sessions.work

    @property
    def max_request_bytes(self) -> int:
        """Most bytes of a request that asks for its messages to be found."""
        return self._sessions.config.max_request_bytes

    @property
    def min_tokens(self) -> int:
        """Tokens of a part of a chat, at least; shorter parts are joined."""
        return self._sessions.config.auto_min_tokens

    @property
    def cut_tokens(self) -> int:
        """Tokens, on average, of the pieces of parts that are cut by their content."""
        return self._sessions.config.auto_cut_tokens

    def looked_up(self, outcome: str, report: Mapping[str, int]) -> None:
        """Count a chat.

        Args:
            outcome: how it was served, one of `AUTO_OUTCOMES`.
            report: counts of its parts, see `ChatPlan.report`; empty where they are not read.
        """
        for observer in self._sessions.observers:
            observer.looked_up(outcome, report)

    def _drop_closed(self) -> None:
        usable = self._sessions.is_usable
        self._tenants = {t: chats for t, chats in self._tenants.items() if usable(chats.session)}
