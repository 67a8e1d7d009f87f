# SPDX-License-Identifier: Apache-2.0
"""`AsyncChoreography`: the methods of `Choreography` as coroutines, on a `vllm` AsyncLLM.

Calls may overlap, and a call may name a parent that is still being generated:

    draft = await c.submit(header="Draft:", parents=[task])
    review = await c.decode("Review:", parents=[task, draft])   # starts when the draft is complete

The engine starts such a call itself, without a round trip through the client. Only in baseline
mode, whose prompts are text, does the client wait for the parent before it submits.
"""

from __future__ import annotations

import copy
from collections.abc import AsyncGenerator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Unpack

from vllm_choreo.api.async_runner import AsyncRunner
from vllm_choreo.api.fleet import fleet_of
from vllm_choreo.api.fleet_runner import FleetRunner
from vllm_choreo.api.outcomes import Outcome, check_ttl
from vllm_choreo.api.pending import OutputQueue, Pending
from vllm_choreo.api.pictures import PictureRenderer
from vllm_choreo.api.restored import SessionRecord
from vllm_choreo.api.session import DEFAULT_PIN_SECONDS, Session
from vllm_choreo.api.snapshots import Snapshots
from vllm_choreo.chat.turns import ChatTurns
from vllm_choreo.errors import ChoreoError
from vllm_choreo.semantics.call import (
    Answer,
    Answers,
    Asked,
    CallSpec,
    Tokenized,
    asked,
    asked_copy,
    linked_specs,
    one_spec,
    submitted_spec,
)
from vllm_choreo.semantics.call_methods import AsyncCallMethods
from vllm_choreo.semantics.call_options import (
    Call,
    Calls,
    Content,
    DecodeOptions,
    Named,
    Parent,
    ReadOptions,
)
from vllm_choreo.semantics.message import Message, Piece, Saved
from vllm_choreo.semantics.session_options import AdapterGiven, RepairGiven, SessionOptions
from vllm_choreo.snapshot.steps import Ask, drive_async
from vllm_choreo.snapshot.storage import SnapshotFolder


class AsyncChoreography(AsyncCallMethods):
    """A tenant's session on an AsyncLLM. Arguments and rules are those of `Choreography`.

    Args:
        tenant: owner of the session; identical messages of one tenant are encoded once.
        adapter, placement, repair: defaults of calls that name none, see `Choreography`.
        options: all of these in one, and those that a server gives besides; None: these.
    """

    def __init__(
        self,
        async_llm: AsyncLLM,
        mode: str = "choreo",
        *,
        tenant: str = "",
        adapter: AdapterGiven = None,
        placement: str | None = None,
        repair: RepairGiven = None,
        options: SessionOptions | None = None,
    ) -> None:
        options = options or SessionOptions(
            mode=mode, tenant=tenant, adapter=adapter, placement=placement, repair=repair
        )
        self.mode = options.mode
        rule = options.repair
        self.repair = rule.to_json() if rule is not None and hasattr(rule, "to_json") else rule
        vllm_config = async_llm.vllm_config
        self._session = Session(
            async_llm.get_tokenizer(),
            vllm_config,
            options,
            lambda: async_llm.get_num_unfinished_requests(),
        )
        self._entries = self._session.entries
        self._pictures = PictureRenderer(self._session, async_llm)
        # Text of the baseline goes to any engine.
        fleet = None if self.mode == "baseline" else fleet_of(async_llm)
        self._runner: AsyncRunner = (
            AsyncRunner(async_llm, self._session)
            if fleet is None
            else FleetRunner(async_llm, self._session, fleet)
        )
        self._snapshots = Snapshots(self._session, vllm_config)
        self._denied: tuple[str, ...] = ()

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

    @property
    def placement(self) -> str | None:
        """Calls that use the session's adapter: "prefill", "decode" or "both"; None: no adapter."""
        return self._session.adapters.placement

    async def reencode(self, message: Parent, **options: Unpack[ReadOptions]) -> Message:
        """Encode a complete message anew with other parents: `Choreography.reencode`."""
        return await self._run(asked_copy(message, options, self._denied))

    def deny(self, *messages: Named) -> AsyncChoreography:
        """Return the session under a policy: `Choreography.deny`; also against pending calls."""
        view = copy.copy(self)
        view._denied = (*self._denied, *self._session.deniable(messages))
        return view

    async def submit(
        self,
        *,
        header: Content | None = None,
        tokens: Content | None = None,
        **options: Unpack[DecodeOptions],
    ) -> Pending:
        """Start one call and return at once: a decode of `header`, or a prefill of `tokens`.

        The handle can be named as a parent at once, and so can its `save_as` name.

        Raises:
            ChoreoError: the call is illegal, or a parent has failed by now. Reasons that only the
                engine knows, and parents that fail later, are raised when the handle is awaited.
        """
        return await self._submit_one(submitted_spec(header, tokens, options, self._denied))

    async def submit_all(
        self, calls: Sequence[Call | Mapping[str, Any] | CallSpec]
    ) -> list[Pending]:
        """Start calls of both kinds, of which later ones may name earlier ones, and return at once.

        Args:
            calls: dicts like those of a parallel list, each with one of the keys `header` (a
                decode), `tokens` and `copy_of` (a prefill); or `CallSpec`s.

        Raises:
            ChoreoError: one of them is illegal; nothing was submitted.
        """
        specs = await self._pictures.render_async(linked_specs(calls, self._denied))
        return await self._runner.submit(self._session.plan(specs, linked=True))

    async def stream_decode(
        self, header: Content, **options: Unpack[DecodeOptions]
    ) -> AsyncGenerator[Piece]:
        """Generate and yield `Piece`s; the last one carries the message.

        A caller that leaves the loop early ends the call; nothing of it is kept.
        """
        pending = await self._submit_one(one_spec("decode", header, options, self._denied))
        try:
            async for piece in pending.pieces():
                yield piece
        finally:
            await self.cancel([pending])

    def begin(self, header: Content | Tokenized, **options: Unpack[DecodeOptions]) -> Pending:
        """Reserve a decode whose request the caller hands to the engine himself.

        The request's parameters must pass through `pending.call.params.apply`; when the engine has
        it, call `submitted`, and give its last output to `conclude`, or end it with `cancel`.
        Meanwhile the handle can be named as a parent.

        Raises:
            ChoreoError: the call is illegal, or the session is in baseline mode.
        """
        if self.mode == "baseline":
            raise ChoreoError(
                "a session in baseline mode has no choreographed requests; open another one",
                parameter="mode",
                value=self.mode,
            )
        (call,) = self._session.plan([one_spec("decode", header, options, self._denied)])
        return self._runner.reserve(call)

    def part_of_prompt(
        self, prompt: MultiModalInput, start: int = 0, stop: int | None = None
    ) -> Tokenized:
        """Cut a call's content out of what vLLM has rendered: `PictureRenderer.part`."""
        return self._pictures.part(prompt, start, stop)

    async def place(self, pending: Pending) -> int | None:
        """Choose the engine of a call that `begin` reserved, when its parents are complete.

        Returns:
            The `data_parallel_rank` that its request must have; None: there is one engine.

        Raises:
            ChoreoError: a parent failed, or cannot be had in that engine.
        """
        return await self._runner.place(pending)

    async def submitted(self, pending: Pending, queue: OutputQueue) -> None:
        """Tell that the engine has the request of a call that `begin` reserved.

        From now on, ending the call or closing the session aborts the request.

        Args:
            queue: queue on which its outputs arrive, as `AsyncLLM.add_request` returns it.
        """
        await self._runner.submitted(pending, queue)

    async def conclude(self, pending: Pending, outcome: Outcome) -> Message:
        """Make the message of a request that was run by the caller of `begin`.

        Args:
            outcome: its last output, with all text and tokens.

        Raises:
            ChoreoError: the engine refused or ended the call.
        """
        await self._runner.conclude(pending, outcome)
        return await pending

    async def cancel(self, pending: Sequence[Pending]) -> None:
        """End calls that are running; nothing of them is kept."""
        await self._runner.cancel(pending)

    async def free(self, *messages: Named) -> None:
        """Free messages: `Choreography.free`."""
        ids = self._ids(messages)
        await self._runner.utility("free", self._session.id, ids)
        self._entries.freed(ids)

    async def evict(self, *messages: Named) -> None:
        """Drop cached keys and values: `Choreography.evict`."""
        await self._runner.utility("evict", self._session.id, self._ids(messages))

    async def pin(self, *messages: Named, ttl: float = DEFAULT_PIN_SECONDS) -> None:
        """Evict messages after all others, for `ttl` seconds: `Choreography.pin`."""
        await self._runner.utility("pin", self._session.id, self._ids(messages), check_ttl(ttl))

    async def unpin(self, *messages: Named) -> None:
        """Take pins back: `Choreography.unpin`."""
        await self._runner.utility("unpin", self._session.id, self._ids(messages))

    async def save(
        self,
        messages: Sequence[Named] | None,
        uri: str | Path | SnapshotFolder,
        *,
        encodings: bool = False,
        progress: bool | None = None,
    ) -> Saved:
        """Keep messages in a folder: `Choreography.save`. Files are written in a thread."""
        steps = self._snapshots.save(
            messages, uri, encodings=encodings, progress=progress, denied=self._denied
        )
        ids = list(self._entries.messages()) if messages is None else self._ids(messages)
        async with self._runner.one_engine(ids):
            return await drive_async(steps, self._answer)

    async def load(
        self,
        uri: str | Path | SnapshotFolder,
        *,
        on_mismatch: str = "refuse",
        progress: bool | None = None,
    ) -> list[Message]:
        """Load saved messages: `Choreography.load`. Files are read in a thread.

        Raises:
            UnsupportedOptionError: there are several engines, which could not make one of the
                messages again.
        """
        steps = self._snapshots.load(uri, on_mismatch=on_mismatch, progress=progress)
        async with self._runner.one_engine(()):
            return await drive_async(steps, self._answer)

    def restore(self, record: SessionRecord) -> None:
        """Go on with a session of another process, on several engines; none has its messages."""
        assert isinstance(self._runner, FleetRunner), "records are of sessions of several engines"
        recipes, messages = record.restored()
        self._session.restore(messages, record.gone, record.count)
        self._runner.restore(recipes)

    def message(self, named: Named) -> Message:
        """Return a complete message by its id or name."""
        return self._entries.complete("message", named)

    def engine_of(self, named: Named) -> int | None:
        """Number of the engine on which the call of a complete message ran.

        None: there is one engine, or the message was loaded.
        """
        return self._runner.engine_of(self.message(named).id)

    def is_live(self, message_id: str) -> bool:
        """Return whether a message of this id is complete or pending."""
        return self._entries.is_live(message_id)

    def messages(self) -> list[Message]:
        """All complete messages that are not freed, in the order in which they were named."""
        return list(self._entries.messages().values())

    async def provenance(self, named: Named) -> frozenset[str]:
        """Ids of all messages that a complete message carries traces of."""
        return self.message(named).provenance

    async def stats(self) -> dict[str, Any]:
        """Return the engine's numbers on this session's messages: `Choreography.stats`."""
        if self.mode == "baseline":
            return self._session.stats()
        stats: dict[str, Any] = await self._runner.utility("stats", self._session.id)
        return self._session.with_choices(stats)

    async def counts(self) -> dict[str, Any]:
        """The numbers of `stats` alone: `num_resident_tokens`, `num_pinned` and others."""
        return await self._runner.utility("counts", self._session.id) or {}

    async def close(self) -> None:
        """End the calls that are running and free all messages. Closing twice does nothing."""
        if self._entries.close():
            await self._runner.cancel_all()
            await self._runner.utility("close", self._session.id)

    async def abandon(self) -> None:
        """End the calls that are running, and leave the messages to another process."""
        if self._entries.close():
            await self._runner.cancel_all()

    async def __aenter__(self) -> AsyncChoreography:
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()

    async def _called(
        self, kind: str, content: Content | Calls, options: Mapping[str, Any]
    ) -> Answers:
        return await self._run(asked(kind, content, options, self._denied))

    async def _run(self, asked: Asked[Answer]) -> Answer:
        specs = await self._pictures.render_async(asked.calls)
        pending = await self._runner.submit(self._session.plan(specs))
        return asked.answer(await self._runner.results(pending))

    async def _submit_one(self, spec: CallSpec) -> Pending:
        specs = await self._pictures.render_async([spec])
        (pending,) = await self._runner.submit(self._session.plan(specs))
        return pending

    async def _answer(self, ask: Ask) -> object:
        """Do what a save or a load asks of the engine."""
        if ask.what == "session":
            function, *args = ask.args
            return function(*args)
        if ask.what == "operation":
            return await self._runner.utility(*ask.args)
        if ask.what == "workers":
            return await self._runner.of_workers(*ask.args)
        # Whoever reads a message has it encoded.
        await self.free(
            await self.prefill([0], parents=list(ask.args), mode="choreo", repair="none")
        )
        return None

    def _ids(self, messages: Sequence[Named]) -> list[str]:
        return [self._entries.complete("messages", message).id for message in messages]


if TYPE_CHECKING:
    from vllm.inputs.engine import MultiModalInput
    from vllm.v1.engine.async_llm import AsyncLLM

    from vllm_choreo.api.protocol import AsyncFacade

    _is_one: type[AsyncFacade] = AsyncChoreography
