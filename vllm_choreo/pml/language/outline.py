# SPDX-License-Identifier: Apache-2.0
"""A schema printed as a tree: tokens, positions, parameters, and what is encoded."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from vllm_choreo.pml.language.layout import LaidItem, LaidModule, LaidUnion, SchemaLayout, Segment
from vllm_choreo.pml.language.registered import ALONE, EncodingKey


def outline(layout: SchemaLayout, encoded: Collection[EncodingKey] = ()) -> str:
    """Print the tree of a schema, one line for each module, union and segment.

    Args:
        encoded: the encodings that there are.
    """
    name = layout.schema.name
    rows = [(f"schema {name}", f"{layout.num_tokens} tokens", f"0…{layout.num_positions}", "")]
    rows += _rows(name, layout.root, 1, {(key.schema, *key[1:3], key.scaffold) for key in encoded})
    scaffolds = {key.scaffold for key in encoded if key.schema == name}
    for number, scaffold in enumerate(layout.scaffolds):
        mark = "encoded" if number in scaffolds else ""
        rows.append((f"  scaffold {' '.join(scaffold.modules)}", "", "", mark))
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    lines = [
        f"{row[0]:{widths[0]}}  {row[1]:>{widths[1]}}  {row[2]:>{widths[2]}}  {row[3]}".rstrip()
        for row in rows
    ]
    return "\n".join(lines)


_Row = tuple[str, str, str, str]
_Encoded = tuple[str, tuple[str, ...], int, int]


def _rows(name: str, laid: LaidModule, depth: int, encoded: set[_Encoded]) -> Iterator[_Row]:
    indent = "  " * depth
    for item in laid.items:
        if isinstance(item, Segment):
            has = (name, item.path, item.index, ALONE) in encoded
            mark = ("encoded" if has else "") if laid.is_cached else "with each prompt"
            params = "".join(f" [{param.name}: {param.length}]" for param in item.params)
            yield f"{indent}text{params}", *_extent(len(item.token_ids), item), mark
            continue
        members: tuple[LaidModule, ...] = (item,) if isinstance(item, LaidModule) else item.members
        inner = depth
        if isinstance(item, LaidUnion):
            inner += 1
            yield f"{indent}union of {len(members)}", *_extent(item.stop - item.start, item), ""
        for member in members:
            num_tokens = sum(len(s.token_ids) for m in member.walk() for s in m.segments)
            title = f"{'  ' * inner}module {member.node.name}"
            yield title, *_extent(num_tokens, member), ""
            yield from _rows(name, member, inner + 1, encoded)


def _extent(num_tokens: int, item: LaidItem) -> tuple[str, str]:
    start = item.position if isinstance(item, Segment) else item.start
    return f"{num_tokens} tokens", f"{start}…{item.stop}"
