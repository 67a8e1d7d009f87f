# SPDX-License-Identifier: Apache-2.0
"""Questions over passages, from files that their owners give out, and the F1 of answers to them.

Read are MuSiQue and HotpotQA as they are published, CacheBlend's form of MuSiQue, and LongBench's
form of both; JSON or JSON lines. None of them is part of this repository: among the repositories
that hold such files are YaoJiayi/CacheBlend (`inputs/musique_s.json`, 150 questions of MuSiQue),
yhshu/HippoRAG (`data/hotpotqa_train.json`, `data/musique_train.json`, 100 questions each) and
AdelWang/MIGRES (`data/musique.json`, `data/hotpot.json`, 200 questions each).
"""

from __future__ import annotations

import json
import re
import string
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)


@dataclass(frozen=True)
class Question:
    """A question over passages, and its right answers.

    Attributes:
        supporting: numbers of the passages that the answer rests on; empty: it is not known.
    """

    text: str
    passages: tuple[str, ...]
    answers: tuple[str, ...]
    supporting: frozenset[int] = frozenset()

    def with_fewer(self, number: int) -> Question:
        """Return the question over so many passages, in their order.

        Args:
            number: of passages: those that it rests on, all of them, and the first others; 0: all.

        Raises:
            SystemExit: the file does not tell on which it rests.
        """
        if not number:
            return self
        if not self.supporting:
            raise SystemExit(
                f"--passages {number}: the file does not tell on which passages an answer rests; "
                "leave it out, or take MuSiQue or HotpotQA as they are published"
            )
        others = [at for at in range(len(self.passages)) if at not in self.supporting]
        kept = sorted([*self.supporting, *others[: max(0, number - len(self.supporting))]])
        passages = tuple(self.passages[at] for at in kept)
        supporting = frozenset(kept.index(at) for at in self.supporting)
        return replace(self, passages=passages, supporting=supporting)


def read_questions(path: Path, limit: int) -> list[Question]:
    """Read the first questions of a file.

    Args:
        limit: of how many; 0: all.

    Raises:
        SystemExit: the file is of none of the forms.
    """
    text = path.read_text(encoding="utf-8")
    try:
        found = json.loads(text)
    except json.JSONDecodeError:
        found = [json.loads(line) for line in text.splitlines() if line.strip()]
    items = found if isinstance(found, list) else found.get("data", [])
    questions = [_question(item, path) for item in items[: limit or None]]
    if not questions:
        raise SystemExit(f"{path}: no questions were found in it")
    return questions


def _question(item: Mapping[str, Any], path: Path) -> Question:
    text = item.get("question") or item.get("input")
    answers = item.get("answers") or [item.get("answer"), *item.get("answer_aliases", ())]
    passages = _passages(item)
    if not (text and passages and all(isinstance(one, str) for one in answers)):
        raise SystemExit(
            f"{path}: an item needs question (or input), answer (or answers), and paragraphs, ctxs "
            f"or context; this one has {sorted(item)}"
        )
    return Question(text, tuple(passages), tuple(answers), _supporting(item))


def _supporting(item: Mapping[str, Any]) -> frozenset[int]:
    """Numbers of the passages that an answer rests on; none where the form does not tell."""
    if "question_decomposition" in item:  # MuSiQue
        wanted = {part.get("paragraph_support_idx") for part in item["question_decomposition"]}
        paragraphs = item.get("paragraphs", ())
        return frozenset(at for at, p in enumerate(paragraphs) if p.get("idx", at) in wanted)
    facts, context = item.get("supporting_facts"), item.get("context")  # HotpotQA
    if not facts or not context:
        return frozenset()
    titles = context["title"] if isinstance(context, Mapping) else [title for title, _ in context]
    named = facts["title"] if isinstance(facts, Mapping) else [title for title, _ in facts]
    return frozenset(at for at, title in enumerate(titles) if title in named)


def _passages(item: Mapping[str, Any]) -> Sequence[str]:
    if "paragraphs" in item:  # MuSiQue
        return [f"{p['title']}\n{p['paragraph_text']}" for p in item["paragraphs"]]
    if "ctxs" in item:  # CacheBlend
        return [f"{p['title']}\n{p['text']}" for p in item["ctxs"]]
    context = item.get("context")
    if isinstance(context, str):  # LongBench
        parts = re.split(r"\n*Passage \d+:\n", context)
        return [part.strip() for part in parts if part.strip()]
    if isinstance(context, Mapping):  # HotpotQA, as data sets of columns have it
        pairs = zip(context["title"], context["sentences"], strict=True)
        return [f"{title}\n{''.join(sentences)}" for title, sentences in pairs]
    return [f"{title}\n{''.join(sentences)}" for title, sentences in context or ()]  # HotpotQA


def f1(answer: str, gold: Sequence[str]) -> float:
    """F1 of an answer's words against the best of the right ones, as SQuAD scores them."""
    return max((_f1(_words(answer), _words(right)) for right in gold), default=0.0)


def _f1(found: Sequence[str], right: Sequence[str]) -> float:
    if not found or not right:
        return float(found == right)
    common = sum((Counter(found) & Counter(right)).values())
    return 2 * common / (len(found) + len(right))


def _words(text: str) -> list[str]:
    plain = text.lower().translate(_NO_PUNCTUATION)
    return _ARTICLES.sub(" ", plain).split()
