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
from typing import TYPE_CHECKING, Any, Unpack

from vllm_choreo.api import baseline
from vllm_choreo.api.chats import SessionChats
from vllm_choreo.api.outcomes import (
    Outcome,
    Report,
    baseline_result,
    call_prompt,
    check_ttl,
    checked_answer,
    choreo_result,
    end_arguments,
    end_report,
    ends_here,
    engine_params,
    metrics_of,
    report_of,
)
from vllm_choreo.api.pictures import PictureRenderer
from vllm_choreo.api.planned import PlannedCall
from vllm_choreo.api.session import DEFAULT_PIN_SECONDS, Session
from vllm_choreo.api.snapshots import Snapshots
from vllm_choreo.chat.turns import ChatTurns
from vllm_choreo.errors import ChoreoError
from vllm_choreo.semantics.call import Answer, Answers, Asked, Result, asked, asked_copy
from vllm_choreo.semantics.call_methods import CallMethods
from vllm_choreo.semantics.call_options import (
    Calls,
    Content,
    DecodeOptions,
    Named,
    Parent,
    ReadOptions,
)
from vllm_choreo.semantics.message import Message, Saved
from vllm_choreo.semantics.session_options import AdapterGiven, RepairGiven, SessionOptions
from vllm_choreo.snapshot.steps import Ask, drive
from vllm_choreo.snapshot.storage import SnapshotFolder


class Choreography(CallMethods):
    """A tenant's session on an engine; closing it frees its messages.

    Args:
        llm: the `vllm.LLM`, with nothing enqueued.
        mode: "choreo"; "exact": every result is that of an ordinary request on the concatenated
            text; or "baseline": the same program as text over vLLM's prefix caching.
        tenant: owner of the session; identical messages of one tenant are encoded once.
        adapter: adapter of calls that name none: the folder that training wrote, a folder of PEFT,
            or a `vllm.lora.request.LoRARequest`; None: the model alone.
        placement: the calls that use it: "prefill", those that encode messages; "decode", those
            that generate; "both"; None: the placement that training has written into the folder.
        repair: the rule of calls that name none, such as "first:32" (docs/repair.md), or the `Path`
            of a folder of profiles of pairs (docs/variants.md); None: none.

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
        adapter: AdapterGiven = None,
        placement: str | None = None,
        repair: RepairGiven = None,
    ) -> None:
        options = SessionOptions(
            mode=mode, tenant=tenant, adapter=adapter, placement=placement, repair=repair
        )
        self.mode = mode
        self._llm = llm
        self._session = Session(
            llm.get_tokenizer(),
            llm.llm_engine.vllm_config,
            options,
            lambda: llm.llm_engine.get_num_unfinished_requests(),
        )
        self._entries = self._session.entries
        self._pictures = PictureRenderer(self._session, llm.llm_engine)
        self._denied: tuple[str, ...] = ()
        self._chats = SessionChats(llm, options.tenant, self._pictures, self._entries.is_live)

    @property
    def session(self) -> str:
        """The id of the session; the ids of its messages begin with it."""
        return self._session.id

    @property
    def identity(self) -> dict[str, str] | None:
        """Model, adapter and repair behind the answers, as text; None: repair follows the load."""
        return self._session.identity

    @property
    def turns(self) -> ChatTurns | None:
        """Texts around a chat's turns, as the model's template writes them; None: it has none.

        Raises:
            ChoreoError: the template does not write questions and answers in turns.
        """
        return self._session.turns

    def tokenize(self, text: str) -> tuple[int, ...]:
        """The token ids that a message of this text has; no special tokens are added."""
        return self._session.tokenize(text)

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        auto: str = "exact",
        rendering: Mapping[str, Any] | None = None,
        min_tokens: int | None = None,
        cut: str = "messages",
        context: str | None = None,
        **options: Unpack[DecodeOptions],
    ) -> Message:
        """Answer a chat whose messages were seen before, or were not (docs/on-ramps.md).

        Args:
            messages: dicts of role and content, as `LLM.chat` takes them.
            auto: "exact": the answer of plain text; "choreo": its parts are read as they were
                encoded, wherever they stood; "off": nothing is reused, and nothing kept.
            rendering: variables of the chat template: `tools`, and its own.
            min_tokens: shorter parts are joined; None: 16.
            cut: where parts end: behind "messages", or also inside long ones, by their "content".
            context: with "choreo", behind what a part was encoded that is read: "seen" (None), what
                stood before it when it was first seen; "alone", the system messages at the head of
                the chat, so that no other chat has a say in the answer.
            options: options of `decode`: `sampling_params`, `adapter`, `role`, `save_as`, and
                with "choreo" `repair`.

        Returns:
            The answer, with the header before it; its usage counts what was encoded for the chat.

        Raises:
            ChoreoError: as `decode`.
        """
        return self._chats.answer(
            self, messages, auto, rendering or {}, min_tokens, cut, context, options
        )

    def reencode(self, message: Parent, **options: Unpack[ReadOptions]) -> Message:
        """Encode the tokens of a message anew, with parents of your choice: a clean copy.

        The copy carries traces of these parents, and of the text of `message`; none of what
        `message` was encoded with. `message` may be `(message, start, stop)`. Otherwise as
        `prefill`.
        """
        return self._run(asked_copy(message, options, self._denied))

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

    def save(
        self,
        messages: Sequence[Named] | None,
        uri: str | Path | SnapshotFolder,
        *,
        encodings: bool = False,
        progress: bool | None = None,
    ) -> Saved:
        """Keep messages in a folder; until all is written, it has those that it had before.

        Args:
            messages: a list of complete messages; None: all of the session.
            uri: a path, or a URL of fsspec's (`s3://…`, `memory://…`).
            encodings: keep keys and values, too: with them nothing is encoded again.
            progress: show a bar; None: on a terminal.

        Raises:
            DeniedMessageError: one carries traces of a message that is denied.
            KeptError: the storage failed, or keeps no such keys; what it held is as it was.
            PoolFullError: a message whose keys and values were evicted does not come back.
            ChoreoError: a message is not complete, or the session is in baseline mode.
        """
        snapshots = Snapshots(self._session, self._llm.llm_engine.vllm_config)
        steps = snapshots.save(
            messages, uri, encodings=encodings, progress=progress, denied=self._denied
        )
        return drive(steps, self._answer)

    def load(
        self,
        uri: str | Path | SnapshotFolder,
        *,
        on_mismatch: str = "refuse",
        progress: bool | None = None,
    ) -> list[Message]:
        """Load saved messages into this session, under their names; nothing is encoded for that.

        What has no keys and values in the folder, or no room here, is encoded when it is read.

        Args:
            on_mismatch: treatment of keys and values that another model made, or that were
                damaged: "refuse" the load, or "encode" their messages when they are read; those of
                a "variant" of the model, other weights of the same shapes, are taken as they are.
            progress: show a bar; None: on a terminal.

        Returns:
            The messages, in the order in which they were saved.

        Raises:
            UnknownKeptError: nothing was saved there.
            KeptError: another tenant's, another tokenizer's, or it does not fit; names the file.
            NameTakenError, TooLongError, AdapterError: what is in the way. Nothing was loaded.
        """
        snapshots = Snapshots(self._session, self._llm.llm_engine.vllm_config)
        steps = snapshots.load(uri, on_mismatch=on_mismatch, progress=progress)
        return drive(steps, self._answer)

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

    def _called(self, kind: str, content: Content | Calls, options: Mapping[str, Any]) -> Answers:
        return self._run(asked(kind, content, options, self._denied))

    def _run(self, asked: Asked[Answer]) -> Answer:
        if self._llm.llm_engine.has_unfinished_requests():
            raise ChoreoError(
                "other requests are enqueued, and their outputs would be lost: call "
                "llm.wait_for_completion() first",
                parameter="llm",
            )
        calls = self._session.plan(self._pictures.render(asked.calls))
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
        outcomes = self._generate([(call, call_prompt(call)) for call in calls], start)
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
        prompts = [(call, baseline.prompt_of(call, self._entries)) for call in calls]
        outcomes = self._generate(prompts, start)
        return [baseline_result(*pair) for pair in zip(calls, outcomes, strict=True)]

    def _generate(
        self, requests: Sequence[tuple[PlannedCall, Prompt]], start: float
    ) -> list[Outcome]:
        """Run `(call, prompt)` in one batch, until all of them are finished."""
        engine = self._llm.llm_engine
        first: dict[str, float] = {}
        outcomes: dict[str, Outcome] = {}
        try:
            for call, prompt in requests:
                params = engine_params(call, self.mode)
                engine.add_request(call.id, prompt, params, lora_request=call.adapter)
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

    def _answer(self, ask: Ask) -> object:
        """Do what a save or a load asks of the engine."""
        from vllm_choreo.engine.utility import of_workers

        if ask.what == "session":
            function, *args = ask.args
            return function(*args)
        if ask.what == "operation":
            return self._utility(*ask.args)
        if ask.what == "workers":
            return of_workers(self._llm, *ask.args)
        # Whoever reads a message has it encoded.
        self.free(self.prefill([0], parents=list(ask.args), mode="choreo", repair="none"))
        return None

    def _ids(self, messages: Sequence[Named]) -> list[str]:
        return [self._entries.complete("messages", message).id for message in messages]

    def _utility(self, operation: str, *args: object) -> Any:
        if self.mode == "baseline":
            return None
        from vllm_choreo.engine.utility import call

        return checked_answer(call(self._llm, operation, *args))


if TYPE_CHECKING:
    from vllm import LLM

    from vllm_choreo.api.picture_prompts import Prompt
    from vllm_choreo.api.protocol import SessionFacade

    _is_one: type[SessionFacade] = Choreography
