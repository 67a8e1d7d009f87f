# SPDX-License-Identifier: Apache-2.0
"""`Choreography.chat`: chats whose messages are found by what they hold, in process."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, cast

from vllm_choreo.api.picture_prompts import num_picture_bytes, pictures_of
from vllm_choreo.api.pictures import PictureRenderer, named_pictures
from vllm_choreo.api.protocol import SessionFacade
from vllm_choreo.chat.cutter import Cutter, end_tokens
from vllm_choreo.chat.marks import marked, with_blank_pictures
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
from vllm_choreo.config import ChoreoConfig
from vllm_choreo.semantics.call_options import Content
from vllm_choreo.semantics.message import Message
from vllm_choreo.semantics.session_options import AdapterGiven

if TYPE_CHECKING:
    from vllm import LLM

    from vllm_choreo.api.picture_prompts import Prompt

# That a session's chats keep. Those whose keys and values are evicted cost their tokens alone.
MAX_MESSAGES = 2_000
MAX_TOKENS = 2_000_000


class SessionChats:
    """The messages of a session's chats.

    Args:
        llm: the session's `vllm.LLM`.
        tenant: the session's, by which pictures have names.
        renderer: renderer of the pictures in the session's calls.
        is_live: function that tells whether a message of this id exists.
    """

    def __init__(
        self, llm: LLM, tenant: str, renderer: PictureRenderer, is_live: Callable[[str], bool]
    ) -> None:
        self._llm = llm
        self._tenant = tenant
        self._pictures = renderer
        self._is_live = is_live
        self._count = 0
        self._cutter: Cutter | None = None

    @cached_property
    def book(self) -> MessageTable:
        """The messages, by what they hold."""
        settings = ChoreoConfig.from_vllm(self._llm.llm_engine.vllm_config)
        # Half of a tenant's: other messages have pictures, too.
        max_picture_bytes = int(settings.picture_bytes * settings.tenant_share) // 2
        return MessageTable(MAX_MESSAGES, MAX_TOKENS, max_picture_bytes)

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
        text, prompt = self._render(messages, rendering)
        token_ids = prompt["prompt_token_ids"]
        if mode == "off" or choreography.mode == "baseline":
            answer: Message = choreography.decode(self._content(prompt, 0), **options)
            return answer
        adapter = str(options.get("adapter") or "")
        keeps_states: bool = self._llm.model_config.is_hybrid
        how = Matching.of(mode, cut, context, keeps_states, adapter, options.get("repair"))
        chat = messages, rendering, text, prompt
        split = self._split(*chat, min_tokens=min_tokens, cut=cut, is_alone=how.is_alone)
        plan = self._plan(choreography, split, how, prompt)
        num_encoded = self._encode(choreography, plan, mode, options.get("adapter"), prompt)
        parents = [span.parent for span in plan.parents]
        header = self._content(prompt, len(token_ids) - len(plan.header))
        answer = choreography.decode(header, parents=parents, mode=mode, **options)
        self._keep(choreography, plan.answer_entry(answer.id, answer.token_ids))
        # What was encoded for this chat is none that it found.
        usage = dataclasses.replace(
            answer.usage,
            reused_tokens=answer.usage.reused_tokens - num_encoded,
            encoded_tokens=answer.usage.encoded_tokens + num_encoded,
        )
        return dataclasses.replace(answer, usage=usage)

    def _render(
        self,
        messages: Sequence[Mapping[str, Any]],
        rendering: Mapping[str, Any],
        *,
        shows_pictures: bool = True,
    ) -> tuple[str | None, Prompt]:
        """A chat as `LLM.chat` renders it: the text, if there is one, and its tokens.

        Args:
            shows_pictures: whether these come with their pictures; else a placeholder stands for
                each.
        """
        from vllm.renderers import ChatParams

        renderer = self._llm.renderer
        options = {"add_generation_prompt": True, "tokenize": False, **rendering}
        params = ChatParams(chat_template=self._llm.chat_template, chat_template_kwargs=options)
        _, found = renderer.render_messages(list(messages), params)
        given = {k: v for k, v in found.items() if not k.startswith("multi_modal_")}
        if shows_pictures and (data := found.get("multi_modal_data")):
            given |= named_pictures(self._tenant, data, "messages")
        (made,) = renderer.render_cmpl(
            [given],
            renderer.default_chat_tok_params.with_kwargs(add_special_tokens=False),
            skip_mm_cache=True,
        )
        return found.get("prompt"), made

    def _split(
        self,
        messages: Sequence[Mapping[str, Any]],
        rendering: Mapping[str, Any],
        text: str | None,
        prompt: Prompt,
        *,
        min_tokens: int | None,
        cut: str,
        is_alone: bool,
    ) -> Split:
        """Cut a chat into its parts.

        Args:
            text, prompt: the chat as `_render` gives it.
        """
        marks, contents = marked(messages)
        pictures = pictures_of(prompt)
        marks = with_blank_pictures(marks) if pictures else marks
        marked_text, marked_prompt = self._render(marks, rendering, shows_pictures=False)
        return self._cutter_of_model().split(
            prompt["prompt_token_ids"],
            text,
            marked_text or marked_prompt["prompt_token_ids"],
            contents,
            min_tokens,
            cut,
            is_alone,
            pictures,
        )

    def _content(self, prompt: Prompt, start: int, stop: int | None = None) -> Content:
        """Tokens `start … stop-1` as calls take them, with the pictures among them."""
        if prompt["type"] == "token":
            return list(prompt["prompt_token_ids"][start:stop])
        # Calls take these, too; callers have no need to make any.
        return cast("Content", self._pictures.part(prompt, start, stop))

    def _cutter_of_model(self) -> Cutter:
        if self._cutter is None:
            tokenizer = self._llm.get_tokenizer()
            generation = self._llm.model_config.try_get_generation_config()
            self._cutter = Cutter(tokenizer, end_tokens(tokenizer, generation))
        return self._cutter

    def _plan(
        self, choreography: SessionFacade, split: Split, how: Matching, prompt: Prompt
    ) -> ChatPlan:
        """Plan which known messages the chat reads, and make room for the new ones."""

        def new_id() -> str:
            self._count += 1
            return f"{choreography.session}/auto.{self._count}"

        plan = plan_chat(split, self.book, how, self._lives, new_id)
        self.book.enter(plan.found)
        for piece in plan.new:
            piece.entry.num_bytes = num_picture_bytes(prompt, piece.start, piece.stop)
        num_bytes = sum(piece.entry.num_bytes for piece in plan.new)
        room = self.book.make_room(len(plan.new) + 1, plan.num_new_tokens, num_bytes)
        self._free(choreography, room)
        self.book.leave(plan.found)
        return plan

    def _encode(
        self,
        choreography: SessionFacade,
        plan: ChatPlan,
        mode: str,
        adapter: AdapterGiven,
        prompt: Prompt,
    ) -> int:
        """Encode the plan's new messages; return how many tokens that took."""
        num_encoded = 0
        for piece in plan.new:
            made: Message = choreography.prefill(
                self._content(prompt, piece.start, piece.stop),
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
