# SPDX-License-Identifier: Apache-2.0
"""Well-known facts as questions."""

from __future__ import annotations

import random

from vllm_choreo.lab.problems.problem import Problem

_CAPITALS = (
    ("France", "Paris"), ("Italy", "Rome"), ("Spain", "Madrid"), ("Portugal", "Lisbon"),
    ("Germany", "Berlin"), ("Austria", "Vienna"), ("Poland", "Warsaw"), ("Greece", "Athens"),
    ("Norway", "Oslo"), ("Sweden", "Stockholm"), ("Finland", "Helsinki"), ("Denmark", "Copenhagen"),
    ("Ireland", "Dublin"), ("Hungary", "Budapest"), ("Japan", "Tokyo"), ("Egypt", "Cairo"),
    ("Kenya", "Nairobi"), ("Canada", "Ottawa"), ("Cuba", "Havana"), ("Peru", "Lima"),
    ("Australia", "Canberra"), ("Thailand", "Bangkok"),
)  # fmt: skip

_SYMBOLS = (
    ("oxygen", "O"), ("iron", "Fe"), ("gold", "Au"), ("silver", "Ag"), ("sodium", "Na"),
    ("lead", "Pb"), ("zinc", "Zn"), ("carbon", "C"), ("copper", "Cu"), ("mercury", "Hg"),
)  # fmt: skip

_AUTHORS = (
    ("Hamlet", ("William Shakespeare", "Shakespeare")),
    ("Don Quixote", ("Miguel de Cervantes", "Cervantes")),
    ("War and Peace", ("Leo Tolstoy", "Lev Tolstoy", "Tolstoy")),
    ("Faust", ("Johann Wolfgang von Goethe", "Goethe")),
    ("The Divine Comedy", ("Dante Alighieri", "Dante")),
    ("Pride and Prejudice", ("Jane Austen", "Austen")),
    ("Oliver Twist", ("Charles Dickens", "Dickens")),
    ("The Odyssey", ("Homer",)),
    ("Les Miserables", ("Victor Hugo", "Hugo")),
    ("On the Origin of Species", ("Charles Darwin", "Darwin")),
)

_OTHERS = (
    ("Which planet is closest to the Sun?", ("Mercury",)),
    ("Which is the largest planet of the solar system?", ("Jupiter",)),
    ("How many legs does a spider have?", ("eight", "8")),
    ("How many strings does a violin have?", ("four", "4")),
    ("How many players of one team are on the field in soccer?", ("eleven", "11")),
    ("Which ocean lies between Europe and North America?", ("Atlantic", "Atlantic Ocean")),
    ("Which is the largest ocean?", ("Pacific", "Pacific Ocean")),
    ("Which is the highest mountain above sea level?", ("Mount Everest", "Everest")),
    ("In which year did the Second World War end?", ("1945",)),
    ("In which year did people first land on the Moon?", ("1969",)),
    ("Who was the first president of the United States?", ("George Washington", "Washington")),
    ("Who painted the Mona Lisa?", ("Leonardo da Vinci", "Leonardo", "da Vinci")),
    ("Who composed the opera The Magic Flute?", ("Wolfgang Amadeus Mozart", "Mozart")),
    ("Who developed the theory of general relativity?", ("Albert Einstein", "Einstein")),
    ("Which gas do plants take from the air for photosynthesis?", ("carbon dioxide", "CO2")),
    ("Which metal is liquid at room temperature?", ("mercury",)),
    ("Which is the largest animal alive today?", ("blue whale",)),
    ("Which bird is the symbol of peace?", ("dove",)),
    ("Which language is spoken in Brazil?", ("Portuguese",)),
    ("What is the currency of Japan?", ("yen",)),
)


def trivia(num: int, seed: int = 0) -> list[Problem]:
    """Questions of kind "trivia" in an order of the seed's.

    Raises:
        ValueError: there are not `num` of them.
    """
    facts = _facts()
    if not 0 <= num <= len(facts):
        raise ValueError(f"there are {len(facts)} facts; num must not be {num}")
    chosen = random.Random(f"trivia/{seed}").sample(facts, num)
    return [
        Problem(f"trivia/{seed}/{i}", question, answers, "trivia")
        for i, (question, answers) in enumerate(chosen)
    ]


def _facts() -> list[tuple[str, tuple[str, ...]]]:
    """Every question with its answers."""
    return [
        *((f"What is the capital of {country}?", (city,)) for country, city in _CAPITALS),
        *((f"What is the chemical symbol of {name}?", (symbol,)) for name, symbol in _SYMBOLS),
        *((f"Who wrote {work}?", authors) for work, authors in _AUTHORS),
        *_OTHERS,
    ]
