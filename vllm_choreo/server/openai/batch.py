# SPDX-License-Identifier: Apache-2.0
"""Choreography in `vllm run-batch`: the lines of a file are calls of one session.

vLLM's batch runner starts all lines at once. A line that names messages of other lines, wherever in
the file they stand, begins when the calls that make them have begun; the engine then lets it wait
until they are complete.

    line 1  save_as a ---------------------- begun .............. complete, freed after line 3
    line 2  save_as b, parents a   waits --- begun .............. complete, freed after line 3
    line 3  parents b, a           waits ----------- begun ...... complete, freed
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from starlette.datastructures import State
from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat
from vllm.entrypoints.serve.engine.protocol import ErrorInfo, ErrorResponse
from vllm.v1.engine.exceptions import EngineDeadError

from vllm_choreo.errors import (
    ChoreoError,
    CyclicParentsError,
    NameTakenError,
    ParentFailedError,
    UnknownSessionError,
    UnsupportedOptionError,
)
from vllm_choreo.semantics.message import Message
from vllm_choreo.server.errors import error_json
from vllm_choreo.server.guard import choreo_keys
from vllm_choreo.server.openai.answering import Answer, in_terms_of_xargs
from vllm_choreo.server.openai.engine_client import CallClient
from vllm_choreo.server.openai.handlers import run_call
from vllm_choreo.server.openai.reading import check_form, read_arguments
from vllm_choreo.server.running import Run
from vllm_choreo.server.sessions import OpenSession, Sessions
from vllm_choreo.server.wings import prompt_arguments

if TYPE_CHECKING:
    from starlette.requests import Request
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.v1.engine.async_llm import AsyncLLM


def init_batch(state: State, llm: AsyncLLM) -> None:
    """Let vLLM's batch runner choreograph.

    Args:
        state: state of the runner, with `choreo`, the sessions.
        llm: an engine client that takes choreographed requests.
    """
    serving = state.openai_serving_chat
    # vLLM names the class of its handler; the subclass only adds to it.
    serving.__class__ = ChoreoBatchChat
    serving.choreo_llm, serving.choreo_batch = llm, Batch(state.choreo)


class ChoreoBatchChat(OpenAIServingChat):
    """vLLM's handler of the lines for /v1/chat/completions."""

    choreo_batch: Batch
    choreo_llm: AsyncLLM

    async def create_chat_completion(
        self, request: ChatCompletionRequest, raw_request: Request | None = None
    ) -> Answer:
        if not choreo_keys(request.vllm_xargs):
            return await super().create_chat_completion(request, raw_request)
        batch = self.choreo_batch
        try:
            return await batch.answer(self, request)
        except (ChoreoError, EngineDeadError) as error:
            ours = in_terms_of_xargs(error)
            batch.sessions.refused(ours)
            content = error_json(ours)
            fields = {name: content[name] for name in ("message", "type", "param", "code")}
            return ErrorResponse(error=ErrorInfo(**fields))


@dataclass(eq=False)
class _Line:
    """A choreographed line.

    Attributes:
        name: name of its message; None: it has none.
        needs: the names of messages that it reads or denies.
        begun: True once the engine has its call; False: it failed before.
        message: the message that it made, until it is freed.
    """

    name: str | None
    needs: frozenset[str]
    begun: asyncio.Future[bool] = field(default_factory=asyncio.Future)
    message: Message | None = None


class Batch:
    """The choreographed lines of a file."""

    def __init__(self, sessions: Sessions) -> None:
        self.sessions = sessions
        self._session: OpenSession | None = None
        self._makers: dict[str, _Line] = {}  # by the names of their messages
        self._num_readers: Counter[str] = Counter()  # lines that are to read a message still
        self._endless: set[str] | None = None  # see `_endless`; None: not known yet

    async def answer(self, serving: ChoreoBatchChat, body: ChatCompletionRequest) -> Answer:
        """Answer a line.

        Raises:
            ChoreoError: the line is refused, or failed.
        """
        line = self._announce(body.vllm_xargs)
        try:
            # The runner has made tasks of all lines before the first of them runs: after one turn
            # of the event loop each has announced itself.
            await asyncio.sleep(0)
            arguments = _arguments(body)
            await self._wait_for_parents(line)
            return await self._run(line, serving, body, arguments)
        finally:
            if not line.begun.done():
                line.begun.set_result(False)
            await self._ended(line)

    def _announce(self, xargs: dict[str, Any]) -> _Line:
        """Enter a line, before any of them waits for another.

        Raises:
            NameTakenError: a line before makes a message of this name.
        """
        given = xargs.get("choreo_save_as")
        name = given if isinstance(given, str) else None
        if name in self._makers:
            raise NameTakenError(
                "another line of the file has this name: choose another name",
                parameter="save_as",
                value=name,
            )
        line = _Line(name, frozenset(_names(xargs)))
        if name is not None:
            self._makers[name] = line
        self._num_readers.update(line.needs)
        self._endless = None
        return line

    async def _wait_for_parents(self, line: _Line) -> None:
        """Wait until the lines that make a line's messages have begun.

        Raises:
            CyclicParentsError: a line waits for itself.
            ParentFailedError: a line that was to make a parent was refused.
        """
        if self._endless is None:
            self._endless = _endless(self._makers)
        for name in sorted(line.needs & self._makers.keys()):
            if name in self._endless:
                raise CyclicParentsError(
                    "the line that makes this message waits for itself, through the messages that "
                    "it names: name only what can be made before",
                    parameter="parents",
                    value=name,
                )
            if not await self._makers[name].begun:
                raise ParentFailedError(
                    "the line that makes this message was refused", parameter="parents", value=name
                )

    async def _run(
        self,
        line: _Line,
        serving: ChoreoBatchChat,
        body: ChatCompletionRequest,
        arguments: dict[str, Any],
    ) -> Answer:
        session = self._session = self._session or self.sessions.open("", is_limited=False)
        client = CallClient(serving.choreo_llm, Run(self.sessions, session), arguments)
        client.on_submitted = lambda: line.begun.set_result(True)
        answer = await run_call(serving, OpenAIServingChat.create_chat_completion, body, client)
        line.message = client.message
        return answer

    async def _ended(self, line: _Line) -> None:
        """Free what no line is to read any more; nobody can name a message without a name."""
        self._num_readers.subtract(line.needs)
        lines = [line, *(self._makers[name] for name in line.needs & self._makers.keys())]
        for maker in lines:
            message = maker.message
            if message is not None and not (maker.name and self._num_readers[maker.name]):
                assert self._session is not None
                maker.message = None
                with suppress(ChoreoError, EngineDeadError):
                    await self._session.choreography.free(message)


def _names(xargs: dict[str, Any]) -> Iterator[str]:
    """The messages that a line names."""
    for key in ("choreo_parents", "choreo_deny"):
        given = xargs.get(key)
        for named in given if isinstance(given, list) else ():
            if isinstance(named, str):
                yield named.partition("[")[0]


def _endless(makers: Mapping[str, _Line]) -> set[str]:
    """Messages whose lines wait for one another in a circle, and those that wait for such."""
    readers: dict[str, list[str]] = {name: [] for name in makers}
    num_missing = {name: len(line.needs & makers.keys()) for name, line in makers.items()}
    for name, line in makers.items():
        for needed in line.needs & makers.keys():
            readers[needed].append(name)
    ready = [name for name, count in num_missing.items() if not count]
    for name in ready:  # it grows
        for reader in readers[name]:
            num_missing[reader] -= 1
            if not num_missing[reader]:
                ready.append(reader)
    return makers.keys() - set(ready)


def _arguments(body: ChatCompletionRequest) -> dict[str, Any]:
    """The arguments of the decode that a line asks for.

    Raises:
        ChoreoError: the line is refused.
    """
    if body.stream:
        raise UnsupportedOptionError("a batch has no streams", parameter="stream", value=True)
    check_form(body)
    # vLLM has read the line: true is 1 by now.
    arguments, session_id = read_arguments(body.vllm_xargs)
    for name in prompt_arguments().values():
        if name in arguments:
            raise UnsupportedOptionError(
                "a file of requests knows no schemas or other wings: send prompts to a server",
                parameter=name,
                value=arguments[name],
            )
    if session_id is not None:
        raise UnknownSessionError(
            "the lines of a file share one session: leave the key out", parameter="session"
        )
    return arguments
