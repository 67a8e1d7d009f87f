# SPDX-License-Identifier: Apache-2.0
"""Functions with `if` and `match` as modules: each branch is a module, exclusive ones are a union.

    @pml.program                                      <module name="trip">
    def trip(abroad=False, city="", days=param(5)):     I travel for <param name="days" len="5"/>.
        yield "I travel for "                           <module name="abroad">
        yield days                                        I need a passport.
        yield "."                                       </module>
        if abroad:                                      <union>
            yield " I need a passport."                   <module name="rome">…</module>
        match city:                                       <module name="oslo">…</module>
            case "rome": …                              </union>
            case "oslo": …                            </module>

    trip(abroad=True, city="oslo", days="a week")     <trip days="a week"><abroad/><oslo/></trip>

The function is rewritten so that it yields its branches, each as a function, and run once. What a
branch yields is what the function yields in it, so a prompt has the text of an ordinary run.
"""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from vllm_choreo.errors import PmlError
from vllm_choreo.pml.language.tree import MarkupNode, Module, Param, Turn, Union, Use

_CHOOSE = "__pml_choose"
_NO_NAME = re.compile(r"[^A-Za-z0-9_.-]+")


@dataclass(frozen=True)
class Condition:
    """The condition of a branch: an argument is true, is not, or has one of these values.

    Attributes:
        values: values of the argument; None: it is to be true.
        is_denied: whether the condition is the opposite.
    """

    argument: str
    values: tuple[str, ...] | None = None
    is_denied: bool = False

    def holds(self, arguments: Mapping[str, Any]) -> bool:
        """Tell if the branch is taken, where no branch before it is."""
        value = arguments[self.argument]
        found = bool(value) if self.values is None else value in self.values
        return found != self.is_denied

    @property
    def name(self) -> str:
        """Name for the module of the branch."""
        word = self.argument if self.values is None else "-or-".join(self.values)
        word = _NO_NAME.sub("-", word).strip("-.") or self.argument
        named = word if word[0].isalpha() or word[0] == "_" else f"{self.argument}-{word}"
        return f"not-{named}" if self.is_denied else named


@dataclass(frozen=True)
class _Choice:
    """Branches of which one at most is taken: the first whose test holds; None holds always."""

    cases: tuple[tuple[Condition | None, list[Any]], ...]


@dataclass
class _Taken:
    """A module of a program: its parameters, and the branches inside it.

    Attributes:
        choices: test, name and content of the modules of each choice.
    """

    params: set[str] = field(default_factory=set)
    choices: list[list[tuple[Condition | None, str, _Taken]]] = field(default_factory=list)


class Program:
    """A module made of a function with branches; calling it takes it in a prompt.

    Args:
        function: generator function. Arguments with a default `param(length)` are parameters; all
            others choose branches.
        items: makes nodes of what it yields.

    Attributes:
        module: the module.

    Raises:
        PmlError: a branch depends on an argument otherwise than by its truth or its value, or the
            function's source is not there.
    """

    def __init__(
        self, function: Callable[..., Any], items: Callable[[Iterable[Any]], tuple[Any, ...]]
    ) -> None:
        self._items = items
        self._defaults, self._params = _arguments(function)
        yielded = _rewritten(function, set(self._defaults))(**self._params, **self._defaults)
        self._taken = _Taken()
        children = self._nodes(list(yielded), self._taken)
        self.module = Module(children, name=function.__name__)

    @property
    def name(self) -> str:
        return self.module.name

    def __call__(self, **arguments: object) -> Use:
        """Take the module in a prompt, with the branches that these arguments choose.

        Raises:
            PmlError: there is no such argument, or one of a parameter is no text.
        """
        for name in arguments:
            if name not in self._defaults and name not in self._params:
                known = ", ".join([*self._defaults, *self._params])
                raise PmlError(
                    f"the arguments of {self.name} are {known}", parameter=name, value=name
                )
        given = {name: arguments.get(name, value) for name, value in self._defaults.items()}
        texts: dict[str, str] = {}
        for name in self._params.keys() & arguments.keys():
            text = arguments[name]
            if not isinstance(text, str):
                raise PmlError("text is needed", parameter=name, value=text)
            texts[name] = text
        return _use(self.name, self._taken, given, texts)

    def _nodes(self, yielded: Sequence[Any], taken: _Taken) -> tuple[MarkupNode, ...]:
        """Nodes of what a module yields; what is to be taken of it is noted."""
        nodes: list[MarkupNode] = []
        names: Counter[str] = Counter()
        for item in yielded:
            if not isinstance(item, _Choice):
                made = self._items([item])
                taken.params |= {param.name for param in _params_of(made)}
                nodes += made
                continue
            branches: list[tuple[Condition | None, str, _Taken]] = []
            modules = []
            for test, content in item.cases:
                name = test.name if test else f"no-{item.cases[0][0].name}"  # type: ignore[union-attr]
                names[name] += 1
                if names[name] > 1:
                    name = f"{name}.{names[name]}"
                inner = _Taken()
                modules.append(Module(self._nodes(content, inner), name=name))
                branches.append((test, name, inner))
            taken.choices.append(branches)
            nodes.append(modules[0] if len(modules) == 1 else Union(tuple(modules)))
        return tuple(nodes)


def _use(name: str, taken: _Taken, arguments: Mapping[str, Any], texts: Mapping[str, str]) -> Use:
    inside = []
    for branches in taken.choices:
        for test, inner_name, inner in branches:
            if test is None or test.holds(arguments):
                inside.append(_use(inner_name, inner, arguments, texts))
                break
    own = {param: text for param, text in texts.items() if param in taken.params}
    return Use(tuple(inside), name=name, arguments=tuple(own.items()))


def _params_of(nodes: Iterable[Any]) -> Iterator[Param]:
    for node in nodes:
        if isinstance(node, Param):
            yield node
        elif isinstance(node, Turn):
            yield from _params_of(node.children)


def _arguments(function: Callable[..., Any]) -> tuple[dict[str, Any], dict[str, Param]]:
    """Defaults of the arguments that choose, and the parameters by their names."""
    defaults: dict[str, Any] = {}
    params: dict[str, Param] = {}
    for name, argument in inspect.signature(function).parameters.items():
        if isinstance(argument.default, Param):
            params[name] = Param(name, argument.default.length, argument.default.scaffold)
        elif argument.default is argument.empty:
            raise PmlError(
                "an argument of a program has a default: param(length), or what it is where a "
                "prompt does not say",
                parameter=name,
            )
        else:
            defaults[name] = argument.default
    return defaults, params


# -- rewriting -----------------------------------------------------------------------------------


def _rewritten(function: Callable[..., Any], chooses: set[str]) -> Callable[..., Iterable[Any]]:
    """The function, yielding a `_Choice` where it had a branch on one of its arguments."""
    try:
        source = textwrap.dedent(inspect.getsource(function))
    except (OSError, TypeError) as error:
        raise PmlError(
            "the source of the function is not there: write it in a file",
            parameter="program",
            value=function.__name__,
        ) from error
    tree = ast.parse(source)
    (definition,) = tree.body
    if not isinstance(definition, ast.FunctionDef):
        raise PmlError("a program is a function", parameter="program", value=function.__name__)
    definition.decorator_list = []
    definition.args.defaults, definition.args.kw_defaults = (
        [],
        [None] * len(definition.args.kwonlyargs),
    )
    definition.body = [s for one in definition.body for s in _Rewriter(chooses).rewrite(one)]
    ast.fix_missing_locations(tree)
    names = {**function.__globals__, **_closure(function), _CHOOSE: _choose}
    exec(compile(tree, inspect.getsourcefile(function) or "<program>", "exec"), names)
    made: Callable[..., Iterable[Any]] = names[function.__name__]
    return made


def _closure(function: Callable[..., Any]) -> dict[str, Any]:
    free = function.__code__.co_freevars
    return dict(zip(free, (cell.cell_contents for cell in function.__closure__ or ()), strict=True))


def _choose(*cases: tuple[Any, Callable[[], Iterable[Any]]]) -> _Choice:
    """Run all branches; each test comes as the arguments of `Condition`, or None."""
    return _Choice(
        tuple((None if test is None else Condition(*test), list(run())) for test, run in cases)
    )


class _Rewriter(ast.NodeTransformer):
    """Rewriter of branches on some arguments; all other statements stay as they are."""

    def __init__(self, chooses: set[str]) -> None:
        self._chooses = chooses
        self._count = 0

    def rewrite(self, statement: ast.stmt) -> list[ast.stmt]:
        made = self.visit(statement)
        return made if isinstance(made, list) else [made]

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.FunctionDef:
        return node

    def visit_Lambda(self, node: ast.Lambda) -> ast.Lambda:
        return node

    def visit_Name(self, node: ast.Name) -> ast.Name:
        """Refuse an argument that chooses branches wherever else it is used."""
        if node.id in self._chooses:
            raise PmlError(
                f"line {node.lineno} of the function: an argument that chooses is read by `if x`, "
                '`if not x`, `if x == "text"` and `match x` alone; text takes param(length)',
                parameter=node.id,
            )
        return node

    def visit_If(self, node: ast.If) -> ast.AST | list[ast.stmt]:
        if not self._is_on_argument(node.test):
            return self.generic_visit(node)
        cases: list[tuple[ast.expr, list[ast.stmt]]] = []
        rest: list[ast.stmt] = [node]
        while len(rest) == 1 and isinstance(rest[0], ast.If):
            if not self._is_on_argument(rest[0].test):
                break
            cases.append((self._test(rest[0].test), rest[0].body))
            rest = rest[0].orelse
        if rest:
            cases.append((ast.Constant(None), rest))
        return self._choice(cases)

    def visit_Match(self, node: ast.Match) -> ast.AST | list[ast.stmt]:
        if not self._is_on_argument(node.subject):
            return self.generic_visit(node)
        if not isinstance(node.subject, ast.Name):
            self.visit(node.subject)
        cases: list[tuple[ast.expr, list[ast.stmt]]] = []
        for case in node.cases:
            values = _values(case.pattern)
            if case.guard is not None or values is None:
                raise PmlError(
                    f"line {case.pattern.lineno} of the function: a case is a text, several with "
                    "|, or _",
                    parameter="program",
                )
            assert isinstance(node.subject, ast.Name)
            test = _test_of(node.subject.id, values) if values else ast.Constant(None)
            cases.append((test, case.body))
        return self._choice(cases)

    def _is_on_argument(self, test: ast.expr) -> bool:
        return any(isinstance(n, ast.Name) and n.id in self._chooses for n in ast.walk(test))

    def _test(self, test: ast.expr) -> ast.expr:
        """The arguments of `Condition`, as an expression."""
        if isinstance(test, ast.Name):
            return _test_of(test.id, None)
        if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
            if isinstance(test.operand, ast.Name):
                return _test_of(test.operand.id, None, is_denied=True)
        elif isinstance(test, ast.Compare) and isinstance(test.left, ast.Name):
            (value, *more) = test.comparators
            is_text = isinstance(value, ast.Constant) and isinstance(value.value, str)
            if is_text and not more and isinstance(test.ops[0], (ast.Eq, ast.NotEq)):
                denied = isinstance(test.ops[0], ast.NotEq)
                return _test_of(test.left.id, (value.value,), is_denied=denied)  # type: ignore[attr-defined]
        self.generic_visit(ast.Expression(test))
        raise AssertionError("an argument in it is refused")

    def _choice(self, cases: Sequence[tuple[ast.expr, list[ast.stmt]]]) -> list[ast.stmt]:
        """Functions of the branches, and the statement that yields the choice."""
        made: list[ast.stmt] = []
        pairs: list[ast.expr] = []
        for test, body in cases:
            self._count += 1
            name = f"__pml_branch_{self._count}"
            inner = [s for one in body for s in self.rewrite(one)]
            # A branch that yields nothing is a generator all the same.
            nothing = ast.parse("if False:\n    yield").body
            definition = ast.parse(f"def {name}(): pass").body[0]
            assert isinstance(definition, ast.FunctionDef)
            definition.body = [*inner, *nothing]
            made.append(definition)
            pairs.append(ast.Tuple([test, ast.Name(name, ast.Load())], ast.Load()))
        call = ast.Call(ast.Name(_CHOOSE, ast.Load()), pairs, [])
        return [*made, ast.Expr(ast.Yield(call))]


def _test_of(argument: str, values: tuple[str, ...] | None, is_denied: bool = False) -> ast.expr:
    return ast.parse(repr((argument, values, is_denied)), mode="eval").body


def _values(pattern: ast.pattern) -> tuple[str, ...] | None:
    """Texts that a pattern matches; none: all; None: it is another pattern."""
    if isinstance(pattern, ast.MatchAs) and pattern.pattern is None and pattern.name is None:
        return ()
    if isinstance(pattern, ast.MatchValue):
        value = pattern.value
        is_text = isinstance(value, ast.Constant) and isinstance(value.value, str)
        return (value.value,) if is_text else None  # type: ignore[attr-defined]
    if isinstance(pattern, ast.MatchOr):
        found = [_values(one) for one in pattern.patterns]
        return tuple(v for one in found for v in one or ()) if all(found) else None
    return None
