# SPDX-License-Identifier: Apache-2.0
"""README's examples and the folder `examples`, as type checkers of users see them.

`python -m tools.typed_examples`, a part of `make lint`, runs mypy --strict and pyright on them; one
that is not installed is left out.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).parents[1]
# Packages too large to follow, and packages of ours that no signature of a facade names.
_SKIPPED = (
    *("vllm", "torch", "numpy", "triton", "transformers", "tqdm", "fsspec", "safetensors"),
    *(f"vllm_choreo.{package}" for package in ("engine", "ops", "server", "store")),
)
MYPY_CONFIG = f"""[mypy]
strict = True
follow_imports = silent
{"".join(f"[mypy-{name}.*]{chr(10)}follow_imports = skip{chr(10)}" for name in _SKIPPED)}"""


# Pyright would read all of their modules, for minutes, to learn what examples do not use.
_STUBBED = ("numpy", "pydantic", "torch", "transformers", "triton")
_STUB = "from typing import Any\n\ndef __getattr__(name: str) -> Any: ...\n"


def copy_examples(folder: Path) -> list[Path]:
    """Copy the examples to a folder, where nothing but what is installed is found; the copies."""
    readme = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    texts = {f"readme_{number}.py": text for number, text in enumerate(readme)}
    for path in ROOT.glob("examples/**/*.py"):
        texts[path.name] = path.read_text()
    for name, text in texts.items():
        (folder / name).write_text(text)
    return [folder / name for name in texts]


def main() -> int:
    """Check the examples; 1 if a checker has found something."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        names = [path.name for path in copy_examples(folder)]
        (folder / "mypy.ini").write_text(MYPY_CONFIG)
        (folder / "pyrightconfig.json").write_text(json.dumps({"extraPaths": [str(ROOT)]}))
        for package in _STUBBED:
            stub = folder / "typings" / package / "__init__.pyi"
            stub.parent.mkdir(parents=True)
            stub.write_text(_STUB)
        cache = f"--cache-dir={ROOT}/.mypy_cache/examples"
        commands = {
            "mypy": ["--config-file=mypy.ini", cache, *names],
            "pyright": [f"--pythonpath={sys.executable}"],
        }
        environment = {"MYPYPATH": str(ROOT), "PYRIGHT_PYTHON_IGNORE_WARNINGS": "1", **os.environ}
        failed = False
        for tool, arguments in commands.items():
            if find_spec(tool) is None:
                print(f"{tool} is not installed: left out", file=sys.stderr)
                continue
            command = [sys.executable, "-m", tool, *arguments]
            failed |= bool(subprocess.run(command, cwd=folder, env=environment).returncode)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
