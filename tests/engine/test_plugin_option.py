# SPDX-License-Identifier: Apache-2.0
"""`--plugin choreo`: what vLLM's command line makes of an engine, with the option and without."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.grids import sampled

# Importing vLLM takes 8 s, so one process does it and forks one for each case. What a case needs
# has not happened when it forks: no plugin is loaded, no parser is made, no engine is configured.
_CASES = """
import json, os, sys
from vllm import AsyncEngineArgs, EngineArgs
from tests.vllm_names import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser

def configure(argv, has_parser):
    args = None
    if has_parser:
        args = make_arg_parser(FlexibleArgumentParser()).parse_args(argv)
        args.model = args.model_tag
        engine_args = AsyncEngineArgs.from_cli_args(args)
    else:
        engine_args = AsyncEngineArgs(argv[0], dtype="float32", max_model_len=256)
    config = engine_args.create_engine_config()
    from vllm.v1.attention.backends.registry import AttentionBackendEnum
    return {
        "block_size": config.cache_config.block_size,
        "scheduler": config.scheduler_config.scheduler_cls,
        "worker": config.parallel_config.worker_cls,
        "backend": AttentionBackendEnum.CPU_ATTN.get_path(),
        "servers": getattr(args, "api_server_count", None),
        "names": os.environ.get("VLLM_PLUGINS"),
        "loaded": os.environ.get("OTHER_PLUGIN_LOADED"),
        "ours": any(name.startswith("vllm_choreo") for name in sys.modules),
    }

EngineArgs.add_cli_args(FlexibleArgumentParser())  # fills caches; loads no plugin
for number, case in enumerate(json.load(open(sys.argv[1]))):
    pid = os.fork()
    if not pid:
        log = os.open(f"{sys.argv[1]}.{number}.log", os.O_CREAT | os.O_WRONLY)
        os.dup2(log, 1), os.dup2(log, 2)
        os.environ.update(case["env"])
        sys.path[:0] = case["path"]
        found = configure(case["argv"], case["has_parser"])
        with open(f"{sys.argv[1]}.{number}.json", "w") as file:
            json.dump(found, file)
        sys.stdout.flush(), sys.stderr.flush(), os._exit(0)
    os.waitpid(pid, 0)
"""

_STOCK = {
    "block_size": 128,
    "scheduler": None,
    "worker": "vllm.v1.worker.cpu_worker.CPUWorker",
}
_OURS = {
    "block_size": 32,
    "scheduler": "vllm_choreo.engine.scheduler.scheduler.ChoreoScheduler",
    "worker": "vllm_choreo.engine.worker.cpu_worker.ChoreoCPUWorker",
}
# Naming the plugin that is loaded from the start, too, and not the one that would download.
_NAMES = "lora_filesystem_resolver,choreo"


def _case(*options: str, has_parser: bool = True, path: str = "", **env: str) -> dict[str, Any]:
    paths = [path] if path else []
    return {"options": options, "has_parser": has_parser, "path": paths, "env": env}


_ALL: dict[str, dict[str, Any]] = {
    "no option": _case(),
    "option": _case("--plugin", "choreo"),
    "servers": _case("--plugin", "choreo", "--api-server-count", "2"),
    "servers before": _case("--api-server-count", "2", "--plugin", "choreo"),
    "twice": _case("--plugin=choreo", "--plugin", "choreo"),
    "variable": _case(VLLM_PLUGINS="choreo"),
    "config file": _case("--config", "CONFIG"),
    "not named": _case(VLLM_PLUGINS="lora_filesystem_resolver"),
    "none named": _case(VLLM_PLUGINS=""),
    "library": _case(has_parser=False),
    "child of a stock server": _case(has_parser=False, CHOREO_ONLY_IF_NAMED="1"),
    "child of a server": _case(has_parser=False, CHOREO_ONLY_IF_NAMED="1", VLLM_PLUGINS=_NAMES),
    "another": _case("--plugin", "lora_filesystem_resolver"),
    "another before": _case("--plugin", "lora_filesystem_resolver", "--plugin", "choreo"),
    "unknown": _case("--plugin", "nobody"),
    "other stays": _case("--plugin", "choreo", path="OTHER"),
    "other added": _case("--plugin", "other", path="OTHER", VLLM_PLUGINS="choreo"),
    "other has routes": _case("--plugin", "choreo", path="ROUTES"),
}

Result = tuple[dict[str, Any] | None, str]


def _install_other(folder: Path, *groups: str) -> Path:
    """A distribution `other` with a plugin `other` in these groups, to be put on the path."""
    info = folder / "other-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: other\nVersion: 1.0\n")
    points = "".join(f"[{group}]\nother = other_plugin:register\n" for group in groups)
    (info / "entry_points.txt").write_text(points)
    code = "import os\ndef register():\n    os.environ['OTHER_PLUGIN_LOADED'] = 'yes'\n"
    (folder / "other_plugin.py").write_text(code)
    return folder


@pytest.fixture(scope="module")
def result(
    request: pytest.FixtureRequest,
    tiny_model_path: Callable[[str], Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Callable[[str], Result]:
    """`result(name)`: what a case found, None if it ended, and what it wrote.

    A case takes 2 s, so those run alone that the tests of this run ask for.
    """
    names = [name for name in _ALL if name in _asked_for(request)]
    folder = tmp_path_factory.mktemp("option")
    (folder / "serve.yaml").write_text("plugin: choreo\nmax-model-len: 512\n")
    general = "vllm.general_plugins"
    places = {
        "CONFIG": str(folder / "serve.yaml"),
        "OTHER": str(_install_other(folder / "other", general)),
        "ROUTES": str(_install_other(folder / "routes", general, "vllm.endpoint_plugins")),
    }
    model = str(tiny_model_path("llama"))
    cases = []
    for case in map(_ALL.__getitem__, names):
        options = [places.get(word, word) for word in case["options"]]
        argv = [model, "--dtype", "float32", *options]
        cases.append({**case, "argv": argv, "path": [places[word] for word in case["path"]]})
    listed = folder / "cases"
    listed.write_text(json.dumps(cases))
    unset = ("VLLM_PLUGINS", "VLLM_LOGGING_LEVEL", "CHOREO_ONLY_IF_NAMED")
    environment = {key: value for key, value in os.environ.items() if key not in unset}
    subprocess.run([sys.executable, "-c", _CASES, str(listed)], env=environment, check=True)

    def get(name: str) -> Result:
        number = names.index(name)
        found, log = (Path(f"{listed}.{number}.{kind}") for kind in ("json", "log"))
        return json.loads(found.read_text()) if found.exists() else None, log.read_text()

    return get


def _asked_for(request: pytest.FixtureRequest) -> set[str]:
    """Names of cases, which are parameters of the tests of this run."""
    found: set[str] = set()
    for item in request.session.items:
        if item.path == request.path:
            params = item.callspec.params if hasattr(item, "callspec") else {}
            found |= {params.get("name"), params.get("case")}
    return found


def _assert_has(found: dict[str, Any] | None, expected: dict[str, Any], log: str) -> None:
    assert found is not None, log
    assert {key: found[key] for key in expected} == expected


@pytest.mark.parametrize(
    "name",
    sampled(["no option", "not named", "another", "child of a stock server", "none named"], 2),
)
def test_engine_is_vllms_own_where_the_plugin_is_not_asked_for(
    name: str, result: Callable[[str], Result]
) -> None:
    found, log = result(name)
    _assert_has(found, _STOCK, log)
    assert found is not None
    assert found["backend"].startswith("vllm.v1.")
    # Where the variable leaves the plugin out, vLLM does not even import it.
    assert found["ours"] == ("VLLM_PLUGINS" not in _ALL[name]["env"])
    assert log.count("--plugin choreo turns it on") == found["ours"]


@pytest.mark.parametrize(
    "name",
    sampled(["option", "variable", "library", "twice", "another before", "child of a server"], 3),
)
def test_engine_choreographs(name: str, result: Callable[[str], Result]) -> None:
    found, log = result(name)
    names = {"variable": "choreo", "library": None}.get(name, _NAMES)
    _assert_has(found, {**_OURS, "names": names}, log)
    assert "turns it on" not in log


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["config file"])
def test_config_file(name: str, result: Callable[[str], Result]) -> None:
    found, log = result(name)
    _assert_has(found, {**_OURS, "names": _NAMES}, log)


@pytest.mark.parametrize("name", ["unknown"])
def test_unknown_name_is_refused(name: str, result: Callable[[str], Result]) -> None:
    found, log = result(name)
    assert found is None
    assert "no plugin 'nobody' is installed; installed are choreo, lora_filesystem" in log


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["other stays"])
def test_other_plugins_stay_as_they_are(name: str, result: Callable[[str], Result]) -> None:
    found, log = result(name)
    names = "lora_filesystem_resolver,other,choreo"
    _assert_has(found, {**_OURS, "names": names, "loaded": "yes"}, log)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["other added"])
def test_another_plugin_is_added_to_those_of_the_variable(
    name: str, result: Callable[[str], Result]
) -> None:
    found, log = result(name)
    _assert_has(found, {**_OURS, "names": "choreo,other", "loaded": "yes"}, log)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["other has routes"])
def test_no_routes_are_added_unasked(name: str, result: Callable[[str], Result]) -> None:
    """A plugin that is loaded anyway would, when named, add its routes, too."""
    found, log = result(name)
    assert found is None
    assert "other would be named too" in log


@pytest.mark.parametrize(
    ("case", "servers"),
    [
        ("no option", None),
        ("option", 1),
        ("servers", 2),
        pytest.param("servers before", 2, marks=pytest.mark.exhaustive),
    ],
)
def test_one_api_server_unless_others_are_asked_for(
    case: str, servers: int | None, result: Callable[[str], Result]
) -> None:
    """vLLM would start one for each engine."""
    found, log = result(case)
    _assert_has(found, {"servers": servers}, log)
