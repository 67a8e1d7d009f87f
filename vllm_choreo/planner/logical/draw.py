# SPDX-License-Identifier: Apache-2.0
"""Pictures of graphs as Mermaid text, which documentation and many editors show."""

from __future__ import annotations

from vllm_choreo.planner.logical.nodes import Node, Operators

_SHAPES = {
    "llm": ("([", "])"),
    "placeholder": ("[/", "/]"),
    "data": ("[(", ")]"),
    "switch": ("{", "}"),
}
_MAX_CHARS = 32  # of a text in a box


def mermaid(graph: Operators) -> str:
    """Mermaid flowchart: a box for each operator, an arrow to it from each that it reads."""
    lines = ["flowchart TD"]
    for number, node in enumerate(graph.nodes):
        opening, closing = _SHAPES.get(node.kind, ("[", "]"))
        lines.append(f'  n{number}{opening}"{_label(node)}"{closing}')
    for number, node in enumerate(graph.nodes):
        keys = [*node.attrs["keys"], "else"] if node.kind == "switch" else []
        for position, given in enumerate(node.inputs):
            case = f"|{_text(str(keys[position - 1]))}|" if keys and position else ""
            lines.append(f"  n{given} -->{case} n{number}")
    for name, number in graph.outputs.items():
        lines.append(f'  o_{number}((("{_text(name)}")))')
        lines.append(f"  n{number} --> o_{number}")
    return "\n".join(lines) + "\n"


def _label(node: Node) -> str:
    about = {
        "fmt": lambda: "".join(p if isinstance(p, str) else "{}" for p in node.attrs["pieces"]),
        "fn": lambda: getattr(node.attrs["function"], "__name__", "function"),
        "chat": lambda: " ".join(role for role, _ in node.attrs["turns"]),
        "llm": lambda: " ".join(role for role, _ in node.attrs["turns"]),
        "item": lambda: f"[{node.attrs['index']}]",
        "slice": lambda: f"[{node.attrs['start'] or ''}:{node.attrs['stop'] or ''}]",
    }
    more = _text(about[node.kind]()) if node.kind in about else ""
    return f"{_text(node.name)}<br>{more}" if more else _text(node.name)


def _text(text: str) -> str:
    """Escape a text for Mermaid's quotes, on one line, cut to 32 characters."""
    text = " ".join(text.split())
    text = text if len(text) <= _MAX_CHARS else text[:_MAX_CHARS] + "…"
    return text.replace("&", "#amp;").replace('"', "#quot;").replace("<", "#lt;")
