# SPDX-License-Identifier: Apache-2.0
"""Names, classes and functions of Python packages, read from their sources without importing."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Alias:
    """A name that stands for `name` of `module`, or for the module itself if `name` is empty."""

    module: str
    name: str = ""


class External:
    """Something of a package that is not looked at."""


@dataclass(eq=False)
class Module:
    """One file.

    Attributes:
        name: dotted.
        names: what is defined or imported at the top level, in branches, too; a name may be
            several things.
        stars: modules of which everything is imported.
    """

    name: str
    path: Path
    tree: ast.Module
    names: dict[str, list[ast.AST | Alias]] = field(default_factory=dict)
    stars: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._read(self.tree.body)

    def _read(self, body: list[ast.stmt]) -> None:
        for statement in body:
            if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                self._add(statement.name, statement)
            elif isinstance(statement, ast.Assign):
                for target in statement.targets:
                    self._assign(target, statement)
            elif isinstance(statement, (ast.AnnAssign, ast.AugAssign)):
                self._assign(statement.target, statement)
            elif isinstance(statement, (ast.Import, ast.ImportFrom)):
                for name, alias in self.imported(statement):
                    if name == "*":
                        self.stars.append(alias.module)
                    else:
                        self._add(name, alias)
            else:  # if, try, with, for: what is inside may be defined
                for part in ("body", "orelse", "finalbody"):
                    self._read(getattr(statement, part, []))
                for handler in getattr(statement, "handlers", []):
                    self._read(handler.body)

    def _assign(self, target: ast.expr, statement: ast.stmt) -> None:
        for node in ast.walk(target):
            if isinstance(node, ast.Name):
                self._add(node.id, statement)

    def _add(self, name: str, what: ast.AST | Alias) -> None:
        self.names.setdefault(name, []).append(what)

    def imported(self, statement: ast.Import | ast.ImportFrom) -> Iterator[tuple[str, Alias]]:
        """`(name here, what it stands for)` of an import, wherever in the file it stands."""
        if isinstance(statement, ast.Import):
            for alias in statement.names:
                whole = alias.name if alias.asname else alias.name.partition(".")[0]
                yield alias.asname or whole, Alias(whole)
            return
        module = statement.module or ""
        if statement.level:
            package = self.name.split(".")
            if self.path.name != "__init__.py":
                package.pop()
            package = package[: len(package) - statement.level + 1]
            module = ".".join([*package, *([module] if module else [])])
        for alias in statement.names:
            yield alias.asname or alias.name, Alias(module, alias.name)


@dataclass(eq=False)
class Class:
    """A class with what its body and its methods define."""

    module: Module
    node: ast.ClassDef

    @property
    def name(self) -> str:
        return f"{self.module.name}.{self.node.name}"

    @cached_property
    def methods(self) -> dict[str, Function]:
        found = {}
        for statement in self._body(self.node.body):
            if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef)):
                found.setdefault(statement.name, statement)
        return found

    @cached_property
    def fields(self) -> dict[str, ast.AnnAssign]:
        """Annotated names of the body, in order."""
        return {
            statement.target.id: statement
            for statement in self.node.body
            if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name)
        }

    @cached_property
    def attributes(self) -> set[str]:
        """All names that the class or its methods give to instances."""
        found = set(self.methods)
        for statement in self._body(self.node.body):
            if isinstance(statement, (ast.Assign, ast.AnnAssign)):
                targets = getattr(statement, "targets", None) or [statement.target]
                found |= {n.id for t in targets for n in ast.walk(t) if isinstance(n, ast.Name)}
            elif isinstance(statement, ast.ClassDef):
                found.add(statement.name)
        for node in ast.walk(self.node):
            if (
                isinstance(node, ast.Attribute)
                and isinstance(node.ctx, ast.Store)
                and isinstance(node.value, ast.Name)
                and node.value.id == "self"
            ):
                found.add(node.attr)
        return found

    def _body(self, body: list[ast.stmt]) -> Iterator[ast.stmt]:
        for statement in body:
            yield statement
            if isinstance(statement, (ast.If, ast.Try)):
                yield from self._body([*statement.body, *statement.orelse])


class SourceTree:
    """Packages by name.

    Args:
        roots: of each package, the folder that has its files.
    """

    def __init__(self, roots: Mapping[str, Path]) -> None:
        self.roots = roots
        self.module = cache(self._module)
        self.linear = cache(self._linear)

    def modules(self, package: str, containing: str = "") -> Iterator[Module]:
        """The files of a package that contain a text."""
        top, *rest = package.split(".")
        root = self.roots[top]
        for path in sorted(root.joinpath(*rest).rglob("*.py")):
            if containing and containing not in path.read_text():
                continue
            parts = [top, *path.relative_to(root).with_suffix("").parts]
            module = self.module(".".join(parts[:-1] if parts[-1] == "__init__" else parts))
            assert module is not None
            yield module

    def _module(self, name: str) -> Module | None:
        package, *rest = name.split(".")
        if package not in self.roots:
            return None
        base = self.roots[package].joinpath(*rest)
        for path in (base / "__init__.py", base.with_suffix(".py")):
            if path.is_file():
                return Module(name, path, ast.parse(path.read_text()))
        return None

    def is_package(self, name: str) -> bool:
        """Whether a dotted name begins with a package of this tree."""
        return name.partition(".")[0] in self.roots

    def find(self, module: str, name: str = "") -> list[Module | Class | ast.AST | External]:
        """All that `name` of `module` may be, aliases followed; nothing if it does not exist."""
        return list(self._find(module, name, set()))

    def _find(self, module_name: str, name: str, seen: set[tuple[str, str]]) -> Iterator:
        if (module_name, name) in seen:
            return
        seen.add((module_name, name))
        if not self.is_package(module_name):
            yield External()
            return
        module = self.module(module_name)
        if not name or module is None:
            if module is not None:
                yield module
            return
        for what in module.names.get(name, ()):
            if isinstance(what, Alias):
                yield from self._find(what.module, what.name, seen)
            elif isinstance(what, ast.ClassDef):
                yield self._class(module, what)
            else:
                yield what
        if (submodule := self.module(f"{module_name}.{name}")) is not None:
            yield submodule
        if name not in module.names:
            for star in module.stars:
                yield from self._find(star, name, seen)

    @cache  # noqa: B019 - a tree lives as long as the check
    def _class(self, module: Module, node: ast.ClassDef) -> Class:
        return Class(module, node)

    def classes(self, module: Module) -> Iterator[Class]:
        """Classes at the top level of a file."""
        for node in (node for found in module.names.values() for node in found):
            if isinstance(node, ast.ClassDef):
                yield self._class(module, node)

    def named_class(self, module: Module, expression: ast.expr) -> Class | None:
        """The class that an expression at the top level of `module` names, if it names one."""
        match expression:
            case ast.Subscript(value=value):
                return self.named_class(module, value)
            case ast.Name(id=name):
                found = self.find(module.name, name)
            case ast.Attribute(value=ast.Name(id=owner), attr=name):
                owners = [m for m in self.find(module.name, owner) if isinstance(m, Module)]
                found = [f for m in owners for f in self.find(m.name, name)]
            case _:
                return None
        return next((f for f in found if isinstance(f, Class)), None)

    def _linear(self, cls: Class) -> list[Class]:
        """A class and its bases in the order in which Python looks through them."""
        bases = [self.named_class(cls.module, base) for base in cls.node.bases]
        orders = [self.linear(base) for base in bases if base is not None]
        merged = [cls]
        queues = [list(order) for order in [*orders, [b for b in bases if b is not None]]]
        while queues := [queue for queue in queues if queue]:
            heads = [q[0] for q in queues if not any(q[0] in other[1:] for other in queues)]
            merged.append(heads[0] if heads else queues[0][0])
            queues = [[c for c in queue if c is not merged[-1]] for queue in queues]
        return merged

    def has_foreign_base(self, cls: Class) -> bool:
        """Whether the class inherits from one of a package that is not looked at."""
        known = {"object", "ABC", "Protocol", "Generic"}
        return any(
            self.named_class(each.module, base) is None
            and getattr(base, "id", getattr(getattr(base, "value", None), "id", "")) not in known
            for each in self.linear(cls)
            for base in each.node.bases
        )
