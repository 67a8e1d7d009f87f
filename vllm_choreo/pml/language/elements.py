# SPDX-License-Identifier: Apache-2.0
"""XML that anybody may have sent, as elements with their places. Elements, text and nothing else.

Expat is told to refuse a document type at its first character: so there are no entities besides
XML's own five, nothing external is named, and nothing grows. Size and depth are bounded before a
tree is made.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from xml.parsers import expat

from vllm_choreo.pml.language.checks import MAX_CHARS, MAX_DEPTH, MAX_NODES
from vllm_choreo.pml.language.tree import Place, wrong
from vllm_choreo.pml.language.whitespace import normalised

MAX_ATTRIBUTES = 256
SPACE_ATTRIBUTE = "xml:space"

# What to do about an error, by expat's name of it.
_ADVICE = {
    "undefined entity": "only &lt; &gt; &amp; &quot; &apos; and &#…; are known",
    "not well-formed (invalid token)": "write &lt; for < and &amp; for & in text",
    "no element found": "the text ends before its elements do, or is empty",
    "junk after document element": "there is one outermost element",
}


@dataclass
class Element:
    """An element as it was written.

    Attributes:
        children: elements, and text with its place.
        keeps_space: whether white space in its text is kept as it is.
    """

    tag: str
    attributes: dict[str, str]
    place: Place
    keeps_space: bool
    children: list[Element | tuple[str, Place]] = field(default_factory=list)

    def content(self, has_edges: bool) -> list[Element | tuple[str, Place]]:
        """Children, with white space by the rule of `whitespace`.

        Args:
            has_edges: whether white space at the element's own edges is dropped.
        """
        made: list[Element | tuple[str, Place]] = []
        last = len(self.children) - 1
        for index, child in enumerate(self.children):
            if isinstance(child, tuple):
                text, place = child
                if not self.keeps_space:
                    text = normalised(
                        text, is_first=has_edges and index == 0, is_last=has_edges and index == last
                    )
                child = (text, place)
            made.append(child)
        return made


def read_element(markup: str, parameter: str) -> Element:
    """Read the outermost element of a text.

    Args:
        markup: the text.
        parameter: the name of the text in errors.

    Raises:
        PmlError: it is not well formed, or not allowed here; says where.
    """
    if not isinstance(markup, str):
        raise wrong("markup is text", None, parameter, markup)
    if len(markup) > MAX_CHARS:
        raise wrong(f"markup has up to {MAX_CHARS} characters", None, parameter, len(markup))
    reader = _Reader(parameter)
    try:
        reader.expat.Parse(markup.encode(), True)
    except UnicodeEncodeError as error:
        raise wrong(
            f"no text: {error.reason}", None, parameter, hex(ord(markup[error.start]))
        ) from None
    except expat.ExpatError as error:
        reason = expat.ErrorString(error.code)
        advice = _ADVICE.get(reason)
        place = Place(error.lineno, error.offset + 1)
        raise wrong(f"{reason}{f': {advice}' if advice else ''}", place, parameter) from None
    assert reader.root is not None, "expat refuses what has no element"
    return reader.root


class _Reader:
    """Maker of elements from what expat tells."""

    def __init__(self, parameter: str) -> None:
        self.root: Element | None = None
        self._open: list[Element] = []
        self._num_nodes = 0
        self._chunks: list[str] = []
        self._text_place = Place(1, 1)
        self._parameter = parameter
        self.expat = expat.ParserCreate("utf-8")
        self.expat.StartElementHandler = self._start
        self.expat.EndElementHandler = self._end
        self.expat.CharacterDataHandler = self._text
        self.expat.StartDoctypeDeclHandler = self._doctype
        self.expat.ProcessingInstructionHandler = self._instruction
        self.expat.SetParamEntityParsing(expat.XML_PARAM_ENTITY_PARSING_NEVER)

    def _place(self) -> Place:
        return Place(self.expat.CurrentLineNumber, self.expat.CurrentColumnNumber + 1)

    def _start(self, tag: str, attributes: dict[str, str]) -> None:
        self._flush()
        place = self._place()
        if len(self._open) >= MAX_DEPTH:
            raise wrong(f"elements are nested {MAX_DEPTH} deep at most", place, self._parameter)
        self._count(place)
        if len(attributes) > MAX_ATTRIBUTES:
            raise wrong(f"an element has up to {MAX_ATTRIBUTES} attributes", place, self._parameter)
        keeps = self._keeps_space(attributes.pop(SPACE_ATTRIBUTE, None), place)
        element = Element(tag, attributes, place, keeps)
        if self._open:
            self._open[-1].children.append(element)
        else:
            self.root = element
        self._open.append(element)

    def _keeps_space(self, given: str | None, place: Place) -> bool:
        if given is None:
            return bool(self._open) and self._open[-1].keeps_space
        if given not in ("preserve", "default"):
            raise wrong('choose "preserve" or "default"', place, SPACE_ATTRIBUTE, given)
        return given == "preserve"

    def _end(self, tag: str) -> None:
        self._flush()
        self._open.pop()

    def _text(self, text: str) -> None:
        # A comment, a reference or a line break may cut a text: it is one.
        if not self._chunks:
            place = self._place()
            self._count(place)
            self._text_place = place
        self._chunks.append(text)

    def _flush(self) -> None:
        """End the text before a tag."""
        if self._chunks:
            self._open[-1].children.append(("".join(self._chunks), self._text_place))
            self._chunks = []

    def _count(self, place: Place) -> None:
        self._num_nodes += 1
        if self._num_nodes > MAX_NODES:
            raise wrong(f"there are {MAX_NODES} elements and texts at most", place, self._parameter)

    def _doctype(self, *declared: object) -> None:
        raise wrong(
            "document types and entities are not read: leave <!DOCTYPE …> out",
            self._place(),
            self._parameter,
        )

    def _instruction(self, target: str, data: str) -> None:
        raise wrong(
            "processing instructions are not read: leave <?…?> out", self._place(), self._parameter
        )
