# SPDX-License-Identifier: Apache-2.0
"""Rates of engines, from what encoding and moving have taken. Knows no clock."""

from __future__ import annotations

from vllm_choreo.fleet.placement import Rates

# Seconds a token, until it has been measured: of a small model on a CPU.
_FIRST_ENCODE = 1e-3
# Of a move, until some have been measured: a guess in its favour, for none would be measured else.
_FIRST_START = 5e-3
_FIRST_BYTE = 1e-9
_NEWEST = 0.1  # weight of a measurement
_LARGE = 1e6  # bytes of a move that is guessed, beside an empty one


class _Line:
    """Least squares of seconds over bytes, in which old measurements count less and less."""

    def __init__(self, start: float, slope: float) -> None:
        self._weight = self._x = self._y = self._xx = self._xy = 0.0
        self.add(0.0, start)
        self.add(_LARGE, start + slope * _LARGE)

    def add(self, x: float, y: float) -> None:
        keep = 1 - _NEWEST
        self._weight = keep * self._weight + 1
        self._x = keep * self._x + x
        self._y = keep * self._y + y
        self._xx = keep * self._xx + x * x
        self._xy = keep * self._xy + x * y

    def fit(self) -> tuple[float, float]:
        """Start and slope; neither below 0."""
        mean_x, mean_y = self._x / self._weight, self._y / self._weight
        spread = self._xx / self._weight - mean_x * mean_x
        along = self._xy / self._weight - mean_x * mean_y
        slope = max(0.0, along / spread) if spread > 0 else 0.0
        start = mean_y - slope * mean_x
        if start < 0:  # then the line through 0
            return 0.0, self._xy / self._xx
        return start, slope


class MeasuredRates:
    """Seconds that engines take to encode tokens, and to be given their keys and values.

    Args:
        token_bytes: bytes of the keys and values of a token, until some have been moved.
        can_move: whether encodings can be moved at all.
        rest_tokens: tokens of a moved message that are encoded all the same: those that fill no
            block.

    Attributes:
        encode: seconds a token.
    """

    def __init__(self, token_bytes: float, can_move: bool = True, rest_tokens: float = 0.0) -> None:
        self.encode = _FIRST_ENCODE
        self.can_move = can_move
        self._token_bytes = token_bytes
        self._rest_tokens = rest_tokens
        self._moves = _Line(_FIRST_START, _FIRST_BYTE)

    def on_encoded(self, num_tokens: int, seconds: float) -> None:
        """Take in how long encoding took."""
        if num_tokens > 0 and seconds > 0:
            self.encode += _NEWEST * (seconds / num_tokens - self.encode)

    def on_moved(self, num_tokens: int, num_bytes: int, seconds: float) -> None:
        """Take in how long a move took."""
        self._token_bytes = num_bytes / num_tokens
        self._moves.add(num_bytes, seconds)

    def moves(self) -> tuple[float | None, float | None]:
        """Seconds of a move besides those of its bytes, and bytes a second; None: none are made."""
        if not self.can_move:
            return None, None
        start, per_byte = self._moves.fit()
        return start, 1 / per_byte if per_byte > 0 else None

    def bytes_of(self, num_tokens: int) -> int:
        """Bytes of the keys and values of so many tokens, about."""
        return int(num_tokens * self._token_bytes)

    def rates(self) -> Rates:
        """Rates for `place`, in seconds."""
        if not self.can_move:
            return Rates(encode=self.encode)
        start, per_byte = self._moves.fit()
        start += self.encode * self._rest_tokens
        return Rates(self.encode, move=per_byte * self._token_bytes, move_start=start)
