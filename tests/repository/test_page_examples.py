# SPDX-License-Identifier: Apache-2.0
"""Every block of code of every page is run by a test that is named here, or not, with the reason.

Of the commands that are not run, `test_page_commands.py` parses the arguments.
"""

from __future__ import annotations

import ast
import re
import textwrap
from importlib import import_module
from pathlib import Path

import pytest

from tests.repository.pages import PAGES, ROOT, blocks_of, page_id

_LANGUAGES = {"sh", "bash", "python", "py", "toml", "yaml"}
_INSTALLS = "not run: it installs, for minutes, into the environment that runs the tests"
_SERVES = "not run: it starts a server for good; such servers are started by other tests"
_LONG = "not run: it takes hours with these numbers; the commands are tested with smaller ones"
_GPU = "not run: it needs a GPU, or one machine for itself"
_RELEASE = "not run: it releases"
_HTTP = "tests/server/test_http_page.py::test_the_page_is_what_happens"
_EXACT = "tests/engine/test_exact.py::test_the_page_on_exactness_runs"
_LAYERS = "tests/engine/test_layers.py::test_the_page_on_repair_runs"
_AGENTS = "tests/server/test_integrations_page.py::test_example_runs"
_OPERATING = "tests/server/test_metrics.py::test_documented_commands_run"
_OPENAI = "tests/server/test_openai.py::test_page_runs"
_PLANNER = "tests/engine/test_planner_docs.py::test_examples_run"
_KEEP = "tests/engine/test_keep.py::test_examples_of_the_documentation_run"
_PML = "tests/pml/test_docs.py::test_the_examples_run"
_AUTO = "tests/server/test_auto.py::test_the_page_runs"
_TRAINED = "tests/lab/train/test_docs.py::test_what_the_commands_leave_behind"
_COMMANDS = "tests/lab/train/test_docs.py::test_all_commands_are_understood"
_WORKFLOW = "tests/lab/cli/test_run_in_engine.py::test_the_workflow_of_the_documentation"
_FUNCTIONS = "tests/lab/cli/test_run_in_engine.py::test_the_page_has_functions_written"
_ROLES = "tests/lab/cli/test_roles_in_engine.py::test_documented_commands_are_understood"
_PARTS = "not run: parts of a program, whose names are the reader's"
_CLIENT = "not run: it goes on from a client of another page; test_prompts.py asks the same"
_MACHINES = "not run: workers on other machines"
_SELF_CHECK = (
    "tests/testing/test_selfcheck.py::test_the_command_of_the_page_shows_what_the_page_shows"
)
_THEIRS = "not run: a program of another project, in an environment that tests do not have"
_GRAFANA = "not run: a file of another program's"

RUN_BY: dict[str, list[str]] = {
    "README.md": [
        _INSTALLS,
        "tests/engine/test_readme.py::test_example_runs",
        _SERVES,
        "tests/server/test_readme.py::test_example_runs",
    ],
    "CONTRIBUTING.md": [_INSTALLS],
    "RELEASING.md": [_RELEASE],
    "docs/answers.md": [_LONG],
    "docs/commands.md": ["tests/cli/test_commands.py::test_the_page_adds_a_command"] * 2,
    "docs/exactness.md": [_EXACT] * 6,
    "docs/examples.md": [
        "tests/engine/test_examples.py::test_a_program_in_process_runs",
        "tests/server/test_examples.py::test_a_program_over_http_runs",
    ],
    "docs/fleet.md": [
        _SERVES,
        "not run: three engines take the memory of three",
        "tests/server/test_fleet.py::test_the_engines_are_seen_from_outside",
    ],
    "docs/gpu.md": [_GPU, _GPU],
    "docs/http.md": [_SERVES, *[_HTTP] * 9],
    "docs/install.md": [_INSTALLS, _INSTALLS],
    "docs/integrations.md": [
        _SERVES,
        *[_AGENTS] * 2,
        "tests/engine/test_in_process.py::test_the_page_runs",
        _AGENTS,
        _SERVES,
    ],
    "docs/keep.md": [
        *[_KEEP] * 3,
        "tests/engine/test_keep_command.py::test_the_commands_of_the_documentation_parse",
        _SERVES,
        "tests/server/test_keep.py::test_the_example_of_the_documentation",
    ],
    "docs/models.md": [
        "not run: it converts a file of the reader's; test_gguf_files.py small ones"
    ],
    "docs/on-ramps.md": [
        _SERVES,
        _AUTO,
        "tests/engine/test_auto.py::test_the_page_runs",
        *[_AUTO] * 3,
        "tests/chat/test_chats.py::test_the_command_of_the_page_explains_the_example",
        _SERVES,
        _THEIRS,
    ],
    "docs/openai.md": [_SERVES, *[_OPENAI] * 5, _SERVES, _OPENAI],
    "docs/operating.md": [
        *[_SERVES, _OPERATING] * 2,
        _SERVES,
        *[_OPERATING] * 2,
        _GRAFANA,
        _SERVES,
    ],
    "docs/planner.md": [*[_PLANNER] * 6, _MACHINES, _MACHINES],
    "docs/pml.md": [
        *[_PML] * 3,
        "tests/pml/test_docs.py::test_the_commands_parse",
        _SERVES,
        _CLIENT,
    ],
    "docs/repair.md": [
        *[_LAYERS] * 6,
        "tests/lab/study/test_evaluate.py::test_what_repair_buys",
        "tests/lab/study/test_calibrate.py::test_the_command",
    ],
    "docs/serve.md": ["not run: it installs, and serves for good; tests/cluster runs the command"],
    "docs/testing.md": [
        _SELF_CHECK,
        "tests/testing/test_docs.py::test_the_example_runs",
        "tests/testing/test_docs.py::test_the_fixture_serves",
    ],
    "docs/training.md": [
        _TRAINED,
        _PARTS,
        _PARTS,
        "tests/lab/study/test_evaluate.py::test_the_documentation",
        _SERVES,
        _COMMANDS,
        _SERVES,
        _COMMANDS,
        _COMMANDS,
    ],
    "docs/variants.md": [
        "tests/lab/study/test_profile_pair.py::test_the_documented_commands",
        _ROLES,
        _ROLES,
        _SERVES,
    ],
    "docs/wings.md": ["tests/server/test_wings.py::installed"] * 2,
    "docs/workflows.md": [
        _LONG,
        _FUNCTIONS,
        _SERVES,
        _LONG,
        _LONG,
        *[_WORKFLOW] * 3,
    ],
}


def blocks_to_run(page: Path) -> list[tuple[str, str]]:
    return [(language, text) for language, text in blocks_of(page) if language in _LANGUAGES]


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_every_block_is_run_or_says_why_not(page: Path) -> None:
    blocks = blocks_to_run(page)
    entries = RUN_BY.get(page_id(page), [])
    shown = [f"{language}: {text.splitlines()[0]}" for language, text in blocks]
    assert len(entries) == len(blocks), f"name who runs each of {shown}"


@pytest.mark.parametrize(
    "name", sorted({e for entries in RUN_BY.values() for e in entries if "::" in e})
)
def test_who_runs_a_block_reads_its_page(name: str) -> None:
    file, _, function = name.partition("::")
    text = (ROOT / file).read_text(encoding="utf-8")
    assert re.search(rf"^(async )?def {function}\(", text, re.MULTILINE)
    for page, entries in RUN_BY.items():
        if name in entries and page != "docs/examples.md":  # whose programs are run, by their names
            assert Path(page).name in text, f"{file} does not read {page}"


_NOT_RUN = [
    pytest.param(text, id=f"{page_id(page)}-{number}")
    for page in PAGES
    for number, ((language, text), entry) in enumerate(
        zip(blocks_to_run(page), RUN_BY.get(page_id(page), []), strict=False)
    )
    if language in ("python", "py") and entry.startswith("not run")
]


@pytest.mark.parametrize("text", _NOT_RUN)
def test_python_that_is_not_run_imports_what_is_there(text: str) -> None:
    # As in a coroutine: examples await.
    tree = ast.parse("async def example():\n" + textwrap.indent(text, "    "))
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            module = import_module(node.module or "")
            assert all(hasattr(module, alias.name) for alias in node.names), node.module


def test_no_page_is_named_that_is_not_there() -> None:
    assert set(RUN_BY) <= {page_id(page) for page in PAGES}
