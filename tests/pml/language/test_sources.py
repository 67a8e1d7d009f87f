# SPDX-License-Identifier: Apache-2.0
"""What files of the public code have: texts from files, empty modules, members that stand in."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.pml.trees import Words
from vllm_choreo import pml
from vllm_choreo.errors import PmlError
from vllm_choreo.pml.language import sources
from vllm_choreo.pml.language.chat_template import ChatTemplate
from vllm_choreo.pml.language.layout import Tokens
from vllm_choreo.pml.language.markup import parse, parse_schema
from vllm_choreo.pml.language.printer import to_markup
from vllm_choreo.pml.language.registered import RegisteredSchema
from vllm_choreo.pml.language.schema_book import SchemaBook

NAMED = '<schema name="s"><module name="a" src="texts/a.txt"/></schema>'


def register(schema: str, context: str = "modules") -> RegisteredSchema:
    words = Words()
    return SchemaBook(Tokens(words), ChatTemplate(words)).register(schema, context=context)


# -- texts from files ----------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "own" / "texts").mkdir(parents=True)
    (tmp_path / "own" / "texts" / "a.txt").write_text("\n  t7 t8 <t9> & é\n")
    (tmp_path / "secret.txt").write_text("secret")
    return tmp_path / "own"


def test_the_text_of_a_file_is_the_modules_own(folder: Path) -> None:
    schema = parse_schema(NAMED, sources=folder)
    told = "t7 t8 &lt;t9&gt; &amp; é"
    assert schema == parse_schema(
        f'<schema name="s"><module name="a">\n  {told}\n</module></schema>'
    )
    assert parse_schema(to_markup(schema)) == schema, "what is sent on names no file"
    assert "src" not in to_markup(schema)
    assert parse(f"<pml>{NAMED}</pml>", folder) == [schema]


@pytest.mark.parametrize(
    ("named", "said"),
    [
        ("../secret.txt", "below .* alone"),
        ("texts/../../secret.txt", "below .* alone"),
        ("link.txt", "below .* alone"),
        ("/etc/hostname", "below .* alone"),
        ("none.txt", "No such file"),
        ("texts", "directory"),
        ("large.txt", "more than 5000 bytes"),
        ("bytes.txt", "can't decode"),
        ("a\x7f" * 400, "too long"),
    ],
)
def test_other_files_are_not_read(
    folder: Path, named: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "link.txt").symlink_to(folder.parent / "secret.txt")
    (folder / "large.txt").write_text("t7 " * 2000)
    (folder / "bytes.txt").write_bytes(b"\xff\xfe\x00")
    monkeypatch.setattr(sources, "MAX_CHARS", 5000)
    with pytest.raises(PmlError, match=rf"line 1, column 18: .*{said}.*\(src=") as refused:
        parse_schema(NAMED.replace("texts/a.txt", named), sources=folder)
    assert "secret" not in str(refused.value).replace("secret.txt", "")


def test_nothing_is_read_where_no_folder_is_named(folder: Path) -> None:
    for read in (parse_schema, parse):
        with pytest.raises(PmlError, match="never on a server"):
            read(NAMED)


def test_a_module_has_one_text(folder: Path) -> None:
    with pytest.raises(PmlError, match="leave one of them out"):
        parse_schema(NAMED.replace("/></s", ">t7</module></s"), sources=folder)
    spaced = NAMED.replace("/></s", ">\n  </module></s")
    assert parse_schema(spaced, sources=folder) == parse_schema(NAMED, sources=folder)


# -- empty modules -------------------------------------------------------------------------------


def test_an_empty_module_is_taken_and_says_nothing() -> None:
    schema = (
        '<schema name="s">t3<union><module name="none"/><module name="some">t4 t5</module></union>'
        '<module name="last">t6</module></schema>'
    )
    words = Words()
    book = SchemaBook(Tokens(words), ChatTemplate(words))
    book.register(schema)
    taken = book.asked('<prompt schema="s"><none/><last/>t7</prompt>', {}).plan
    left = book.asked('<prompt schema="s"><last/>t7</prompt>', {}).plan
    assert taken == left and taken.usage.module_tokens == 2
    assert parse_schema(to_markup(parse_schema(schema))) == parse_schema(schema)
    with pytest.raises(PmlError, match="one"):
        book.asked('<prompt schema="s"><none/><some/>t7</prompt>', {})


# -- members that stand in -----------------------------------------------------------------------

UNION = """<schema name="s">t3
  <union scaffold="b"><module name="a">t4</module><module name="b">t5 t6
    <union scaffold="d"><module name="c">t20</module><module name="d">t21</module></union>
  </module></union>
  <module name="m">t7</module>
  <union><module name="e">t8</module></union>
  <module name="n">t9</module></schema>"""


def read_by(made: RegisteredSchema, path: str) -> list[str]:
    (key,) = (k for k in made.all_keys() if "/".join(k.path) == path)
    return ["/".join(needed.path) for needed in made.needs(key)]


def test_a_member_stands_in_for_its_union_where_modules_behind_it_are_encoded() -> None:
    made = register(UNION, "schema")
    assert read_by(made, "m") == read_by(made, "n") == ["", "b", "b/d"]
    assert read_by(made, "e") == ["", "b", "b/d"], "this union has none"
    assert read_by(made, "a") == read_by(made, "b") == [""], "not for its own members"
    assert read_by(made, "b/c") == read_by(made, "b/d") == ["", "b"]
    for key in made.all_keys():
        assert list(made.with_needs([key])) == [*made.needs(key), key]


def test_modules_that_see_themselves_alone_see_no_stand_in() -> None:
    made = register(UNION)
    assert all(not made.needs(key) for key in made.all_keys())


def test_a_stand_in_is_a_member_that_is_encoded_once() -> None:
    for given in ('<union scaffold="z">', '<union scaffold="c">'):
        with pytest.raises(PmlError, match="scaffold of a union"):
            register(UNION.replace('<union scaffold="b">', given))
    with pytest.raises(PmlError, match="scaffold of a union"):
        register(UNION.replace('<module name="b">', '<module name="b" cache="false">'))


def test_stand_ins_are_written_and_made_by_programs() -> None:
    schema = parse_schema(UNION)
    assert parse_schema(to_markup(schema)) == schema and 'scaffold="b"' in to_markup(schema)

    @pml.module
    def one() -> str:
        return "t4"

    made = pml.union(one, scaffold=one)
    assert made.scaffold == "one" and made == pml.union(one, scaffold="one")

    @pml.schema
    def whole() -> Iterator[Any]:
        yield made

    assert parse_schema(to_markup(whole)) == whole
