# SPDX-License-Identifier: Apache-2.0
"""vLLM's own tests of its schedulers, run with ours in their place."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from xml.etree import ElementTree

from tools.vllm_check.fetch import REPOSITORY

_TESTS = (
    "test_scheduler.py",
    "test_async_scheduler.py",
    "test_priority_scheduler_random.py",
    "test_priority_preemption_bug.py",
    "test_deferred_block_free.py",
    "test_prefix_caching.py",
)
# The tests name a model for its configuration alone; in this folder that is found without network.
_MODEL = "facebook/opt-125m"
_CONFIGURATION = {
    "architectures": ["OPTForCausalLM"],
    "model_type": "opt",
    "hidden_size": 768,
    "num_attention_heads": 12,
    "num_hidden_layers": 12,
    "ffn_dim": 3072,
    "word_embed_proj_dim": 768,
    "vocab_size": 50272,
    "max_position_embeddings": 2048,
    "do_layer_norm_before": True,
    "activation_function": "relu",
    "bos_token_id": 2,
    "eos_token_id": 2,
    "pad_token_id": 1,
    "torch_dtype": "float16",
}
_ENVIRONMENT = {
    "VLLM_PLUGINS": "",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "HF_HUB_OFFLINE": "1",
}


def compare(folder: Path, is_installed: bool) -> list[str]:
    """Run the tests with vLLM's schedulers, then with ours; the names of those that were lost.

    Args:
        folder: of `fetch`.
        is_installed: the version is the installed one; if not, its Python files are put before
            the installed package.
    """
    model = folder / "run" / _MODEL
    model.mkdir(parents=True, exist_ok=True)
    (model / "config.json").write_text(json.dumps(_CONFIGURATION))
    stock, log = _run(folder, is_installed, [])
    if not any(stock.values()):
        print(log[-3000:])
        print("vLLM's own tests: none passes with vLLM's schedulers; nothing to compare with")
        return ["all of them"]
    ours, log = _run(folder, is_installed, ["-p", "tools.vllm_check.scheduler_in_place"])
    lost = sorted(name for name, passed in stock.items() if passed and not ours.get(name))
    if lost:
        print(log[-6000:])
    num_stock, num_ours = sum(stock.values()), sum(ours.values())
    print(f"vLLM's own tests: of {len(stock)}, {num_stock} pass here with vLLM's schedulers")
    print(f"                  (others need models or devices), {num_ours} with ours")
    for name in lost:
        print(f"  lost: {name}")
    return lost


def _run(folder: Path, is_installed: bool, options: list[str]) -> tuple[dict[str, bool], str]:
    """Whether each test passed, and the output."""
    run = folder / "run"
    sources = [] if is_installed else [folder / "sources"]
    with tempfile.TemporaryDirectory() as scratch:
        report, empty = Path(scratch) / "report.xml", Path(scratch) / "pytest.ini"
        empty.write_text("[pytest]\n")
        # No conftest.py: those above serve models and devices. Nothing of it is needed here.
        command = [sys.executable, "-m", "pytest", "-q", "--tb=short", "--disable-warnings"]
        command += ["-c", str(empty), f"--rootdir={run}", f"--confcutdir={run}/tests/v1/core"]
        command += ["-p", "no:cacheprovider", f"--junitxml={report}", *options]
        command += [f"tests/v1/core/{name}" for name in _TESTS]
        path = os.pathsep.join(map(str, [run, *sources, REPOSITORY]))
        done = subprocess.run(
            command,
            cwd=run,
            env={**os.environ, **_ENVIRONMENT, "PYTHONPATH": path},
            capture_output=True,
            text=True,
        )
        cases = ElementTree.parse(report).iter("testcase") if report.exists() else ()
        passed = {f"{c.get('classname')}.{c.get('name')}": not len(c) for c in cases}
    return passed, done.stdout + done.stderr
