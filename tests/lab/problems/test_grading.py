# SPDX-License-Identifier: Apache-2.0
"""Answers are compared as the field does: properties, and small named cases."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_choreo.lab.problems.grading import (
    contains_any,
    coverage,
    final_answer,
    final_number,
    is_correct,
    normalized,
)
from vllm_choreo.lab.problems.inflections import inflections
from vllm_choreo.lab.problems.latex import last_boxed, math_equal, normalized_math
from vllm_choreo.lab.problems.numbers import number, numbers

# -- numbers -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("He pays $1,234.50 in all.", ["1234.5"]),
        ("12% of 50 is 6.", ["12", "50", "6"]),
        ("16 - 3 - 4 = 9", ["16", "3", "4", "9"]),
        ("10-3=7", ["10", "3", "7"]),
        ("(5)-3", ["5", "3"]),
        ("x = -3", ["-3"]),
        ("x=−3", ["-3"]),
        ("-$5 or $-5", ["-5", "-5"]),
        ("3/4 cup, 1 1/2 cups, 3 / 4", ["3/4", "3/2", "3/4"]),
        ("1, 2,345, 1,2,3", ["1", "2345", "1", "2", "3"]),
        ("1{,}234 and 5,\\!678", ["1234", "5678"]),
        (".5 and 0.50", ["1/2", "1/2"]),
        ("It costs €3.", ["3"]),
        ("5/0", ["0"]),
        ("Step 3\n1/2", ["3", "1/2"]),
        ("none", []),
    ],
)
def test_numbers_of_a_text(text: str, found: list[str]) -> None:
    assert numbers(text) == [Fraction(value) for value in found]


@given(st.integers(-(10**12), 10**12))
def test_an_integer_is_read_in_every_notation(value: int) -> None:
    commas = f"{value:,}"
    for form in (str(value), commas, f"{commas}.00", f"{value} %", commas.replace("-", "−")):
        assert number(form) == value
    assert final_number(f"First 17, then 3/4, and so it is {value:,}.") == value


@given(st.decimals(-(10**6), 10**6, places=3))
def test_a_decimal_is_read_exactly(value: object) -> None:
    assert number(f"${value}".replace("$-", "-$")) == Fraction(str(value))


@given(st.integers(-99, 99), st.integers(1, 99))
def test_a_fraction_is_its_value(above: int, below: int) -> None:
    assert number(f"{above}/{below}") == Fraction(above, below)
    assert math_equal(f"{above}/{below}", f"\\frac{{{above}}}{{{below}}}")
    assert math_equal(f"\\dfrac{{{above}}}{{{below}}}", str(above / below)) == (
        Fraction(str(above / below)) == Fraction(above, below)
    )


@given(st.text())
def test_any_text_can_be_graded(text: str) -> None:
    for kind in ("number", "math", "trivia", "concepts"):
        is_correct(kind, text, ["17", "\\frac{1}{2}"])  # type: ignore[arg-type]
        is_correct(kind, "The answer is 17", [text])  # type: ignore[arg-type]


def test_where_the_final_number_stands() -> None:
    assert final_number("2 + 2 = <<2+2=4>>4\n#### 1,000\nThat took 3 steps.") == 1000
    assert final_number("So \\boxed{12 \\text{ cm}}, from 3 and 4.") == 12
    assert final_number("There are 12 boxes of 3, so 36 in all.") == 36
    assert final_number("#### none, though 5 was near") == 5
    assert final_number("I do not know.") is None
    assert not is_correct("number", "I do not know.", ["5"])
    assert is_correct("number", "The answer is 70,000 dollars.", ["70000"])
    assert not is_correct("number", "Not 5 but 6.", ["5"])


# -- LaTeX ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "boxed"),
    [
        (r"so $\boxed{\frac{1}{2}}$.", r"\frac{1}{2}"),
        (r"\boxed{1} and \boxed{2}", "2"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\fbox{7}", "7"),
        (r"$\boxed 5$ it is", "5"),
        (r"\boxed{1}, then \boxed{\frac{1}{2", "1"),
        (r"\boxed{never closed", None),
        ("no box", None),
    ],
)
def test_the_last_box_with_balanced_braces(text: str, boxed: str | None) -> None:
    assert last_boxed(text) == boxed


@given(st.recursive(st.text("abc12+ ", max_size=4), lambda x: st.builds("{{{}}}".format, x)))
def test_what_is_put_into_a_box_is_found_in_it(content: str) -> None:
    assert last_boxed(f"first \\boxed{{0}}, then \\boxed{{{content}}} and }} more {{") == content


@pytest.mark.parametrize(
    ("left", "right"),
    [
        (r"\dfrac{4}{3}", r"\frac43"),
        (r"\tfrac1{72}", "1/72"),
        (r"-\frac{1}{4}", "-0.25"),
        (r"\frac{2}{4}", "0.5"),
        (r"\left( 9, 11 \right)", "(9,11)"),
        (r"(\frac12, 3)", "(0.5, 3.0)"),
        (r"\left[0,\infty\right)", r"[0,\infty)"),
        (r"15^\circ", "15"),
        (r"15^{\circ}", "15°"),
        (r"12\text{ square units}", "12"),
        (r"18\text{ ways.}", "18"),
        (r"25 \text{ ft}", "25 feet"),
        (r"3\text{ cm}^2", "3"),
        ("12 square units.", "12"),
        (r"\text{Dana}", "Dana"),
        (r"\text{(C)}", "C"),
        (r"\$15,600", "15600"),
        (r"1{,}000", "1000"),
        (r"20\%", "20"),
        ("x = 5", "5"),
        ("f(x) = 5", "5"),
        (r"4\pi - 2\sqrt{3}", r"4\pi-2\sqrt3"),
        (r"x^{2}+1", "x^2 + 1"),
        ("52_{8}", "52_8"),
        ("$7$.", "7"),
    ],
)
def test_the_same_in_latex(left: str, right: str) -> None:
    assert math_equal(left, right) and math_equal(right, left)


@pytest.mark.parametrize(
    ("left", "right"),
    [
        ("1", "2"),
        (r"\frac{1}{2}", r"\frac{1}{3}"),
        ("(1, 2)", "(2, 1)"),
        ("(1, 2)", "[1, 2]"),
        ("(1, 2)", "(1, 2, 3)"),
        ("(9, 11)", "911"),
        ("52_8", "52"),
        (r"8\sqrt{3}", r"8"),
        ("x + 1", "x + 2"),
        ("2x", "2"),
        ("", ""),
        (r"\text{Dana}", r"\text{Evan}"),
        (r"\frac{1}{0}", r"\frac{2}{0}"),
    ],
)
def test_not_the_same_in_latex(left: str, right: str) -> None:
    assert not math_equal(left, right) and not math_equal(right, left)


@given(st.text(r"01234567890abxy+-*/^_{}()[], .\$%fracsqtext", max_size=24))
def test_equality_is_reflexive_and_a_normal_form_stays_as_it_is(text: str) -> None:
    form = normalized_math(text)
    assert math_equal(text, text) == bool(form)
    assert math_equal(form, text) or not form


@pytest.mark.parametrize(
    ("text", "final"),
    [
        (r"Thus $x=2$ and \boxed{3}.", "3"),
        ("Sum them.\n#### 18\n", "18"),
        ("The answer is 4.5 meters. I am sure.", "4.5 meters"),
        ("The final answer is: $(1, 2)$.", "$(1, 2)$"),
        ("The answer is 3. No, the answer is 4.", "4"),
        (r"We get $x = 1$ and then $\frac{1}{2}$ of it.", r"\frac{1}{2}"),
        ("From 3 and 4 follows 12", "12"),
        ("who knows", None),
    ],
)
def test_where_the_final_answer_stands(text: str, final: str | None) -> None:
    assert final_answer(text) == final


def test_a_whole_solution_and_a_bare_answer_are_graded() -> None:
    gold = [r"\frac{5}{12}"]
    assert is_correct("math", r"It follows that $p = \boxed{\dfrac{5}{12}}$.", gold)
    assert is_correct("math", "5/12", gold)
    assert is_correct("math", "(9, 11)", ["(9,11)"])
    assert not is_correct("math", r"Of $\frac{5}{12}$ there remains \boxed{\frac{7}{12}}.", gold)
    assert not is_correct("math", "", gold)


# -- names ---------------------------------------------------------------------------------------


def test_normal_form_of_names() -> None:
    assert normalized("The  Röntgen-Tube, a great (old) thing!") == "rontgen tube great old thing"
    assert normalized("Straße") == "strasse" and normalized("The") == "the"
    assert normalized("O'Feeney_X") == "o feeney x" and normalized("?!") == ""


def test_an_alias_counts_as_whole_words_alone() -> None:
    assert contains_any("I think it was the SUNSET boulevard.", ["Sunset Blvd", "Sunset Boulevard"])
    assert contains_any("Anna's", ["Anna"])
    assert not contains_any("A scarlet carpet", ["car", "pet"])
    assert not contains_any("sunset on the boulevard", ["Sunset Boulevard"])
    assert not contains_any("anything", ["", "  ", "?"])
    assert contains_any("a + b", ["+"])
    assert contains_any("Vitamin A, of course", ["A"]) and not contains_any("Vitamin B", ["A"])


@given(st.text(max_size=30), st.text(max_size=30), st.text(max_size=30))
def test_an_answer_is_found_in_any_text_around_it(before: str, answer: str, after: str) -> None:
    if answer.strip():
        assert contains_any(f"{before} ! {answer} ? {after}", ["other words", answer])
    assert normalized(normalized(answer)) == normalized(answer)


# -- concepts ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("word", "form"),
    [
        ("dog", "dogs"), ("box", "boxes"), ("carry", "carried"), ("berry", "berries"),
        ("stop", "stopping"), ("bake", "baking"), ("bake", "baked"), ("knife", "knives"),
        ("leaf", "leaves"), ("run", "ran"), ("write", "written"), ("child", "children"),
        ("fireman", "firemen"), ("tie", "tying"), ("play", "played"),
        ("grandchild", "grandchildren"),
    ],
)  # fmt: skip
def test_inflected_forms(word: str, form: str) -> None:
    assert form in inflections(word) and word in inflections(word)
    assert coverage(f"They saw {form.upper()}!", [word]) == 1.0


@pytest.mark.parametrize(
    ("word", "other"), [("car", "carpet"), ("write", "writer"), ("play", "plaied"), ("run", "rug")]
)
def test_other_words_are_no_forms(word: str, other: str) -> None:
    assert coverage(f"They saw {other}.", [word]) == 0.0


def test_coverage_is_the_fraction_that_occurs() -> None:
    text = "The dogs ran over the fields, and an ice creams' seller smiled."
    assert coverage(text, ["dog", "run", "field", "ice cream"]) == 1.0
    assert coverage(text, ["dog", "cat", "run", "sleep"]) == 0.5
    assert coverage("", ["dog"]) == 0.0 and coverage("", []) == 1.0
    assert is_correct("concepts", text, ["dog", "smile"])
    assert not is_correct("concepts", text, ["dog", "frown"])


@given(st.lists(st.sampled_from(["dog", "carry", "box", "bake"]), min_size=1, max_size=6))
def test_more_text_never_covers_less(concepts: list[str]) -> None:
    text, shares = "", []
    for concept in concepts:
        text += f" {concept}ed"
        shares.append(coverage(text, concepts))
    assert shares == sorted(shares)


def test_an_unknown_kind_is_refused() -> None:
    with pytest.raises(ValueError, match="kind must be"):
        is_correct("essay", "", ["x"])  # type: ignore[arg-type]
