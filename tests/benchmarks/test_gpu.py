# SPDX-License-Identifier: Apache-2.0
"""The GPU benchmarks, run dry: everything but the numbers must be right without a GPU."""

import csv
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.gpu.report import Bar

ROOT = Path(__file__).parents[2]


def run(folder, *arguments, **environment):
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.gpu", *arguments]
    return subprocess.run(
        [*command, "--out", str(folder)],
        cwd=ROOT,
        env={**os.environ, "VLLM_PLUGINS": "", **environment},
        capture_output=True,
        text=True,
    )


# Benchmarks, which change seldom, in the slow interpreter of the kernels.
pytestmark = [pytest.mark.slow, pytest.mark.exhaustive]


@pytest.fixture(scope="module")
def dry(tmp_path_factory):
    """The whole of it, once: the folder and what it printed."""
    pytest.importorskip("triton")
    folder = tmp_path_factory.mktemp("gpu")
    done = run(folder, "--device", "cpu", "--shapes", "tiny", "--seed", "1", "--workers", "2")
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return folder, done.stdout


def rows(folder, name):
    with (folder / f"dry-run-{name}.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def test_check_compares_every_kernel(dry):
    found = rows(dry[0], "check")
    operations = {row["operation"] for row in found}
    for kind in ("decode", "prefill"):
        for way in ("grouped", "ungrouped"):
            assert any(op.startswith(kind) and op.endswith(f", {way}") for op in operations)
    assert {"reposition, in place", "reposition, copy"} <= operations
    assert {row["dtype"] for row in found} == {
        f"torch.{d}" for d in ("float32", "bfloat16", "float16")
    }
    assert all(float(row["error"]) < float(row["tolerance"]) for row in found)
    assert any(float(row["error"]) > 0 for row in found)


def test_attention_compares_before_it_times(dry):
    found = rows(dry[0], "attention")
    assert {row["kind"] for row in found} == {"decode", "prefill"}
    for row in found:
        for side in ("ungrouped", "SDPA", "FlexAttention"):
            assert float(row[f"{side}_us"]) > 0
            assert float(row[f"{side}_error"]) < 2e-2
        assert (row["grouped_us"] != "") == (row["requests"] != "1")
        # xformers' Triton kernel needs no GPU, but is not everywhere, nor for every Triton.
        assert (row["xformers_us"] == "") == ("xformers" in row["without"])


def test_workflows_encode_less_choreographed(dry):
    found = rows(dry[0], "step")
    workflows = {row["workflow"] for row in found}
    assert len(workflows) == 3
    for workflow in workflows:
        encoded = {r["side"]: int(r["encoded_for_first_tokens"]) for r in found
                   if r["workflow"] == workflow}  # fmt: skip
        generated = {r["generated_tokens"] for r in found if r["workflow"] == workflow}
        ours = encoded.pop("choreographed")
        assert len(set(encoded.values())) == 1 and ours < min(encoded.values()) / 2
        assert len(generated) == 1
    assert "chain of messages = plain text" in dry[1]


def test_a_dry_run_cannot_be_taken_for_a_result(dry):
    folder, printed = dry
    files = sorted(path.name for path in folder.iterdir())
    assert len(files) >= 7 and all(name.startswith("dry-run-") for name in files)
    for name in files:
        if name.endswith(".csv"):
            assert all("no number here" in row["dry_run"] for row in rows(folder, name[8:-4]))
    summary = (folder / "dry-run-summary.md").read_text()
    assert "DRY RUN" in summary.splitlines()[2]
    verdicts = re.findall(r"\| ([^|]*) \|$", summary.split("## Wrong")[0], re.M)[2:]
    assert verdicts and all("not measured" in verdict for verdict in verdicts)
    assert all(line.startswith("DRY ") for line in printed.splitlines() if " s] " in line)


FAULT = """
import os, sys
os.environ["TRITON_INTERPRET"] = "1"
from benchmarks.gpu import cases
right = cases.Inputs.ours
def wrong(self, output, *plans, **options):
    call = right(self, output, *plans, **options)
    def faulty():
        call()
        output[-1] *= 1.05  # one query of all
    return faulty
cases.Inputs.ours = wrong
import runpy
sys.argv[1:] = {!r}
runpy.run_module("benchmarks.gpu", run_name="__main__")
"""


def test_one_wrong_query_is_an_error_and_no_number(tmp_path):
    pytest.importorskip("triton")
    arguments = [
        "check",
        "attention",
        "--device",
        "cpu",
        "--shapes",
        "tiny",
        "--out",
        str(tmp_path),
    ]
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", FAULT.format(arguments)],
        cwd=ROOT, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 1, done.stdout + done.stderr
    found = rows(tmp_path, "check")
    wrong = [row for row in found if float(row["error"]) >= float(row["tolerance"])]
    assert {row["operation"].startswith("reposition") for row in wrong} == {False}
    assert len(wrong) == sum(not row["operation"].startswith("reposition") for row in found)
    assert rows(tmp_path, "attention") == []
    assert (tmp_path / "dry-run-summary.md").read_text().count("not timed, errors") == 3


def test_bars():
    assert Bar("x", 0.6, 0.6).verdict() == "reached"
    assert Bar("x", 0.59, 0.6).verdict() == "MISSED"
    assert Bar("x", 49.0, 50.0, is_least=False).verdict() == "reached"
    assert Bar("x", 51.0, 50.0, is_least=False).verdict() == "MISSED"
    assert Bar("x", None, 50.0, reason="no GPU").verdict() == "not measured: no GPU"


def test_needs_no_vllm_and_asks_for_a_gpu(tmp_path):
    """Without a GPU it says so; nothing that it imports is vLLM."""
    pytest.importorskip("triton")
    code = "import sys; sys.modules['vllm'] = None; import runpy; sys.argv[1:] = {!r}; "
    code += "runpy.run_module('benchmarks.gpu', run_name='__main__')"
    for arguments, expected in (
        (["check", "--out", str(tmp_path)], "no CUDA device"),
        (["--device", "cpu"], "--shapes tiny"),
        (["--help"], "dry run"),
    ):
        done = subprocess.run(
            [sys.executable, "-c", code.format(arguments)],
            cwd=ROOT,
            env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
            capture_output=True,
            text=True,
        )
        assert expected in done.stdout + done.stderr
        assert (done.returncode == 0) == (arguments == ["--help"])
