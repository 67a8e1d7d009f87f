# SPDX-License-Identifier: Apache-2.0
"""`Choreography`: prefill, decode and free messages on a `vllm.LLM`.

    with Choreography(llm) as c:
        doc = c.prefill("…")
        answer = c.decode("Assistant:", parents=[doc])

One call is one vLLM request. The facade adds the requests and steps the engine itself, for only so
does it see when each first token arrives (`LLM.generate` returns when all is done).
"""

from __future__ import annotations

import copy
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Unpack, overload

from vllm_choreo.api import baseline
from vllm_choreo.api.chats import SessionChats
from vllm_choreo.api.outcomes import (
    Outcome,
    Report,
    baseline_result,
    check_ttl,
    checked_answer,
    choreo_result,
    end_arguments,
    end_report,
    ends_here,
    engine_params,
    engine_prompt,
    metrics_of,
    report_of,
)
from vllm_choreo.api.planned import PlannedCall
from vllm_choreo.api.session import DEFAULT_PIN_SECONDS, Session
from vllm_choreo.api.sync_keeping import SyncKeeping
from vllm_choreo.errors import ChoreoError
from vllm_choreo.repair.session_rules import SessionRule
from vllm_choreo.semantics.call import Asked, Result, asked, asked_copy, check_mode
from vllm_choreo.semantics.call_options import (
    Calls,
    Content,
    DecodeOptions,
    Named,
    Parent,
    ReadOptions,
)
from vllm_choreo.semantics.message import Message


class Choreography(SyncKeeping):
    """A tenant's session on an engine; closing it frees its messages.

    Args:
        llm: the `vllm.LLM`, with nothing enqueued.
        mode: "choreo"; "exact": every result is that of an ordinary request on the concatenated
            text; or "baseline": the same program as text over vLLM's prefix caching.
        tenant: owner of the session; identical messages of one tenant are encoded once.
        adapter: adapter of calls that name none: the folder that training wrote, a folder of PEFT,
            or a `vllm.lora.request.LoRARequest`; None: the model alone.
        placement: the calls that wear it: "writer", those that encode messages; "reader", those
            that generate; "both"; None: the placement that training has written into the folder.
        repair: the rule of calls that name none, such as "first:32" (docs/repair.md); None: none.

    `tokens` and `header` are text or token ids; text is tokenised without special tokens added.
    A list of dicts (key `tokens` or `header`, and the options of the call) runs in parallel and
    returns a list of messages in its order. If one of its items is illegal, all are refused and
    nothing is submitted. If one fails inside the engine, the others complete, and the error's
    `results` holds what each call came to: the completed messages live on until they are freed or
    the session is closed.

    A parent is a `Message`, an id, a `save_as` name, or `(message, start, stop)`.
    """

    def __init__(
        self,
        llm: LLM,
        mode: str = "choreo",
        *,
        tenant: str = "",
        adapter: str | Path | LoRARequest | None = None,
        placement: str | None = None,
        repair: str | Path | Mapping[str, Any] | SessionRule | None = None,
    ) -> None:
        check_mode(mode)
        self.mode = mode
        self._llm = llm
        tokenizer, vllm_config = llm.get_tokenizer(), llm.llm_engine.vllm_config
        self._session = Session(
            tokenizer,
            vllm_config,
            mode,
            tenant,
            adapter=adapter,
            placement=placement,
            repair=repair,
            num_unfinished=lambda: llm.llm_engine.get_num_unfinished_requests(),
        )
        self._entries = self._session.entries
        self._denied: tuple[str, ...] = ()
        self._chats = SessionChats(llm, self._entries.is_live)

    @property
    def session(self) -> str:
        """The id of the session; the ids of its messages begin with it."""
        return self._session.id

    def tokenize(self, text: str) -> tuple[int, ...]:
        """The token ids that a message of this text has; no special tokens are added."""
        return self._session.tokenize(text)

    @overload
    def prefill(self, tokens: Content, **options: Unpack[ReadOptions]) -> Message: ...

    @overload
    def prefill(self, tokens: Calls, **options: Unpack[ReadOptions]) -> list[Message]: ...

    def prefill(
        self, tokens: Content | Calls, **options: Unpack[ReadOptions]
    ) -> Message | list[Message]:
        """Encode a message, or a list of them; sample nothing.

        Args:
            tokens: text, token ids, or a list of dicts.
            options: `parents`, `offsets`, `new_offset`, `save_as`, `mode`, `deny`, `adapter`,
                `repair`: see
                `vllm_choreo.semantics.call_options.ReadOptions`.

        Returns:
            A `Message`, or a list of them.

        Raises:
            DeniedMessageError: a parent carries traces of a message that is denied.
            ChoreoError: which parameter is wrong, and what to do instead.
        """
        return self._run(asked("prefill", tokens, options, self._denied))

    @overload
    def decode(self, header: Content, **options: Unpack[DecodeOptions]) -> Message: ...

    @overload
    def decode(self, header: Calls, **options: Unpack[DecodeOptions]) -> list[Message]: ...

    def decode(
        self, header: Content | Calls, **options: Unpack[DecodeOptions]
    ) -> Message | list[Message]:
        """Encode a header and generate after it; the message is both. Or run a list of such calls.

        Otherwise as `prefill`. `header` must not be empty. The option `sampling_params` are
        `vllm.SamplingParams`, the model's defaults if omitted; with a list, they, `mode`, `adapter`
        and `repair` are those of the items that have none of their own, and `deny` is added to that
        of each.
        """
        return self._run(asked("decode", header, options, self._denied))

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        auto: str = "exact",
        rendering: Mapping[str, Any] | None = None,
        min_tokens: int | None = None,
        **options: Any,
    ) -> Message:
        """Answer a chat whose messages were seen before, or were not (docs/on-ramps.md).

        Args:
            messages: dicts of role and content, as `LLM.chat` takes them.
            auto: "exact": the answer of plain text; "choreo": its parts are read as they were
                encoded, wherever they stood; "off": nothing is reused, and nothing kept.
            rendering: variables of the chat template: `tools`, and its own.
            min_tokens: shorter parts are joined; None: 16.
            options: options of `decode`: `sampling_params`, `adapter`, `role`, `save_as`, and
                with "choreo" `repair`.

        Returns:
            The answer, with the header before it; its usage counts what was encoded for the chat.

        Raises:
            ChoreoError: as `decode`.
        """
        return self._chats.answer(self, messages, auto, rendering or {}, min_tokens, options)

    def reencode(self, message: Parent, **options: Unpack[ReadOptions]) -> Message:
        """Encode the tokens of a message anew, with parents of your choice: a clean copy.

        The copy carries traces of these parents, and of the text of `message`; none of what
        `message` was encoded with. `message` may be `(message, start, stop)`. Otherwise as
        `prefill`.
        """
        clean: Message = self._run(asked_copy(message, options, self._denied))
        return clean

    def deny(self, *messages: Named) -> Choreography:
        """Return the session under a policy: calls through it read no traces of these messages.

        Messages, calls and memory are shared with this one, which keeps its own policy; closing
        one closes the session.
        """
        view = copy.copy(self)
        view._denied = (*self._denied, *self._session.deniable(messages))
        return view

    def free(self, *messages: Named) -> None:
        """Free messages; a later call that names one is refused."""
        ids = self._ids(messages)
        self._utility("free", self._session.id, ids)
        self._entries.freed(ids)

    def evict(self, *messages: Named) -> None:
        """Drop cached keys and values; a later call encodes the messages again from their recipes.

        In baseline mode there is nothing to drop: `llm.reset_prefix_cache()` empties vLLM's cache.
        """
        self._utility("evict", self._session.id, self._ids(messages))

    def pin(self, *messages: Named, ttl: float = DEFAULT_PIN_SECONDS) -> None:
        """Evict these messages after all others that nobody reads, for `ttl` seconds.

        Raises:
            LimitError: pinned messages would hold more of the KV cache than
                `additional_config.choreo.pinned_share`.
        """
        self._utility("pin", self._session.id, self._ids(messages), check_ttl(ttl))

    def unpin(self, *messages: Named) -> None:
        """Take pins back; messages without one are left as they are."""
        self._utility("unpin", self._session.id, self._ids(messages))

    def message(self, named: Named) -> Message:
        """A complete message by its id or name."""
        return self._entries.complete("message", named)

    def provenance(self, named: Named) -> frozenset[str]:
        """Ids of all messages that a complete message carries traces of: `Message.provenance`."""
        return self.message(named).provenance

    def stats(self) -> dict[str, Any]:
        """The engine's numbers on this session's messages; in baseline mode those of the client.

        With the profile of a pair also `layers_chosen`: how often which layers, by the reason.
        """
        if self.mode == "baseline":
            return self._session.stats()
        stats: dict[str, Any] = self._utility("stats", self._session.id)
        return self._session.with_choices(stats)

    def close(self) -> None:
        """Free all messages of the session. Closing twice does nothing."""
        if self._entries.close():
            self._utility("close", self._session.id)

    def __enter__(self) -> Choreography:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    # -- running calls -----------------------------------------------------------------------

    def _run(self, asked: Asked) -> Any:
        if self._llm.llm_engine.has_unfinished_requests():
            raise ChoreoError(
                "other requests are enqueued, and their outputs would be lost: call "
                "llm.wait_for_completion() first",
                parameter="llm",
            )
        calls = self._session.plan(asked.calls)
        try:
            results = self._results(calls)
        except BaseException:
            for call in calls:
                self._entries.finished(call, ChoreoError("the call was interrupted"))
            raise
        for call, result in zip(calls, results, strict=True):
            self._entries.finished(call, result)
        return asked.answer(results)

    def _results(self, calls: Sequence[PlannedCall]) -> list[Result]:
        start = time.perf_counter()
        if self.mode == "baseline":
            return self._baseline_results(calls, start)
        outcomes = self._generate([(call, call.token_ids) for call in calls], start)
        return [
            choreo_result(call, outcome, self._report(call, outcome))
            for call, outcome in zip(calls, outcomes, strict=True)
        ]

    def _report(self, call: PlannedCall, outcome: Outcome) -> Report:
        """The engine's report on a finished call."""
        if not ends_here(call, outcome):
            return report_of(outcome)
        return end_report(self._utility("end", *end_arguments(call, outcome)))

    def _baseline_results(self, calls: Sequence[PlannedCall], start: float) -> list[Result]:
        messages = self._entries.messages()
        if not calls[0].is_decode:
            return [baseline.stored_message(call, messages, start) for call in calls]
        prompts = [(call, baseline.prompt_token_ids(call, messages)) for call in calls]
        outcomes = self._generate(prompts, start)
        return [baseline_result(*pair) for pair in zip(calls, outcomes, strict=True)]

    def _generate(
        self, requests: Sequence[tuple[PlannedCall, Sequence[int]]], start: float
    ) -> list[Outcome]:
        """Run `(call, prompt token ids)` in one batch, until all of them are finished."""
        engine = self._llm.llm_engine
        first: dict[str, float] = {}
        outcomes: dict[str, Outcome] = {}
        try:
            for call, prompt in requests:
                params = engine_params(call, self.mode)
                engine.add_request(
                    call.id, engine_prompt(prompt), params, lora_request=call.adapter
                )
            while len(outcomes) < len(requests):
                outputs = engine.step()
                now = time.perf_counter()
                for output in outputs:
                    first.setdefault(output.request_id, now)
                    if output.finished:
                        metrics = metrics_of(output, start, first[output.request_id], now)
                        outcomes[output.request_id] = Outcome(output, metrics)
        except BaseException:
            # Ctrl-C, or a request that vLLM refuses: leave nothing behind in the engine.
            engine.abort_request([call.id for call, _ in requests])
            raise
        return [outcomes[call.id] for call, _ in requests]

    def _ids(self, messages: Sequence[Named]) -> list[str]:
        return [self._entries.complete("messages", message).id for message in messages]

    def _utility(self, operation: str, *args: Any) -> Any:
        if self.mode == "baseline":
            return None
        from vllm_choreo.engine.utility import call

        return checked_answer(call(self._llm, operation, *args))


if TYPE_CHECKING:
    from vllm import LLM
    from vllm.lora.request import LoRARequest

    from vllm_choreo.api.protocol import SessionFacade

    _is_one: type[SessionFacade] = Choreography
