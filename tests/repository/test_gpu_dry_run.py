# SPDX-License-Identifier: Apache-2.0
"""`make gpu-dry-run`: what its device double refuses, sees and replays; how faults are judged."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch

from tests.repository.pages import ROOT
from tools.gpu_dry_run.device import DeviceDouble, DeviceError
from tools.gpu_dry_run.engine import CASES
from tools.gpu_dry_run.faults import KNOWN, KnownFault, judge
from tools.gpu_dry_run.gpus import GPUS
from tools.gpu_dry_run.models import MODELS
from tools.gpu_dry_run.streams import CUDAGraph, Event


@pytest.fixture
def double(monkeypatch: pytest.MonkeyPatch) -> Iterator[DeviceDouble]:
    if "pin_memory" in vars(torch.Tensor):
        monkeypatch.delattr(torch.Tensor, "pin_memory")  # vLLM's for CPUs, which does nothing
    double = DeviceDouble()
    for kind in (CUDAGraph, Event):
        monkeypatch.setattr(kind, "double", double, raising=False)
    with double:
        yield double


# -- where tensors lie -----------------------------------------------------------------------------


def test_what_is_computed_from_device_tensors_lies_on_the_device(double: DeviceDouble) -> None:
    there = torch.zeros(3, 4, device="cuda:0")
    for made in (there + 1, there[1:], there.T, there.new_ones(2), torch.empty_like(there)):
        assert made.device == torch.device("cuda", 0) and made.is_cuda and not made.is_cpu
    here = torch.zeros(3)
    assert here.device.type == "cpu" and here.is_cpu
    assert torch.nn.Parameter(there, requires_grad=False).is_cuda
    assert not torch.zeros(2, device="cpu").is_cuda and not there.new_ones(2, device="cpu").is_cuda
    assert there.to(torch.float64).is_cuda and there.to(here.device).is_cpu


def test_two_devices_in_one_operation_are_refused(double: DeviceDouble) -> None:
    there, here = torch.zeros(3, device="cuda"), torch.zeros(3)
    with pytest.raises(DeviceError, match="same device"):
        there + here
    with pytest.raises(DeviceError, match="same device"):
        torch.cat([here, there])
    assert (there + torch.tensor(2.0)).tolist() == [2.0] * 3, "numbers may come from the host"
    with pytest.raises(DeviceError, match="numpy"):
        there.numpy()
    with pytest.raises(DeviceError, match="cannot be accessed"):
        double.launch("kernel", torch.add, (there, here), {})


# -- waiting ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "wait",
    [
        lambda x: x.sum().item(),
        lambda x: x.tolist(),
        lambda x: bool(x.any()),
        lambda x: x.cpu(),
        lambda x: x[x > 0],
        lambda x: x[torch.tensor([0, 1])],
        lambda x: x.nonzero(),
        lambda x: x.repeat_interleave(x.long()),
        lambda x: torch.tensor([1, 2], device="cuda"),
        lambda x: torch.zeros(2).to("cuda"),
        lambda x: torch.zeros(2).to("cuda", non_blocking=True),  # not pinned
        lambda x: x.copy_(torch.zeros(3)),
    ],
)
def test_what_makes_the_host_wait_is_noted(double: DeviceDouble, wait) -> None:
    there = torch.ones(3, device="cuda")
    wait(there)
    (sync,) = double.syncs
    assert not sync.in_step and not sync.is_ours


def test_what_does_not_wait_is_not_noted(double: DeviceDouble) -> None:
    there, mask = torch.ones(3, device="cuda"), torch.zeros(3, device="cuda", dtype=torch.bool)
    pinned = torch.ones(3).pin_memory()
    there.copy_(pinned, non_blocking=True)
    pinned.to("cuda", non_blocking=True)
    there[1:], there[0], there[mask] = there[:1], 2.0, 0.0
    there.to("cpu", non_blocking=True)
    torch.where(mask, there, 0.0).sum()
    there[there.long()]
    assert double.syncs == [] and there.shape == (3,)


def test_copies_to_the_host_arrive_when_their_event_does(double: DeviceDouble) -> None:
    there = torch.arange(3, device="cuda")
    first, event = there.to("cpu", non_blocking=True), Event()
    event.record()
    second = there.to("cpu", non_blocking=True)
    there.zero_()
    assert first.tolist() != [0, 1, 2], "nobody has waited"
    event.synchronize()
    assert first.tolist() == [0, 1, 2] and second.tolist() != [0, 1, 2]
    double.wait("all")
    assert second.tolist() == [0, 1, 2], "as it was when the copy was asked for"


def test_waits_in_our_own_code_are_told_from_others(double: DeviceDouble) -> None:
    from vllm_choreo.engine.worker.tensors import to_device
    from vllm_choreo.ops import Rotation

    double.is_in_step = lambda: True
    rotation = Rotation(inv_freq=torch.ones(2, dtype=torch.float64), is_neox=True)
    rotation.cos_sin(torch.ones(3, dtype=torch.int64))
    assert to_device(torch.ones(3), torch.device("cuda")).is_cuda and not double.syncs
    rotation.cos_sin(torch.ones(3, dtype=torch.int64, device="cuda").cpu())
    assert [sync.in_step for sync in double.syncs] == [True]


# -- graphs ----------------------------------------------------------------------------------------


def test_a_graph_computes_anew_from_the_same_memory(double: DeviceDouble) -> None:
    source, scale = torch.ones(3, device="cuda"), 2.0
    graph = CUDAGraph()
    graph.capture_begin()
    total = (source[:2] * scale).sum()
    target = torch.zeros(1, device="cuda")
    target[0] = total + 1
    graph.capture_end()
    scale = 100.0
    source.fill_(5.0)
    assert target.tolist() == [5.0]
    graph.replay()
    assert target.tolist() == [21.0], "the host's numbers are those of the capture"


def test_memory_that_a_graph_reads_has_to_live(double: DeviceDouble) -> None:
    source, kept = torch.ones(3, device="cuda"), torch.zeros(3, device="cuda")
    graph = CUDAGraph()
    graph.capture_begin()
    own = source + 1
    kept.copy_(own)
    del own
    graph.capture_end()
    graph.replay()
    del source
    with pytest.raises(DeviceError, match="was freed after its capture"):
        graph.replay()


def test_nobody_waits_while_a_graph_is_captured(double: DeviceDouble) -> None:
    source = torch.ones(3, device="cuda")
    CUDAGraph().capture_begin()
    with pytest.raises(DeviceError, match="while a CUDA graph is captured"):
        source.sum().item()
    with pytest.raises(DeviceError, match="captured already"):
        CUDAGraph().capture_begin()


# -- the verdict -----------------------------------------------------------------------------------

_FAULT = KnownFault(("here", "there"), "is odd", "make it even")


def test_known_faults_are_known_until_they_are_mended() -> None:
    both = [("here", "3 is odd"), ("there", "5 is odd")]
    verdict = judge(both, ["here", "there"], [_FAULT])
    assert verdict.is_good and len(verdict.known) == 2 and "make it even" in verdict.known[0]
    other = judge([("here", "is far"), *both], ["here", "there"], [_FAULT])
    assert other.new == ["here: is far"] and not other.is_good
    mended = judge(both[:1], ["here", "there"], [_FAULT])
    assert len(mended.mended) == 1 and not mended.is_good
    assert judge(both[:1], ["here"], [_FAULT]).is_good, "only where one has looked"


def test_known_faults_are_of_places_that_are_looked_at() -> None:
    places = {f"configuration {gpu} {model}" for gpu in GPUS for model in MODELS}
    places |= {f"engine {case}" for case in CASES}
    assert {place for fault in KNOWN for place in fault.found_in} <= places


# -- the whole -------------------------------------------------------------------------------------


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize("gpu", sorted(GPUS))
def test_configurations_of_real_models(gpu: str) -> None:
    _dry_run("configurations", "--gpu", gpu)


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize("case", sorted(CASES))
def test_engines_on_the_double(case: str) -> None:
    _dry_run("engines", "--case", case)


_SABOTAGED = """
import sys
from dataclasses import replace
from tools.gpu_dry_run import engine
from tools.gpu_dry_run.pretended import pretend

case = {case!r}
engine.CASES[case] = replace(engine.CASES[case], laws={laws!r})
double = pretend(engine.CASES[case].pretended, **engine.environment(case))
{sabotage}
print("FAULTS", engine.run(case, double).faults)
"""
_SABOTAGES = {
    "a copy that waits": (
        """
from vllm_choreo.engine.worker import span_batcher
span_batcher.to_device = lambda tensor, device: tensor.to(device)
""",
        "the host waits in a step, vllm_choreo/engine/worker/span_batcher.py",
    ),
    "a tensor on the host": (
        """
from vllm_choreo.engine.worker import span_batcher
span_batcher.to_device = lambda tensor, device: tensor
""",
        "DeviceError",
    ),
    "a full graph in a choreographed step": (
        """
from vllm.v1.worker.gpu.cudagraph_utils import ModelCudaGraphManager
from vllm_choreo.engine.worker.v2_graphs import ChoreoCudaGraphManager
ChoreoCudaGraphManager.dispatch = ModelCudaGraphManager.dispatch
""",
        "a choreographed step replayed vLLM's own attention",
    ),
}
_OF_FULL_GRAPHS = {
    "a plan that graphs are not given": (
        """
from vllm_choreo.engine.worker.plan_room import PlanRoom
PlanRoom.fill = lambda self, *args: None
""",
        "differs by",
    ),
    "own tokens that stay what they were": (
        """
from vllm_choreo.engine.worker.plan_room import PlanRoom
PlanRoom.set_own_tokens = lambda self, *args: None
""",
        "differs by",
    ),
}
_OF_FLASH_PREFILLS = {
    "copies of queries that nobody turns": (
        """
from vllm_choreo.ops.triton.prefills import _LayerRound
_LayerRound._copy = lambda self, *args: self._copies.zero_()
""",
        "differs by",
    ),
    "own tokens that prefills are not told of": (
        """
from vllm_choreo.engine.worker import span_batcher
plan = span_batcher.plan_prefills
span_batcher.plan_prefills = lambda *args: plan(*args[:3], args[3] // 2, *args[4:])
""",
        "differs by",
    ),
}
_SABOTAGED_CASES = [
    *(("flash-attention-3", *found) for found in _SABOTAGES.items()),
    *(("full-graphs", *found) for found in _OF_FULL_GRAPHS.items()),
    *(("flash-prefills", *found) for found in _OF_FLASH_PREFILLS.items()),
]


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "lines", "says"),
    [(case, *found) for case, _, found in _SABOTAGED_CASES],
    ids=[name for _, name, _ in _SABOTAGED_CASES],
)
def test_a_dry_run_finds_what_is_wrong(case: str, lines: str, says: str) -> None:
    laws = CASES[case].laws[:1]  # one of them is enough
    command = [sys.executable, "-c", _SABOTAGED.format(case=case, laws=laws, sabotage=lines)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    (told,) = [line for line in done.stdout.splitlines() if line.startswith("FAULTS")]
    assert says in told, told + done.stderr[-2000:]


def _dry_run(*arguments: str) -> None:
    command = [sys.executable, "-m", "tools.gpu_dry_run", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
