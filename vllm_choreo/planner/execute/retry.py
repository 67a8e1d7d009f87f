# SPDX-License-Identifier: Apache-2.0
"""Retries: which failed calls are made again, and when."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from vllm_choreo.errors import (
    ChoreoError,
    EngineRestartedError,
    FreedMessageError,
    LimitError,
    ParentFailedError,
    PoolFullError,
    UnknownMessageError,
    UnknownSessionError,
)

# The worker has lost the messages that it held.
MESSAGES_GONE = (EngineRestartedError, FreedMessageError, UnknownMessageError, UnknownSessionError)
# Not the caller's fault: another time, or on another worker, the same call may succeed.
_PASSING = (*MESSAGES_GONE, LimitError, ParentFailedError, PoolFullError)


def may_pass(error: BaseException) -> bool:
    """Return whether a failure is worth another try: a refusal of the call's content is not."""
    if isinstance(error, ChoreoError):
        return isinstance(error, _PASSING)
    return isinstance(error, (OSError, TimeoutError, RuntimeError))


@dataclass(frozen=True)
class Retry:
    """Policy of retries.

    Attributes:
        times: how often a call is made again.
        wait: seconds before the first retry; twice as long before each one after.
        on: tells whether an error is worth a retry.
    """

    times: int = 2
    wait: float = 0.0
    on: Callable[[BaseException], bool] = may_pass

    def seconds(self, error: BaseException, tried: int) -> float | None:
        """Seconds to wait before the next try; None: give up.

        Args:
            error: error that the call has raised.
            tried: number of times that it was made by now.
        """
        if tried > self.times or not self.on(error):
            return None
        return float(self.wait * 2 ** (tried - 1))
