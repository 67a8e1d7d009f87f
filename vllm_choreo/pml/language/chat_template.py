# SPDX-License-Identifier: Apache-2.0
"""Text that the model's own chat template writes around the turns of schemas and prompts.

A template is a program over a whole conversation. It is run on turns that hold a mark each; what
stands between the marks is what it writes around them:

    <|im_start|>system⏎ MARK <|im_end|>⏎ <|im_start|>user⏎ MARK <|im_end|>⏎ …
    '----- before ----'      '-- after -' '---- before ---'

What is written around a turn of a schema is encoded with the schema, hence must not depend on which
modules a prompt takes: `ChatTemplate.rest` checks that for each prompt. So a schema's turns are
written as with a turn of the user behind them: where a conversation ends, some templates add to an
answer, or refuse it.

Some templates write nothing that could be encoded before a conversation is known: they move the
system's text into the last turn of the user, or want users and the model to take turns. Under them
every turn of a schema, and of its prompts, is written as it stands: `ChatTurns.row`.

`chat/marks.py` finds given contents in a rendered chat; here there are none yet, and what ends a
turn is told from what begins the next one: so the marks are the same, and the rest is not.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise

from vllm_choreo.chat.marks import glues, mark
from vllm_choreo.chat.template import TemplatedTokenizer, render_chat
from vllm_choreo.chat.turns import ChatTurns, turns_of_tokenizer
from vllm_choreo.errors import ChoreoError, PmlError

# Conversations that are rendered to find out where one may end; each takes its length in time.
_MAX_ENDS = 64
_MAX_TOLD = 16  # turns, in an error


class ChatTemplate:
    """The chat template of a model.

    Args:
        tokenizer: tokenizer of transformers, or another object with its `apply_chat_template`.
        template: the template to use instead of the tokenizer's own.
    """

    def __init__(self, tokenizer: TemplatedTokenizer, template: str | None = None) -> None:
        self._tokenizer = tokenizer
        self._template = template
        self._turns: ChatTurns | None = None
        self._rendered = lru_cache(maxsize=256)(self._render)

    def around(self, roles: Sequence[str]) -> list[tuple[str, str]]:
        """Texts that are written before and after each turn of a conversation.

        Args:
            roles: roles of its turns.

        Raises:
            PmlError: the model has no template, or its template refuses such a conversation.
        """
        if not roles:
            return []
        try:
            followed, pieces = self._followed(tuple(roles))
        except PmlError as refusal:
            return self._standing((*roles, "user"), refusal)[: len(roles)]
        made, before = [], pieces[0]
        # A template writes the same between the same two roles, as a rule, and then it would end a
        # conversation there alike, too: so it is not run for every turn. Where it would not, what
        # is between them is only divided otherwise.
        ends: dict[tuple[str, str, str], str | None] = {}
        for number, (role, following) in enumerate(pairwise(followed), 1):
            between = pieces[number]
            # What would end the conversation here belongs to the turn, all else to the next one.
            if (kind := (role, following, between)) not in ends:
                if len(ends) == _MAX_ENDS:
                    raise PmlError(
                        "the model's chat template writes something else between all turns: make "
                        f"it {_MAX_ENDS} turns at most",
                        parameter="chat_template",
                        value=f"{len(roles)} turns",
                    )
                ends[kind] = self._end(followed[:number])
            end = ends[kind]
            after = end if end is not None and between.startswith(end) else None
            if after is None:
                after = between.removesuffix(self._user_opening(following))
            made.append((before, after))
            before = between[len(after) :]
        return [*made, (before, pieces[-1])][: len(roles)]

    def _followed(self, roles: tuple[str, ...]) -> tuple[tuple[str, ...], list[str]]:
        """The turns, with one of the user behind them if the template writes that; its texts."""
        try:
            followed = (*roles, "user")
            return followed, self._pieces(followed, False)
        except PmlError:
            return roles, self._pieces(roles, False)

    def _user_opening(self, role: str) -> str:
        """Text that opens a user's turn; "" for other roles, or where there is none."""
        if role != "user":
            return ""
        try:
            return turns_of_tokenizer(self._tokenizer, self._template).user_opening
        except ChoreoError:
            return ""

    def _standing(self, roles: Sequence[str], refusal: PmlError) -> list[tuple[str, str]]:
        """Texts around turns as they stand.

        Raises:
            PmlError: the refusal, for the template writes no turns that stand by themselves.
        """
        if self._turns is None:
            try:
                self._turns = turns_of_tokenizer(self._tokenizer, self._template)
            except ChoreoError:
                raise refusal from None
        return self._turns.row(roles)

    def rest(
        self, kept: Sequence[tuple[str, str, str]], roles: Sequence[str], is_open: bool, ends: bool
    ) -> list[str]:
        """Texts that are written from the end of a schema's turns on.

        Args:
            kept: role, text before and text after, for each turn of the schema that the prompt has.
            roles: roles of the prompt's own turns.
            is_open: whether the answer begins with the last turn, which is not closed.
            ends: whether the model's turn begins at the end.

        Returns:
            The texts before the first of the prompt's turns, between them, and after the last one.

        Raises:
            PmlError: the schema's turns would be written otherwise in this prompt.
        """
        everything = (*(role for role, _, _ in kept), *roles)
        if not everything:
            return [""]
        first = len(kept)
        try:
            pieces = self._pieces(everything, ends)
            _check_kept(pieces, kept, everything)
        except PmlError as refusal:
            standing = self._standing(everything, refusal)
            if standing[:first] != [(before, after) for _, before, after in kept]:
                raise
            pieces = self._standing_pieces(standing, is_open, ends)
        before_own = pieces[first].removeprefix(kept[-1][2] if kept else "")
        made = [before_own, *pieces[first + 1 :]]
        if is_open:
            made[-1] = ""
        return made

    def _standing_pieces(
        self, standing: Sequence[tuple[str, str]], is_open: bool, ends: bool
    ) -> list[str]:
        """Texts before the first content, between the contents, and behind the last one."""
        assert self._turns is not None
        openings = [before for before, _ in standing]
        if is_open:
            openings[-1] = self._turns.opened_answer
        closings = ["", *(after for _, after in standing)]
        openings.append(self._turns.answer if ends else "")
        return [after + before for after, before in zip(closings, openings, strict=True)]

    def _end(self, roles: tuple[str, ...]) -> str | None:
        """Text that ends a conversation; None: it may not end here, as after the system's turn."""
        try:
            return self._pieces(roles, False)[-1]
        except PmlError:
            return None

    def _pieces(self, roles: tuple[str, ...], ends: bool) -> list[str]:
        """Texts before the first mark, between the marks, and after the last one."""
        pieces, numbers = glues(self._rendered(roles, ends))
        for number, role in enumerate(roles):
            if numbers[number : number + 1] != [number]:
                raise PmlError(
                    "the model's chat template leaves a turn out, writes one twice, or moves it: "
                    "let a turn of the user be the last, or give another template",
                    parameter="chat_template",
                    value=role,
                )
        return pieces

    def _render(self, roles: tuple[str, ...], ends: bool) -> str:
        def refusal(error: Exception) -> PmlError:
            return PmlError(
                f"the model's chat template refuses these turns ({error}): begin with the user's, "
                "and let users and the model take turns",
                parameter="chat_template",
                value=_roles_in_short(roles),
            )

        turns = [{"role": r, "content": mark(n)} for n, r in enumerate(roles)]
        more = {} if self._template is None else {"chat_template": self._template}
        return render_chat(self._tokenizer, turns, ends, refusal, **more)


def _check_kept(
    pieces: Sequence[str], kept: Sequence[tuple[str, str, str]], roles: Sequence[str]
) -> None:
    """Check that a conversation begins with the turns of its schema.

    Raises:
        PmlError: the template writes them otherwise.
    """
    expected = [""]
    for _, before, after in kept:
        expected[-1] += before
        expected.append(after)
    first = len(kept)
    if pieces[:first] != expected[:first] or not pieces[first].startswith(expected[first]):
        raise PmlError(
            "the model's chat template writes the schema's turns otherwise in this prompt: "
            "do not put turns into modules, or take all of them",
            parameter="prompt",
            value=_roles_in_short(roles),
        )


def _roles_in_short(roles: Sequence[str]) -> str:
    more = f", … ({len(roles)} turns)" if len(roles) > _MAX_TOLD else ""
    return ", ".join(roles[:_MAX_TOLD]) + more
