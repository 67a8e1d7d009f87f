# SPDX-License-Identifier: Apache-2.0
"""`ChatTurns`: what a model's chat template writes around one turn that stands by itself.

A choreography writes each turn as a message of its own, in any order; a template writes a whole
conversation. What it writes around a turn is told from conversations that hold a mark in place of
each content:

    <bos>                <|start|>user<|message|> MARK <|end|> <|start|>assistant
    '- start, once -'    '------ opening -------'      'close' '- begins an answer'

Where a template has no turn for the system's text, as it refuses one or writes it into a turn of
the user, that text is a turn of the user.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise, takewhile
from typing import TypeAlias

from vllm_choreo.chat.marks import glues, mark
from vllm_choreo.chat.template import TemplatedTokenizer, TurnTemplate, render_chat
from vllm_choreo.errors import ChoreoError

# Renders turns of these roles, contents being marks, as text; the flag begins the model's turn.
Render: TypeAlias = Callable[[Sequence[Mapping[str, str]], bool], str]
_CHATML = TurnTemplate()


@dataclass(frozen=True)
class ChatTurns:
    """Text around the turns of a chat; by default ChatML's (SmolLM2, Qwen and others).

    Attributes:
        start: text that begins every conversation: a BOS token, and turns that are always there.
        system_opening, system_closing: text before and behind what the system says.
        user_opening, user_closing: text before and behind what a user says.
        answer: text that begins the model's turn, for it to go on from.
        opened_answer: the same where the first words of the answer are given.
        assistant_opening, assistant_closing: text around an answer that was given before.
        folded_opening, folded_closing: text around what the system says where the template writes
            it into the user's turn behind; "" where it does not.
    """

    start: str = ""
    system_opening: str = _CHATML.begin("system")
    system_closing: str = _CHATML.closing
    user_opening: str = _CHATML.begin("user")
    user_closing: str = _CHATML.closing
    answer: str = _CHATML.begin("assistant")
    opened_answer: str = _CHATML.begin("assistant")
    assistant_opening: str = _CHATML.begin("assistant")
    assistant_closing: str = _CHATML.closing
    folded_opening: str = ""
    folded_closing: str = ""

    def system(self, text: str) -> str:
        """A whole system turn."""
        return f"{self.system_opening}{text}{self.system_closing}"

    def user(self, text: str) -> str:
        """A whole user turn."""
        return f"{self.user_opening}{text}{self.user_closing}"

    def restated(self, question: str) -> str:
        """A user turn that says once more what was asked: encoded by the reader, at the end."""
        return self.user(f"Once more, the question: {question}")

    def assistant(self, opening: str = "") -> str:
        """The beginning of an assistant turn, for the model to go on from."""
        return self.opened_answer + opening if opening else self.answer

    def around(self, role: str) -> tuple[str, str]:
        """Texts before and behind a turn of a role: "system", "user" or "assistant".

        Raises:
            ChoreoError: another role, which templates write in many ways.
        """
        texts = self.to_json()
        if f"{role}_opening" not in texts or role == "folded":
            raise ChoreoError(
                "what the model's template writes around such a turn is not known: give the text "
                "to the user, with what the model knows it by",
                parameter="role",
                value=role,
            )
        return texts[f"{role}_opening"], texts[f"{role}_closing"]

    def ends_turn(self, text: str) -> bool:
        """Tell if a text ends with what closes a turn; turns that nothing closes do not end."""
        closings = (self.system_closing, self.user_closing, self.assistant_closing)
        return text.endswith(tuple(filter(None, closings)))

    def row(self, roles: Sequence[str]) -> list[tuple[str, str]]:
        """Texts before and behind each turn of a conversation of turns as they stand.

        A system's text that a user's turn follows is a part of that turn where the template writes
        it into one.
        """
        texts: list[tuple[str, str]] = []
        is_folded = False
        for role, following in pairwise((*roles, "")):
            opening, closing = self.around(role)
            if is_folded:
                opening = ""
            folds = bool(self.folded_opening or self.folded_closing)
            is_folded = folds and (role, following) == ("system", "user")
            if is_folded:
                opening, closing = self.folded_opening, self.folded_closing
            texts.append((opening, closing) if texts else (self.start + opening, closing))
        return texts

    def answer_alone(self) -> str:
        """The beginning of an assistant turn that is a call's whole header, hence never empty."""
        return self.answer or self.assistant("Answer:")

    def to_json(self) -> dict[str, str]:
        """The texts by their names, as plain data."""
        return asdict(self)

    @classmethod
    def from_json(cls, texts: Mapping[str, object]) -> ChatTurns:
        """Read what `to_json` gives.

        Raises:
            ChoreoError: a name is not known, or a value is no text.
        """
        for name, text in texts.items():
            if name not in cls.__dataclass_fields__ or not isinstance(text, str):
                raise ChoreoError(
                    f"the texts around turns are {', '.join(cls.__dataclass_fields__)}",
                    parameter="turns",
                    value={name: text},
                )
        return cls(**{name: str(text) for name, text in texts.items()})


def turns_of_tokenizer(tokenizer: TemplatedTokenizer, template: str | None = None) -> ChatTurns:
    """Texts around the turns that a tokenizer's chat template writes.

    Args:
        template: template in Jinja to use instead of the tokenizer's own.

    Raises:
        ChoreoError: see `chat_turns`.
    """
    more = {} if template is None else {"chat_template": template}

    def render(turns: Sequence[Mapping[str, str]], ends: bool) -> str:
        return render_chat(tokenizer, turns, ends, _refusal, **more)

    return chat_turns(render)


def chat_turns(render: Render) -> ChatTurns:
    """Texts around the turns that a template writes.

    Raises:
        ChoreoError: there is no template, or it does not write questions and answers in turns.
    """
    first, question_end, next_question, closing = _pieces(render, ("user", "assistant", "user"))
    opening = _user_opening(
        first, next_question, _pieces(render, ("user", "assistant"))[2], closing
    )
    begins = _pieces(render, ("user",), ends=True)[1].removeprefix(closing)
    assistant_opening = question_end.removeprefix(closing)
    start, system_texts = _system_texts(render, first.removesuffix(opening), opening, closing)
    return ChatTurns(
        start=start,
        user_opening=opening,
        user_closing=closing,
        answer=begins,
        opened_answer=begins or assistant_opening,
        assistant_opening=assistant_opening,
        assistant_closing=next_question.removesuffix(opening),
        **system_texts,
    )


def _system_texts(
    render: Render, start: str, user_opening: str, user_closing: str
) -> tuple[str, dict[str, str]]:
    """The texts around what the system says, and what begins every conversation.

    Args:
        start: text that begins a conversation without a system's text.
    """
    alone = {"system_opening": user_opening, "system_closing": user_closing}
    try:
        before, behind, _ = _pieces(render, ("system", "user"))
    except ChoreoError:
        return start, alone
    if behind.endswith(user_opening):
        start = _start(start, before, user_opening)
        own = {"system_closing": behind.removesuffix(user_opening)}
        return start, {"system_opening": before.removeprefix(start), **own}
    folded = {"folded_opening": before.removeprefix(start), "folded_closing": behind}
    return start, alone | folded


def _user_opening(first: str, next_question: str, answer_end: str, closing: str) -> str:
    """Text right before what a user says.

    Args:
        first: text before the first question.
        next_question: text between an answer and the next question.
        answer_end: text behind an answer that ends a conversation.
        closing: text that closes a user's turn; an answer's, too, as a rule.
    """
    opening = next_question.removeprefix(answer_end)
    if opening == next_question or not first.endswith(opening):
        shared = _shared_beginning(first[::-1], next_question[::-1])[::-1]
        opening = shared.removeprefix(closing)
    if not opening.strip():
        raise ChoreoError(
            "the model's chat template does not write users' turns alike: give another one",
            parameter="chat_template",
            value=[first, next_question],
        )
    return opening


def _start(start: str, before_system: str, user_opening: str) -> str:
    """Text that begins a conversation whether its first turn is the system's or a user's.

    Args:
        start: text that begins one without a system's text: it may have a system turn of its own.
        before_system: text before the system's text, where there is one.
        user_opening: text that opens a user's turn; up to the role it opens the system's, too.
    """
    opens_any, role, _ = user_opening.partition("user")
    at = before_system.rfind(opens_any) if opens_any and role else -1
    always = before_system[:at] if at >= 0 else _shared_beginning(start, before_system)
    return always if start.startswith(always) else ""


def _shared_beginning(one: str, other: str) -> str:
    same = takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False))
    return "".join(letter for letter, _ in same)


def _pieces(render: Render, roles: Sequence[str], ends: bool = False) -> list[str]:
    """Texts before the first content, between the contents, and behind the last one."""
    turns = [{"role": role, "content": mark(number)} for number, role in enumerate(roles)]
    pieces, numbers = glues(render(turns, ends))
    if numbers != list(range(len(roles))):
        raise ChoreoError(
            "the model's chat template leaves a turn out, or writes one twice: give another one",
            parameter="chat_template",
            value=", ".join(roles),
        )
    return pieces


def _refusal(error: Exception) -> ChoreoError:
    return ChoreoError(
        f"the model's tokenizer writes no chats ({error}): give a chat template",
        parameter="chat_template",
    )
