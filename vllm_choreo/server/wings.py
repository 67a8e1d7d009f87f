# SPDX-License-Identifier: Apache-2.0
"""Wings of the server: routes that other packages add to it, found by entry points (docs/wings.md).

    [project.entry-points."vllm_choreo.routes"]
    pml = "vllm_choreo.pml.server.wing:register"

An entry point names a function without arguments that returns a `Wing`. It is called once in a
process, when a server starts; a wing that cannot be loaded ends the start.
"""

from __future__ import annotations

import asyncio
from argparse import Namespace
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import TYPE_CHECKING, Any, TypeAlias

from vllm_choreo.errors import ChoreoError, UnsupportedOptionError

if TYPE_CHECKING:
    from fastapi import APIRouter
    from starlette.datastructures import State
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.entrypoints.openai.completion.protocol import CompletionRequest
    from vllm.lora.request import LoRARequest

    from vllm_choreo.api.adapters import WithAdapter
    from vllm_choreo.server.running import Run
    from vllm_choreo.server.sessions import OpenSession

GROUP = "vllm_choreo.routes"

# Body of a request to a route of OpenAI's.
Body: TypeAlias = "ChatCompletionRequest | CompletionRequest"


@dataclass(frozen=True)
class PromptRequest:
    """A choreographed request of one of OpenAI's routes, before vLLM's handler reads its text.

    Attributes:
        state: state of the app, with all that the server and the wings keep there.
        session: session of the request.
        run: its calls.
        body: its body, as vLLM's model.
        arguments: arguments of its decode, by name. A wing takes out what is its own, and changes
            what its prompt changes of the others.
        adapter: adapter that the request's `model` names; None: the model itself.
    """

    state: State
    session: OpenSession
    run: Run
    body: ChatCompletionRequest | CompletionRequest
    arguments: dict[str, Any]
    adapter: LoRARequest | WithAdapter | str | None


@dataclass(frozen=True)
class BegunPrompt:
    """A prompt whose last call is the request's; calls before it are submitted.

    Attributes:
        header: token ids of the last call's header, in place of those of the request's text.
        usage: numbers of the answer's usage beside those of the message.
        clean_up: frees what the prompt made before its last call. It is given an event that is set
            when the engine has that call; None: there is nothing to free.
    """

    header: Sequence[int]
    usage: Mapping[str, int]
    clean_up: Callable[[asyncio.Event], Awaitable[None]] | None = None


@dataclass(frozen=True)
class PromptReader:
    """Reader of prompts that stand in the text of OpenAI's requests.

    Attributes:
        arguments: names of the arguments that are its own; a request gives each in `vllm_xargs`,
            under the key `choreo_NAME`. One of them makes a request the reader's.
        begin: plans the prompt of a request, and submits what comes before its last call. It raises
            `ChoreoError` if the request is refused.
    """

    arguments: tuple[str, ...]
    begin: Callable[[PromptRequest], Awaitable[BegunPrompt]]


@dataclass(frozen=True)
class Wing:
    """Routes, and what belongs to them.

    Attributes:
        router: the routes, see `choreo_router`.
        start: sets up what the routes need, on the server's state and command line. The state has
            `choreo`, `choreo_reader` and what vLLM keeps there.
        reader: reader of prompts on OpenAI's routes.
    """

    router: APIRouter
    start: Callable[[State, Namespace], Awaitable[None]] | None = None
    reader: PromptReader | None = None


@cache
def wings() -> tuple[Wing, ...]:
    """Load the wings that are installed, in the order of their names.

    Raises:
        ChoreoError: one of them cannot be loaded.
    """
    return tuple(map(_loaded, sorted(entry_points(group=GROUP), key=lambda point: point.name)))


def prompt_arguments() -> dict[str, str]:
    """Names of the arguments of all readers, by their keys in `vllm_xargs`."""
    names = (name for reader in _readers() for name in reader.arguments)
    return {f"choreo_{name}": name for name in names}


async def begin_prompt(request: PromptRequest) -> BegunPrompt | None:
    """Begin the prompt of a request; None: it has no argument of a reader.

    Raises:
        ChoreoError: the prompt is illegal, or two readers would have to read it.
    """
    asked = [r for r in _readers() if any(name in request.arguments for name in r.arguments)]
    if not asked:
        return None
    reader, *others = asked
    for other in others:
        name = next(name for name in other.arguments if name in request.arguments)
        raise UnsupportedOptionError(
            f"a request has one prompt: leave this out, or {', '.join(reader.arguments)}",
            parameter=name,
            value="given",
        )
    return await reader.begin(request)


def _readers() -> list[PromptReader]:
    return [wing.reader for wing in wings() if wing.reader is not None]


def _loaded(point: EntryPoint) -> Wing:
    try:
        wing = point.load()()
    except Exception as error:  # whatever another package raises
        raise _no_wing_error(point, f"{type(error).__name__}: {error}") from error
    if not isinstance(wing, Wing):
        raise _no_wing_error(point, f"it returned {type(wing).__name__}, and no Wing")
    return wing


def _no_wing_error(point: EntryPoint, reason: str) -> ChoreoError:
    return ChoreoError(
        f"the routes of a package cannot be added ({reason}): repair or uninstall the package",
        parameter=GROUP,
        value=f"{point.name} = {point.value}",
    )
