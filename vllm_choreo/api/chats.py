# SPDX-License-Identifier: Apache-2.0
"""`Choreography.chat`: chats whose messages are found by what they hold, in process."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from vllm_choreo.api.protocol import SessionFacade
from vllm_choreo.chat.cutter import Cutter, end_tokens
from vllm_choreo.chat.marks import marked
from vllm_choreo.chat.matching import (
    ChatPlan,
    Matching,
    check_auto,
    check_context,
    check_cut,
    plan_chat,
)
from vllm_choreo.chat.message_table import Entry, MessageTable
from vllm_choreo.chat.parts import Split
from vllm_choreo.errors import ChoreoError
from vllm_choreo.semantics.message import Message
from vllm_choreo.semantics.session_options import AdapterGiven

if TYPE_CHECKING:
    from vllm import LLM

# That a session's chats keep. Those whose keys and values are evicted cost their tokens alone.
MAX_MESSAGES = 2_000
MAX_TOKENS = 2_000_000


class SessionChats:
    """The messages of a session's chats.

    Args:
        llm: the session's `vllm.LLM`.
        is_live: function that tells whether a message of this id exists.
    """

    def __init__(self, llm: LLM, is_live: Callable[[str], bool]) -> None:
        self.book = MessageTable(MAX_MESSAGES, MAX_TOKENS)
        self._llm = llm
        self._is_live = is_live
        self._count = 0
        self._cutter: Cutter | None = None

    def answer(
        self,
        choreography: SessionFacade,
        messages: Sequence[Mapping[str, Any]],
        auto: str,
        rendering: Mapping[str, Any],
        min_tokens: int | None,
        cut: str,
        context: str | None,
        options: Mapping[str, Any],
    ) -> Message:
        """Answer a chat: `Choreography.chat`.

        Args:
            choreography: the session, or a view of it, that runs the calls.
        """
        mode, cut = check_auto(auto, "auto"), check_cut(cut, "cut")
        context = "seen" if context is None else check_context(context, "context", mode)
        token_ids, text = self._render(messages, rendering)
        if mode == "off" or choreography.mode == "baseline":
            answer: Message = choreography.decode(token_ids, **options)
            return answer
        marks, contents = marked(messages)
        marked_ids, marked_text = self._render(marks, rendering)
        adapter = str(options.get("adapter") or "")
        keeps_states: bool = self._llm.model_config.is_hybrid
        how = Matching.of(mode, cut, context, keeps_states, adapter, options.get("repair"))
        split = self._cutter_of_model().split(
            token_ids, text, marked_text or marked_ids, contents, min_tokens, cut, how.is_alone
        )
        plan = self._plan(choreography, split, how)
        num_encoded = self._encode(choreography, plan, mode, options.get("adapter"))
        parents = [span.parent for span in plan.parents]
        answer = choreography.decode(plan.header, parents=parents, mode=mode, **options)
        self._keep(choreography, plan.answer_entry(answer.id, answer.token_ids))
        # What was encoded for this chat is none that it found.
        usage = dataclasses.replace(
            answer.usage,
            reused_tokens=answer.usage.reused_tokens - num_encoded,
            encoded_tokens=answer.usage.encoded_tokens + num_encoded,
        )
        return dataclasses.replace(answer, usage=usage)

    def _render(
        self, messages: Sequence[Mapping[str, Any]], rendering: Mapping[str, Any]
    ) -> tuple[list[int], str | None]:
        """A chat as `LLM.chat` renders it: its tokens, and the text that they were made of."""
        from vllm.renderers import ChatParams

        renderer = self._llm.renderer
        options = {"add_generation_prompt": True, "tokenize": False, **rendering}
        _, (prompt,) = renderer.render_chat(
            [list(messages)],
            ChatParams(chat_template=self._llm.chat_template, chat_template_kwargs=options),
            renderer.default_chat_tok_params.with_kwargs(add_special_tokens=False),
        )
        if prompt["type"] != "token":
            raise ChoreoError(
                "a message is made of text: leave pictures and sound out", parameter="messages"
            )
        return prompt["prompt_token_ids"], prompt.get("prompt")

    def _cutter_of_model(self) -> Cutter:
        if self._cutter is None:
            tokenizer = self._llm.get_tokenizer()
            generation = self._llm.model_config.try_get_generation_config()
            self._cutter = Cutter(tokenizer, end_tokens(tokenizer, generation))
        return self._cutter

    def _plan(self, choreography: SessionFacade, split: Split, how: Matching) -> ChatPlan:
        """Plan which known messages the chat reads, and make room for the new ones."""

        def new_id() -> str:
            self._count += 1
            return f"{choreography.session}/auto.{self._count}"

        plan = plan_chat(split, self.book, how, self._lives, new_id)
        self.book.enter(plan.found)
        self._free(choreography, self.book.make_room(len(plan.new) + 1, plan.num_new_tokens))
        self.book.leave(plan.found)
        return plan

    def _encode(
        self, choreography: SessionFacade, plan: ChatPlan, mode: str, adapter: AdapterGiven
    ) -> int:
        """Encode the plan's new messages; return how many tokens that took."""
        num_encoded = 0
        for piece in plan.new:
            made: Message = choreography.prefill(
                piece.token_ids,
                parents=[span.parent for span in piece.parents],
                save_as=piece.entry.message_id.partition("/")[2],
                mode=mode,
                adapter=adapter,
            )
            self.book.add(piece.entry)
            num_encoded += made.usage.encoded_tokens
        self.book.touch(plan.entries)
        return num_encoded

    def _keep(self, choreography: SessionFacade, entry: Entry) -> None:
        """Keep an answer for the chat that goes on from it."""
        known, same = self.book.find(entry.key, entry.context), []
        if known is not None and known.context == entry.context:
            self.book.drop(known)  # made alike before, of the same chat
            same = [known]
        self.book.add(entry)
        self._free(choreography, [*same, *self.book.make_room(0, 0)])

    def _free(self, choreography: SessionFacade, entries: Sequence[Entry]) -> None:
        live = [entry.message_id for entry in entries if self._lives(entry)]
        if live:
            choreography.free(*live)

    def _lives(self, entry: Entry) -> bool:
        return bool(self._is_live(entry.message_id))
