# SPDX-License-Identifier: Apache-2.0
"""What readers read, made from seeds: look-ups, chains, counts, and candidates to vote on.

Chains and counts follow the descriptions of RULER (arXiv 2404.06654, 3.1).
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from vllm_choreo.lab.problems import word_problems
from vllm_choreo.lab.problems.long_documents import reports
from vllm_choreo.lab.workflows.chat import assistant, system, user
from vllm_choreo.lab.workflows.tree_of_thoughts import BALLOT

NUM_DOCUMENTS = 4
_REPORTS = 5  # in a document, of about 70 tokens each
_NUM_THOUGHTS = 5
_ANSWER_FROM = system("Answer from the given documents.")


@dataclass(frozen=True)
class Reading:
    """What one reader reads.

    Attributes:
        first: the message that all others were encoded with.
        documents: those others; none: the model writes `_NUM_THOUGHTS` candidates for the question
            that `first` is.
        header: of the reader.
        answer: that is right; None: what the text's reader says.
        max_tokens: of an answer.
    """

    first: str
    documents: tuple[str, ...]
    header: str
    answer: str | None
    max_tokens: int

    @property
    def thoughts(self) -> list[str]:
        """Headers of the calls that write the candidates."""
        count = 0 if self.documents else _NUM_THOUGHTS
        return [assistant(f"Candidate {number}:") for number in range(1, count + 1)]


Make = Callable[[int], list[Reading]]


def _asked(documents: list[str], question: str, opening: str, answer: str, room: int) -> Reading:
    turns = tuple(map(user, documents))
    return Reading(_ANSWER_FROM, turns, user(question) + assistant(opening), answer, room)


def look_ups(num: int) -> list[Reading]:
    """The number of one of twenty people."""
    made = []
    for problem in reports(num, 7, NUM_DOCUMENTS * _REPORTS):
        lines = [problem.documents[at::NUM_DOCUMENTS] for at in range(NUM_DOCUMENTS)]
        documents = ["\n".join(each) for each in lines]
        made.append(_asked(documents, problem.question, problem.opening, problem.answers[0], 8))
    return made


def two_hops(num: int) -> list[Reading]:
    """Who keeps a thing stands in one document, the number of that person in another."""
    made = []
    for number, reading in enumerate(look_ups(num)):
        rng = random.Random(f"two hops {number}")
        documents = [text.removesuffix("<|im_end|>\n") for text in reading.documents]
        keeper = reading.header.split("number of ")[1].split("?")[0]
        thing = rng.choice(("lamp", "ladder", "boat", "drum", "kettle"))
        where = rng.choice([at for at, text in enumerate(documents) if f"{keeper}:" not in text])
        documents[where] += f" The {thing} is kept by {keeper}.<|im_end|>\n"
        closed = [t if t.endswith("<|im_end|>\n") else f"{t}<|im_end|>\n" for t in documents]
        question = user(f"Who keeps the {thing}, and what is the number of that person?")
        header = question + assistant(f"The {thing} is kept by")
        made.append(Reading(reading.first, tuple(closed), header, reading.answer, 16))
    return made


def chains(num: int) -> list[Reading]:
    """Variables that take their values from others, four documents long; all of one value count."""
    made = []
    for number in range(num):
        rng = random.Random(f"chains {number}")
        names = rng.sample([a + b for a in "BCDFGHKLMPRT" for b in "AEIOU"], 20)
        value, *others = rng.sample(range(10000, 99999), 5)
        groups = [names[at * NUM_DOCUMENTS : (at + 1) * NUM_DOCUMENTS] for at in range(5)]
        documents: list[list[str]] = [[] for _ in range(NUM_DOCUMENTS)]
        for group, start in zip(groups, [value, *others], strict=True):
            for at, name in enumerate(group):
                source = str(start) if at == 0 else f"VAR {group[at - 1]}"
                documents[at].append(f"VAR {name} = {source}.")
        filler = reports(1, 100 + number, 12)[0].documents
        texts = []
        for at, lines in enumerate(documents):
            rng.shuffle(lines)
            mixed = zip(lines, [*filler[3 * at : 3 * at + 3], "", ""], strict=True)
            texts.append(" ".join(f"{line} {text}" for line, text in mixed).strip())
        question = f"Name all variables that have the value {value}."
        answer = " ".join(groups[0][1:])  # the opening names the first
        made.append(_asked(texts, question, f"VAR {groups[0][0]}, VAR", answer, 16))
    return made


_WORDS = (
    *("apple", "river", "stone", "cloud", "table", "horse", "music", "paper", "garden", "window"),
    *("bread", "sugar", "mountain", "letter", "pocket", "winter", "candle", "button", "bridge"),
    *("market", "silver", "orange", "doctor", "island", "pencil", "basket", "engine", "forest"),
)


def counts(num: int) -> list[Reading]:
    """The word that stands most often in lists, half of which are other words."""
    made = []
    for number in range(num):
        rng = random.Random(f"counts {number}")
        common, *others = rng.sample(_WORDS, len(_WORDS))
        documents = []
        for _ in range(NUM_DOCUMENTS):
            words = [common] * 60 + rng.choices(others, k=120)
            rng.shuffle(words)
            documents.append(" ".join(words))
        question = "Which word stands most often in these lists?"
        made.append(_asked(documents, question, "The most common word is", common, 4))
    return made


def votes(num: int) -> list[Reading]:
    """Candidates for an answer, written by the model; a vote for one of them."""
    header = user(BALLOT) + assistant("The best is candidate number")
    return [
        Reading(user(problem.question), (), header, None, 2) for problem in word_problems(num, 3)
    ]


TASKS: dict[str, Make] = {
    "look-up": look_ups,
    "two hops": two_hops,
    "variable chains": chains,
    "word counts": counts,
    "votes": votes,
}
