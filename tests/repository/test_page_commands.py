# SPDX-License-Identifier: Apache-2.0
"""Commands of all pages: subcommands, options, targets and files that they name are there.

Which test runs a block of code, if one does, stands in `test_page_examples.py`.
"""

from __future__ import annotations

import argparse
import re
import tomllib
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.repository.pages import PAGES, ROOT, blocks_of, commands_of, page_id, prose_of
from vllm_choreo.cli import main as cli
from vllm_choreo.config import ChoreoConfig
from vllm_choreo.server.openai.reading import ARGUMENTS

_PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
_TARGETS = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
_COMMANDS = set(_PROJECT["entry-points"]["vllm_choreo.commands"])
# Options of programs that are not ours and not vLLM's.
_OTHERS = {"--no-build-isolation", "--no-deps", "--strict", "--"}


@pytest.fixture(scope="module")
def serve_parser() -> Any:
    """The parser of `vllm serve`, with the plugin's options."""
    with pytest.MonkeyPatch.context() as patch:
        # The plugin is named already, so that nothing is loaded by its option.
        for name, value in {"VLLM_PLUGINS": "choreo", "CHOREO_ONLY_IF_NAMED": "1"}.items():
            patch.setenv(name, value)
        from vllm.plugins import load_general_plugins
        from vllm.utils.argparse_utils import FlexibleArgumentParser

        from tests.vllm_names import make_arg_parser

        load_general_plugins()
        yield make_arg_parser(FlexibleArgumentParser())


def shell_commands(program: str) -> list[Any]:
    """Commands of the shell blocks of all pages that begin with a program."""
    return [
        pytest.param(words[1:], id=f"{page_id(page)}-{number}")
        for page in PAGES
        for number, words in enumerate(
            words
            for language, block in blocks_of(page)
            if language == "sh"
            for words in commands_of(block)
        )
        if words[0] == program
    ]


@pytest.mark.parametrize("words", shell_commands("vllm"))
def test_vllm_takes_the_arguments(words: list[str], serve_parser: Any) -> None:
    command, *arguments = words
    if command == "run-batch":
        from vllm.entrypoints.launchers.run_batch import make_arg_parser
        from vllm.utils.argparse_utils import FlexibleArgumentParser

        parser = make_arg_parser(FlexibleArgumentParser())
        assert parser.parse_args(arguments).input_file == "requests.jsonl"
        return
    assert command == "serve"
    args = serve_parser.parse_args(arguments)
    assert args.plugin == ["choreo"]
    ChoreoConfig.from_vllm(args)


def test_settings_of_the_page_for_operators_are_read(serve_parser: Any) -> None:
    (words,) = (
        given.values[0]
        for given in shell_commands("vllm")
        if "--additional-config" in given.values[0]
    )
    config = ChoreoConfig.from_vllm(serve_parser.parse_args(words[1:]))
    assert config.tenant_share == 0.5 and config.server.session_ttl_seconds == 600


@pytest.mark.parametrize("words", shell_commands("vllm-choreo"))
def test_our_commands_take_the_arguments(words: list[str]) -> None:
    assert cli._parser(words).parse_args(words).command == words[0]


@pytest.mark.parametrize("words", shell_commands("python"))
def test_programs_are_there(words: list[str]) -> None:
    name = words[1] if words[0] == "-m" else words[0]
    if words[0] == "-m" and name not in ("pytest", "mkdocs"):
        path = ROOT / name.replace(".", "/")
        assert (path / "__main__.py").exists() or path.with_suffix(".py").exists()
    elif words[0] != "-m":
        text = (ROOT / name).read_text(encoding="utf-8")
        for option in (word for word in words if word.startswith("--")):
            beside = [path.read_text() for path in (ROOT / name).parent.glob("*.py")]
            assert any(f'"{option}"' in given for given in (text, *beside)), option


@pytest.mark.parametrize("words", shell_commands("make"))
def test_targets_are_there(words: list[str]) -> None:
    assert {word for word in words if "=" not in word} <= _TARGETS


@pytest.mark.parametrize("words", shell_commands("pip"))
def test_what_pip_installs_is_there(words: list[str]) -> None:
    for word in words[1:]:
        name, _, extra = word.rstrip("]").partition("[")
        if extra:
            assert name in (".", "vllm-choreo") and extra in _PROJECT["optional-dependencies"]
        elif name.startswith("."):
            assert (ROOT / name).exists()


def test_no_command_is_looked_at_by_nobody() -> None:
    known = {"vllm", "vllm-choreo", "python", "make", "pip", "source", "git"}
    for page in PAGES:
        for language, block in blocks_of(page):
            if language == "sh":
                assert {words[0] for words in commands_of(block)} <= known, page_id(page)


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_what_is_named_in_the_text_is_there(page: Path) -> None:
    """Subcommands, targets, modules that are run, and keys of choreography."""
    named = re.findall(r"`([^`\n]+)`", prose_of(page))
    for text in named:
        if match := re.match(r"vllm-choreo ([a-z][a-z-]*)", text):
            assert match[1] in _COMMANDS | {"greet"}, text  # of the page on commands of one's own
        if match := re.match(r"make ([a-z-]+)", text):
            assert match[1] in _TARGETS, text
        if match := re.match(r"python -m ((?:benchmarks|tools|tests)[\w.]*)", text):
            path = ROOT / match[1].replace(".", "/")
            assert path.is_dir() or path.with_suffix(".py").exists(), text


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_options_that_are_named_are_there(page: Path, serve_parser: Any) -> None:
    """Options of commands, and the keys and variables of ours, which stand in the sources."""
    known = _option_strings(serve_parser) | _OTHERS | _our_options()
    named = re.findall(r"`[^`\n]*`", prose_of(page))
    options = {option for text in named for option in re.findall(r"(?<![\w-])--[a-z][\w-]*", text)}
    assert options <= known, options - known
    keys = {key for text in named for key in re.findall(r"\b(?:choreo|CHOREO)_[A-Za-z_]+\b", text)}
    # Keys of vLLM's field for others are made of the names of arguments.
    assert not {key for key in keys if key not in _sources() and key not in ARGUMENTS}


def _option_strings(parser: argparse.ArgumentParser) -> set[str]:
    return set(parser._option_string_actions)


@cache
def _sources() -> str:
    folders = ("vllm_choreo", "benchmarks", "tools", "tests", "examples", "patches")
    paths = [path for folder in folders for path in (ROOT / folder).rglob("*") if path.is_file()]
    texts = [p.read_text() for p in paths if p.suffix in (".py", ".toml", ".sh", ".json")]
    return "\n".join([*texts, (ROOT / "setup.py").read_text()])


@cache
def _our_options() -> set[str]:
    return set(re.findall(r"[\"'](--[a-z][\w-]*)", _sources()))


def test_an_option_that_is_not_there_is_found() -> None:
    made_up: Callable[[str], bool] = lambda option: option in _our_options()  # noqa: E731
    assert made_up("--choreo-auto") and not made_up("--choreo-" + "automatic")
