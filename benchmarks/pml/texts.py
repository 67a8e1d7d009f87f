# SPDX-License-Identifier: Apache-2.0
"""Schemas of generated documents: a long one for times, those of a problem for answers."""

from __future__ import annotations

from collections.abc import Sequence

from vllm_choreo.lab.problems import Problem
from vllm_choreo.pml.language.tree import Module, Prompt, Scaffold, Schema, Text, Turn, Union, Use

INSTRUCTION = "Answer from the given facts."
QUESTION = " Which of the numbers above is the largest?"
NUM_ROLES = 64


def role(number: int) -> str:
    """An instruction that differs from all others in its first words."""
    return f"Reader {number + 1} of {NUM_ROLES}, answer from the text below, and briefly.\n"


def long_schema(name: str, document: str) -> Schema:
    """Instructions, of which a prompt takes one, then the document."""
    roles = tuple(Module((Text(role(n)),), name=f"role-{n}") for n in range(NUM_ROLES))
    return Schema((Union(roles), Module((Text(document),), name="document")), name=name)


def long_prompt(name: str, number: int) -> Prompt:
    """The document after an instruction, and the question, which is all that is new."""
    taken = (Use(name=f"role-{number}"), Use(name="document"), Text(QUESTION))
    return Prompt(taken, schema=name)


def problem_schema(problem: Problem, name: str) -> Schema:
    """The documents of a problem as modules, a turn each; together they are a scaffold."""
    names = [f"document-{number}" for number in range(len(problem.documents))]
    modules = [
        Module((Turn((Text(text),), role="user"),), name=module)
        for module, text in zip(names, problem.documents, strict=True)
    ]
    instruction = Turn((Text(INSTRUCTION),), role="system")
    scaffolds = (Scaffold(tuple(names)),) if len(names) > 1 else ()
    return Schema((instruction, *modules, *scaffolds), name=name)


def without_scaffolds(schema: Schema) -> Schema:
    """The same modules, each of which is encoded alone."""
    kept = tuple(child for child in schema.children if not isinstance(child, Scaffold))
    return Schema(kept, name=schema.name)


def problem_prompt(problem: Problem, name: str) -> Prompt:
    """All documents, the question, and how the answer begins."""
    taken: Sequence[Use] = [
        Use(name=f"document-{number}") for number in range(len(problem.documents))
    ]
    question = Turn((Text(problem.question),), role="user")
    opening = Turn((Text(problem.opening),), role="assistant")
    return Prompt((*taken, question, *([opening] if problem.opening else [])), schema=name)
