# SPDX-License-Identifier: Apache-2.0
"""Text of modules from files: `<module name="story" src="story.txt"/>`.

A file is read where a schema is read, and only below a folder that the caller names; the tree, and
what goes to a server, holds its text. A server names no folder, so that no client reads its files.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from vllm_choreo.pml.language.checks import MAX_CHARS
from vllm_choreo.pml.language.elements import Element
from vllm_choreo.pml.language.tree import wrong

SOURCE_ATTRIBUTE = "src"


def read_sources(root: Element, folder: Path | None) -> None:
    """Put the texts of files into the modules that name them.

    Args:
        root: the outermost element, which is changed.
        folder: the folder below which files may be read; None: none may.

    Raises:
        PmlError: a file may not be read or cannot be read, is no text, or its module has text of
            its own.
    """
    for element in _named(root):
        name = element.attributes.pop(SOURCE_ATTRIBUTE)
        if any(map(_says_something, element.children)):
            raise wrong(
                "a module is what src names, or what it holds: leave one of them out",
                element.place,
                SOURCE_ATTRIBUTE,
                name,
            )
        element.children = [(_text(element, name, folder), element.place)]


def _named(element: Element) -> Iterator[Element]:
    """Modules that name a file, the element itself and those inside it."""
    if element.tag == "module" and SOURCE_ATTRIBUTE in element.attributes:
        yield element
    for child in element.children:
        if isinstance(child, Element):
            yield from _named(child)


def _says_something(child: object) -> bool:
    return not isinstance(child, tuple) or bool(child[0].strip())


def _text(element: Element, name: str, folder: Path | None) -> str:
    if folder is None:
        raise wrong(
            "files are read where a program names their folder, and never on a server: "
            "parse_schema(markup, sources=FOLDER)",
            element.place,
            SOURCE_ATTRIBUTE,
            name,
        )
    root = folder.resolve()
    try:
        path = (root / name).resolve()
        if not path.is_relative_to(root):
            raise wrong(
                f"files are read below {folder} alone: put it there",
                element.place,
                SOURCE_ATTRIBUTE,
                name,
            )
        if path.stat().st_size > MAX_CHARS:
            reason = f"it has more than {MAX_CHARS} bytes"
        else:
            return path.read_text(encoding="utf-8")
    except OSError as error:
        reason = error.strerror or str(error)
    except ValueError as error:  # no UTF-8, or a name that is none
        reason = str(error)
    raise wrong(
        f"the text of the module cannot be read: {reason}", element.place, SOURCE_ATTRIBUTE, name
    )
