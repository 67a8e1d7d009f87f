# SPDX-License-Identifier: Apache-2.0
"""A judge model that compares two answers, asked twice: with either answer first.

A judge may prefer what it reads first. So an answer wins if it is preferred in both places; all
else is a tie. Where that is always so, its log-probabilities still tell which answer it prefers:
those of either place are added, so that what it thinks of places cancels out.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, TypeAlias

import httpx

from vllm_choreo.client.endpoint import Endpoint
from vllm_choreo.client.failures import content_of, no_answer
from vllm_choreo.errors import ChoreoError

Verdict: TypeAlias = Literal["A", "B", "tie"]

PROMPT = (
    "Two answers to one task are to be compared.\n\n# Task\n{task}\n\n# Answer A\n{first}\n\n"
    "# Answer B\n{second}\n\nWhich answer does the task better? Begin with {verdicts}."
)
_ROUTE = "/v1/chat/completions"
_MAX_TOKENS = 16
_NUM_LIKELIEST = 20  # what an OpenAI API tells at most
_VERDICT = re.compile(r"\b(?:(A|B)\b|(tie)\b)", re.IGNORECASE)


@dataclass(frozen=True)
class Judge:
    """A model behind an OpenAI API.

    Attributes:
        endpoint: address, key and timeout of the API.
        model: the name of the model there.
        may_tie: whether it is told that it may say "tie", which small models always say then.
    """

    endpoint: Endpoint
    model: str
    may_tie: bool = True

    def compare(self, task: str, first: str, second: str) -> Comparison:
        """Ask which of two answers is the better one, with either in the first place.

        Raises:
            ChoreoError: the judge does not answer.
        """
        verdicts = "A, B or TIE" if self.may_tie else "A or B"
        ask = partial(PROMPT.format, task=task, verdicts=verdicts)
        ahead, before = self._ask(ask(first=first, second=second))
        behind, after = self._ask(ask(first=second, second=first))
        margin = None if before is None or after is None else before - after
        return Comparison(verdict_of(ahead), verdict_of(behind), (ahead, behind), margin)

    def _ask(self, prompt: str) -> tuple[str, float | None]:
        """Words of the judge, and log-odds of A against B as the first token; see `margin_of`."""
        body = {
            "model": self.model,
            "messages": [{"role": "user", "content": prompt}],
            "temperature": 0,
            "max_tokens": _MAX_TOKENS,
        }
        likeliest = {"logprobs": True, "top_logprobs": _NUM_LIKELIEST}
        try:
            with httpx.Client(**self.endpoint.options()) as client:
                response = client.post(_ROUTE, json={**body, **likeliest})
                if response.status_code == httpx.codes.BAD_REQUEST:  # some APIs tell none
                    response = client.post(_ROUTE, json=body)
        except httpx.HTTPError as error:
            raise no_answer(self.endpoint, error) from error
        answer = content_of(self.endpoint, response.status_code, response.content)
        return _content(answer), margin_of(answer)


@dataclass(frozen=True)
class Comparison:
    """Verdicts of a judge on two answers, in either order.

    Attributes:
        ahead: its verdict where the first answer is A; None: it named none.
        behind: its verdict where the first answer is B.
        said: its words, both times.
        margin: log-odds by which it prefers the first answer, of both places together; None: it
            tells no log-probabilities, or of other tokens.
    """

    ahead: Verdict | None
    behind: Verdict | None
    said: tuple[str, str]
    margin: float | None = None

    @property
    def winner(self) -> int:
        """1 or 2, the answer that is preferred in both places; 0: a tie."""
        return {("A", "B"): 1, ("B", "A"): 2}.get((self.ahead or "", self.behind or ""), 0)

    @property
    def is_torn(self) -> bool:
        """True if the same place is preferred both times."""
        return self.ahead in ("A", "B") and self.ahead == self.behind


def verdict_of(said: str) -> Verdict | None:
    """The first of "A", "B" and "tie" that a judge names; None if it names none.

    The article "a" is none: a lower-case letter counts at the very beginning alone.
    """
    for found in _VERDICT.finditer(said):
        if found[2]:
            return "tie"
        if found[1].isupper() or not re.search(r"\w", said[: found.start()]):
            return "A" if found[1].upper() == "A" else "B"
    return None


def margin_of(answer: Mapping[str, Any]) -> float | None:
    """Log-odds of A against B as the first token of an answer; None if it does not tell both."""
    try:
        likeliest = answer["choices"][0]["logprobs"]["content"][0]["top_logprobs"]
        found = {str(one["token"]): float(one["logprob"]) for one in likeliest}
        return found["A"] - found["B"]
    except (LookupError, TypeError, ValueError):
        return None


def _content(answer: Mapping[str, Any]) -> str:
    try:
        return str(answer["choices"][0]["message"]["content"] or "")
    except (LookupError, TypeError) as error:
        raise ChoreoError(
            "the judge's answer is no chat completion: give the address of an OpenAI API",
            parameter="judge",
            value=str(answer)[:200],
        ) from error
