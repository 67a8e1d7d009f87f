# SPDX-License-Identifier: Apache-2.0
"""What our package uses of vLLM, checked by sources: names, overridden methods, calls."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass

from tools.vllm_check.signatures import (
    Signature,
    cannot_stand_in,
    constructor,
    kind,
    misfits,
    signature,
)
from tools.vllm_check.source_tree import Alias, Class, Function, Module, SourceTree

# A class of vLLM named in a string, as configurations do.
_PATH = re.compile(r"vllm(\.\w+)+\.[A-Z]\w*")


@dataclass(frozen=True, order=True)
class Finding:
    """Something that vLLM does not have, or has otherwise."""

    place: str
    text: str

    def __str__(self) -> str:
        return f"{self.place}: {self.text}"


class Uses:
    """The uses of the package `theirs` in the package `ours`.

    Attributes:
        counts: how many of each kind were looked at.
    """

    def __init__(self, tree: SourceTree, ours: str = "vllm_choreo", theirs: str = "vllm") -> None:
        self.tree = tree
        self.ours = ours
        self.theirs = theirs
        self.counts = dict.fromkeys(("names", "overrides", "calls", "attributes"), 0)

    def findings(self, declared: tuple[str, ...] = ()) -> list[Finding]:
        """Everything that does not fit, in the order of the files."""
        found = set()
        for module in self.tree.modules(self.ours):
            found.update(self._names(module))
            found.update(self._calls_of_names(module))
            found.update(self._annotated(module))
            for cls in self.tree.classes(module):
                if any(self._is_theirs(base) for base in self.tree.linear(cls)):
                    found.update(self._class(cls))
        for text in declared:
            found.update(self._declared(text))
        return sorted(found)

    def _is_theirs(self, what: Class | Module) -> bool:
        module = what.module if isinstance(what, Class) else what
        return module.name.partition(".")[0] == self.theirs

    def _place(self, module: Module, node: ast.AST) -> str:
        name = module.path.relative_to(self.tree.roots[self.ours].parent)
        return f"{name}:{getattr(node, 'lineno', 0)}"

    # -- names ---------------------------------------------------------------------------------

    def _imports(self, module: Module) -> Iterator[tuple[ast.AST, str, Alias]]:
        for node in ast.walk(module.tree):
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                for name, alias in module.imported(node):
                    if alias.module.partition(".")[0] == self.theirs:
                        yield node, name, alias

    def _names(self, module: Module) -> Iterator[Finding]:
        for node, _, alias in self._imports(module):
            self.counts["names"] += 1
            if not self.tree.find(alias.module, alias.name):
                path = f"{alias.module}.{alias.name}".rstrip(".")
                yield Finding(self._place(module, node), f"there is no {path}")
        for node in ast.walk(module.tree):
            text = node.value if isinstance(node, ast.Constant) else None
            if isinstance(text, str) and _PATH.fullmatch(text):
                self.counts["names"] += 1
                if not self.tree.find(*text.rsplit(".", 1)):
                    yield Finding(self._place(module, node), f"there is no {text}")

    def _of_names(self, module: Module) -> dict[str, Class | Function]:
        """Classes and functions of vLLM by the name that they have in one of our files."""
        found = {}
        for _, name, alias in self._imports(module):
            for what in self.tree.find(alias.module, alias.name):
                if isinstance(what, (Class, ast.FunctionDef, ast.AsyncFunctionDef)):
                    found.setdefault(name, what)
        return found

    def _calls_of_names(self, module: Module) -> Iterator[Finding]:
        named = self._of_names(module)
        for node in ast.walk(module.tree):
            match node:
                case ast.Call(func=ast.Name(id=name)) if name in named:
                    yield from self._call(module, node, name, self._signature(named[name]))
                case ast.Attribute(value=ast.Name(id=name), attr=attribute, ctx=ast.Load()) if (
                    isinstance(named.get(name), Class)
                ):
                    yield from self._attribute(module, node, named[name], attribute)

    def _signature(self, what: Class | Function) -> Signature | None:
        if isinstance(what, Class):
            return constructor(self.tree, what)
        return signature(what, is_method=False)

    def _call(
        self, module: Module, call: ast.Call, name: str, target: Signature | None
    ) -> Iterator[Finding]:
        if target is not None:
            self.counts["calls"] += 1
            for text in misfits(call, target):
                yield Finding(self._place(module, call), f"{name} {text}")

    def _attribute(self, module: Module, node: ast.AST, cls: Class, name: str) -> Iterator[Finding]:
        self.counts["attributes"] += 1
        order = self.tree.linear(cls)
        if hasattr(type, name) or any(name in each.attributes for each in order):
            return
        # Of an enumeration and its like the base has more; nothing else of a foreign one is used.
        if not self.tree.has_foreign_base(cls) or not name.islower():
            yield Finding(self._place(module, node), f"{cls.name} has no {name}")

    # -- parameters that are annotated with classes of vLLM ----------------------------------------

    def _annotated(self, module: Module) -> Iterator[Finding]:
        named = self._of_names(module)
        for function in ast.walk(module.tree):
            if not isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef)):
                continue
            arguments = (*function.args.args, *function.args.kwonlyargs)
            typed = {a.arg: self._annotation(a.annotation, named) for a in arguments}
            for node in ast.walk(function):
                match node:
                    case ast.Call(func=ast.Attribute(value=ast.Name(id=name), attr=method)) if (
                        typed.get(name)
                    ):
                        yield from self._method_call(module, node, typed[name], method)
                    case ast.Attribute(value=ast.Name(id=name), attr=attribute) if typed.get(name):
                        yield from self._attribute(module, node, typed[name], attribute)

    def _annotation(
        self, annotation: ast.expr | None, named: dict[str, Class | Function]
    ) -> Class | None:
        match annotation:
            case ast.BinOp(left=left, right=ast.Constant(value=None)):
                return self._annotation(left, named)
            case ast.Name(id=name) if isinstance(named.get(name), Class):
                return named[name]
        return None

    def _method_call(
        self, module: Module, call: ast.Call, cls: Class, name: str, after: Class | None = None
    ) -> Iterator[Finding]:
        """A call of a method that `cls` has from vLLM; with `after`, from behind that class."""
        order = self.tree.linear(cls)
        if after is not None:
            order = order[order.index(after) + 1 :]
        owner = next((each for each in order if name in each.attributes), None)
        if owner is None:
            is_known = hasattr(object, name) or self.tree.has_foreign_base(cls)
            if after is not None and not is_known:
                text = f"{cls.name}: nothing to override has {name}"
                yield Finding(self._place(module, call), text)
            return
        method = owner.methods.get(name)
        if method is None or not self._is_theirs(owner) or kind(method) == "property":
            return
        yield from self._call(module, call, f"{owner.name}.{name}", signature(method, True))

    # -- classes that derive from vLLM's -----------------------------------------------------------

    def _class(self, cls: Class) -> Iterator[Finding]:
        order = self.tree.linear(cls)
        known = set().union(*(each.attributes for each in order))
        is_open = self.tree.has_foreign_base(cls)
        for place, ours in enumerate(order):
            if self._is_theirs(ours):
                continue
            for name, method in ours.methods.items():
                yield from self._override(ours, method, order[place + 1 :], name)
            for node in ast.walk(ours.node):
                match node:
                    case ast.Call(
                        func=ast.Attribute(value=ast.Call(func=ast.Name("super")), attr=m)
                    ):
                        yield from self._method_call(ours.module, node, cls, m, after=ours)
                    case ast.Call(func=ast.Attribute(value=ast.Name("self"), attr=m)):
                        yield from self._method_call(ours.module, node, cls, m)
                    case ast.Attribute(value=ast.Name("self"), attr=name):
                        self.counts["attributes"] += 1
                        if not (is_open or name in known or hasattr(object, name)):
                            yield Finding(
                                self._place(ours.module, node), f"{cls.name} has no {name}"
                            )

    def _override(
        self, ours: Class, method: Function, behind: list[Class], name: str
    ) -> Iterator[Finding]:
        owner = next((each for each in behind if name in each.methods), None)
        if owner is None or not self._is_theirs(owner) or name in ("__init__", "__getattr__"):
            return
        self.counts["overrides"] += 1
        for text in cannot_stand_in(method, owner.methods[name], self._most_by_position(name)):
            yield Finding(self._place(ours.module, method), f"{owner.name}.{name} {text}")

    def _most_by_position(self, name: str) -> int:
        """The most arguments that vLLM's engine gives to methods of that name by position."""
        counts = [
            len(node.args)
            for module in self.tree.modules(f"{self.theirs}.v1", containing=f".{name}(")
            for node in ast.walk(module.tree)
            if isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr == name
        ]
        return max(counts, default=0)

    # -- what no annotation tells --------------------------------------------------------------

    def _declared(self, text: str) -> Iterator[Finding]:
        """`package.module.Class.method(a, name=b)`, a function like this, or an attribute."""
        expression = ast.parse(text, mode="eval").body
        call = expression if isinstance(expression, ast.Call) else None
        path = ast.unparse(call.func if call else expression)
        self.counts["calls" if call else "attributes"] += 1
        exists, target = self._resolved(path.split("."))
        if not exists:
            yield Finding("declared.py", f"there is no {path}")
        elif call is not None and target is not None:
            for problem in misfits(call, target):
                yield Finding("declared.py", f"{path} {problem}")

    def _resolved(self, parts: list[str]) -> tuple[bool, Signature | None]:
        """Whether a dotted path leads somewhere, and how that is called if it is known."""
        length = len(parts) - 1
        while self.tree.module(".".join(parts[:length])) is None and length > 1:
            length -= 1
        cls = None
        for found in self.tree.find(".".join(parts[:length]), parts[length]):
            if isinstance(found, (ast.FunctionDef, ast.AsyncFunctionDef)):
                return True, self._signature(found)
            cls = found if isinstance(found, Class) else cls
        if cls is None or length + 1 == len(parts):
            return cls is not None, cls and self._signature(cls)
        name = parts[length + 1]
        owner = next((c for c in self.tree.linear(cls) if name in c.attributes), None)
        method = owner.methods.get(name) if owner is not None else None
        return owner is not None, method and signature(method, is_method=True)
