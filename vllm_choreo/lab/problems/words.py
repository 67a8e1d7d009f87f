# SPDX-License-Identifier: Apache-2.0
"""Everyday words, and lists of concepts drawn from them."""

from __future__ import annotations

import random

from vllm_choreo.lab.problems.problem import Problem, draw_distinct

NAMES = (
    "Anna", "Ben", "Clara", "David", "Emma", "Felix", "Grace", "Hugo", "Iris", "Jonas", "Karl",
    "Laura", "Martin", "Nina", "Oscar", "Paula",
)  # fmt: skip
NOUNS = tuple(
    """
    apple bag ball basket bed bell bench bicycle bird blanket boat book bottle bowl box bread
    bridge brush bucket bus cake camera candle car carpet cat chair child clock cloud coat corner
    cup curtain desk dog door drum egg farm fence field fire fish floor flower fork garden gate
    glass glove goat guitar hammer hat hill horse house island jacket kitchen knife ladder lake
    lamp leaf letter market mirror moon mountain mouse needle oven paint paper pencil piano pillow
    plate pocket rain river road roof rope school shelf ship shirt shoe shop snow sofa soup spoon
    star stone street table teacher tent tower train tree umbrella wall wheel wind window
    """.split()
)
VERBS = tuple(
    """
    bake bring build buy carry catch clean climb close cook count cut dance dig draw drink drive
    eat fall feed fill find fly fold follow give grow hang hide hold jump knock laugh lift listen
    look mix move open paddle pick play point pour pull push read repair ride roll run sell shake
    sing sit sleep smile stand sweep swim take teach throw tie touch turn visit wait walk wash
    watch wear whistle write
    """.split()
)


def concept_lists(num: int, seed: int = 0, size: int = 30) -> list[Problem]:
    """Tasks of kind "concepts": write a text that uses all of `size` nouns and verbs.

    Raises:
        ValueError: `size` is below 1 or above the number of words.
    """
    words = (*NOUNS, *VERBS)
    if not 1 <= size <= len(words):
        raise ValueError(f"size must be from 1 to {len(words)}, not {size}")

    def draw(rng: random.Random, problem_id: str) -> Problem:
        concepts = tuple(rng.sample(words, size))
        return Problem(problem_id, concepts_question(concepts), concepts, "concepts")

    return draw_distinct("concept_lists", num, seed, draw)


def concepts_question(concepts: tuple[str, ...]) -> str:
    """The task of a writer, for a list of concepts from any source."""
    return (
        "Write a short, coherent story that uses all of the following words: "
        f"{', '.join(concepts)}."
    )
