# SPDX-License-Identifier: Apache-2.0
"""Errors of refused calls. Imports neither torch nor vllm.

Every error names the parameter that was wrong, the value that was given, and what to do instead.
The same classes are raised by the client before a call is submitted and rebuilt from the report
of the engine (`ChoreoError.to_report`, `error_from_report`) when only the engine could tell.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# A value that is quoted in a message is cut here: a bad prompt may be a megabyte long.
_MAX_VALUE_CHARS = 200


class ChoreoError(ValueError):
    """A call that choreography refuses.

    Attributes:
        parameter: name of the argument that is wrong.
        value: the argument given, or its text when the error came from the engine.
        message: text that says what is wrong and what to do instead.
        results: one entry per call, its `Message` or its `ChoreoError`, of a parallel list of
            which a call failed inside the engine. Empty otherwise.
    """

    def __init__(self, message: str, *, parameter: str = "", value: object = None) -> None:
        super().__init__(message)
        self.message = message
        self.parameter = parameter
        self.value = value
        self.results: list[Any] = []

    def __str__(self) -> str:
        if not self.parameter:
            return self.message
        return f"{self.message} ({self.parameter}={_short(self.value)})"

    def __reduce__(self) -> tuple[Any, ...]:
        # Keyword arguments are lost by the default pickling of exceptions.
        return _rebuild, (type(self), self.message, self.parameter, self.value)

    def to_report(self) -> dict[str, str]:
        """Report of the error for the client: `parameter`, `value`, `message`, `type`, all str."""
        return {
            "parameter": self.parameter,
            "value": _short(self.value),
            "message": self.message,
            "type": type(self).__name__,
        }


class UnknownMessageError(ChoreoError):
    """A parent is no message of this session."""


class FreedMessageError(ChoreoError):
    """A parent was freed, or the session was closed."""


class OffsetError(ChoreoError):
    """`offsets` or `new_offset` is negative, not an int, or of the wrong length."""


class SpanError(ChoreoError):
    """A sub-span `(message, start, stop)` does not lie inside its message."""


class ChainError(ChoreoError):
    """A parent that was not encoded right behind those before it, in a model that reads no other.

    Such a model keeps a state in place of the keys of some layers.
    """


class RepairError(ChoreoError):
    """`repair` names no rule, or runs that its parents do not have."""


class PrefixError(ChoreoError):
    """The text of a request does not begin with the tokens that its parents stand for."""


class EmptyTokensError(ChoreoError):
    """`tokens` or `header` is empty."""


class NameTakenError(ChoreoError):
    """`save_as` names a message that exists already."""


class ParentFailedError(ChoreoError):
    """A parent was never completed, because its own call failed."""


class CyclicParentsError(ChoreoError):
    """A call names itself among its parents."""


class DeniedMessageError(ChoreoError):
    """A parent is, or carries traces of, a message that is denied to the call.

    `value` is the path: the ids from the denied message to the parent that was listed.
    """


class TooLongError(ChoreoError):
    """The parents and the new message do not fit into the model's context."""


class UnsupportedOptionError(ChoreoError):
    """A sampling option that does not make one message per call."""


class AdapterError(ChoreoError):
    """An adapter of another model, or that vLLM cannot load, or that such calls do not use."""


class UnsupportedModelError(ChoreoError):
    """The model's attention or position encoding cannot be choreographed."""


class UnsupportedVersionError(ChoreoError):
    """The installed vLLM is not the version that this package was written for."""


class PmlError(ChoreoError):
    """A schema or a prompt of the markup language that is wrong; says at which line and column."""

    def __str__(self) -> str:
        return self.message if self.value is None else super().__str__()


class UnknownSchemaError(ChoreoError):
    """There is no such schema: never registered, deleted, or somebody else's."""


class PoolFullError(ChoreoError):
    """The messages that the call reads do not fit into the KV cache together."""


class UnknownKeyError(ChoreoError):
    """A server was sent no API key, or none of its own."""


class UnknownSessionError(ChoreoError):
    """There is no such session: never opened, closed, expired, or somebody else's."""


class LimitError(ChoreoError):
    """A limit of the server or of the tenant is reached; the error names the setting."""


class KeptError(ChoreoError):
    """Saved messages do not fit, are damaged or cannot be reached; `value` names the file."""


class UnknownKeptError(KeptError):
    """Nothing was saved under this name, or a save of it was never finished."""


class EngineRestartedError(ChoreoError):
    """The engine that held the messages has ended; open a new session and make them again."""


_BY_NAME: dict[str, type[ChoreoError]] = {
    cls.__name__: cls
    for cls in (
        ChoreoError,
        UnknownMessageError,
        FreedMessageError,
        OffsetError,
        SpanError,
        ChainError,
        RepairError,
        PrefixError,
        EmptyTokensError,
        NameTakenError,
        ParentFailedError,
        CyclicParentsError,
        DeniedMessageError,
        TooLongError,
        UnsupportedOptionError,
        AdapterError,
        UnsupportedModelError,
        UnsupportedVersionError,
        PmlError,
        UnknownSchemaError,
        PoolFullError,
        UnknownSessionError,
        LimitError,
        KeptError,
        UnknownKeptError,
        EngineRestartedError,
    )
}


def error_from_report(report: Mapping[str, Any]) -> ChoreoError:
    """Rebuild the error that the engine reported under `choreo_error`.

    A type that this version does not know becomes a plain `ChoreoError` that names it, so that a
    newer engine never turns a refusal into a `KeyError` of the client.
    """
    name = str(report.get("type", "ChoreoError"))
    message = str(report.get("message", "the engine refused the call"))
    if name not in _BY_NAME:
        message = f"{name}: {message}"
    return _BY_NAME.get(name, ChoreoError)(
        message, parameter=str(report.get("parameter", "")), value=report.get("value")
    )


def _rebuild(cls: type[ChoreoError], message: str, parameter: str, value: object) -> ChoreoError:
    return cls(message, parameter=parameter, value=value)


def _short(value: object) -> str:
    """Text of a value for an error's message, cut if it is long; strings without quotes."""
    text = value if isinstance(value, str) else repr(value)
    return text if len(text) <= _MAX_VALUE_CHARS else text[:_MAX_VALUE_CHARS] + "…"
