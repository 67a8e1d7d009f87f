# SPDX-License-Identifier: Apache-2.0
"""A facade in front of another one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Self, Unpack

from vllm_choreo.api.protocol import Facade, SessionFacade
from vllm_choreo.semantics.call import is_list_of_calls
from vllm_choreo.semantics.call_options import DecodeOptions, ReadOptions
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

    def prefill(self, tokens: Any, **options: Unpack[ReadOptions]) -> Any:
        """See `Choreography.prefill`."""
        return _made(self._prefill, "tokens", tokens, options)

    def decode(self, header: Any, **options: Unpack[DecodeOptions]) -> Any:
        """See `Choreography.decode`."""
        return _made(self._decode, "header", header, options)

    def free(self, *messages: Any) -> None:
        """See `Choreography.free`."""
        self._c.free(*messages)

    def _prefill(self, calls: list[Item]) -> Sequence[Message]:
        """What comes of calls, in order; one that was made by itself is a list of one."""
        made: Sequence[Message] = self._c.prefill(calls)
        return made

    def _decode(self, calls: list[Item]) -> Sequence[Message]:
        """As `_prefill`."""
        made: Sequence[Message] = self._c.decode(calls)
        return made


class PassingSession(FacadeWrapper):
    """The same in front of a session, which ends with this one."""

    def __init__(self, c: SessionFacade) -> None:
        super().__init__(c)
        self._session = c

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: Any) -> None:
        self._session.close()


def _made(
    make: Callable[[list[Item]], Sequence[Message]], name: str, content: Any, options: Any
) -> Any:
    is_list = is_list_of_calls(content)
    items = content if is_list else [{name: content}]
    messages = make([{**options, **item} for item in items])
    return messages if is_list else messages[0]


if TYPE_CHECKING:
    _is_one: type[Facade] = FacadeWrapper
