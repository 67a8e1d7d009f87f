# SPDX-License-Identifier: Apache-2.0
"""A facade in front of another one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self, Unpack, overload

from vllm_choreo.api.protocol import Facade, SessionFacade
from vllm_choreo.semantics.call import is_list_of_calls
from vllm_choreo.semantics.call_options import (
    Calls,
    Content,
    DecodeOptions,
    Named,
    ReadOptions,
)
from vllm_choreo.semantics.message import Message

Item = dict[str, Any]  # of a list of calls: what one is given, and its options


class FacadeWrapper:
    """A `Facade` that hands calls to `c`; subclasses change them, or what comes of them.

    Args:
        c: a facade, in any mode.
    """

    def __init__(self, c: Facade) -> None:
        self.mode = c.mode
        self._c = c

    @overload
    def prefill(self, tokens: Content, **options: Unpack[ReadOptions]) -> Message: ...

    @overload
    def prefill(self, tokens: Calls, **options: Unpack[ReadOptions]) -> list[Message]: ...

    def prefill(
        self, tokens: Content | Calls, **options: Unpack[ReadOptions]
    ) -> Message | list[Message]:
        """Encode a message, or a list of them: `Choreography.prefill`."""
        return _made(self._prefill, "tokens", tokens, options)

    @overload
    def decode(self, header: Content, **options: Unpack[DecodeOptions]) -> Message: ...

    @overload
    def decode(self, header: Calls, **options: Unpack[DecodeOptions]) -> list[Message]: ...

    def decode(
        self, header: Content | Calls, **options: Unpack[DecodeOptions]
    ) -> Message | list[Message]:
        """Encode a header and generate, or run a list of such calls: `Choreography.decode`."""
        return _made(self._decode, "header", header, options)

    def free(self, *messages: Named) -> None:
        """Free messages: `Choreography.free`."""
        self._c.free(*messages)

    def _prefill(self, calls: list[Item]) -> Sequence[Message]:
        """Prefill a list of calls, in order; a single call comes as a list of one."""
        return self._c.prefill(calls)

    def _decode(self, calls: list[Item]) -> Sequence[Message]:
        """Decode a list of calls, in order; a single call comes as a list of one."""
        return self._c.decode(calls)


class PassingSession(FacadeWrapper):
    """Wrapper of a session, which ends with this one."""

    def __init__(self, c: SessionFacade) -> None:
        super().__init__(c)
        self._session = c

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: Any) -> None:
        self._session.close()


def _made(
    make: Callable[[list[Item]], Sequence[Message]],
    name: str,
    content: Any,
    options: Mapping[str, Any],
) -> Any:
    is_list = is_list_of_calls(content)
    items = content if is_list else [{name: content}]
    messages = make([{**options, **item} for item in items])
    return messages if is_list else messages[0]


if TYPE_CHECKING:
    _is_one: type[Facade] = FacadeWrapper
