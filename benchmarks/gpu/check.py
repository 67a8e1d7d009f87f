# SPDX-License-Identifier: Apache-2.0
"""Every kernel on fresh random inputs, against a computation in float64."""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import multiprocessing
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from benchmarks.gpu import oracle
from benchmarks.gpu.cases import Heads, Inputs, Kind, Work, make_cache, make_inputs
from benchmarks.gpu.report import Bar, Report
from vllm_choreo.ops import Layout, reposition_keys

# Of the worst query. bfloat16 rounds rotated queries, weights and outputs to 8 significant bits: on
# a GPU to the nearest number, in Triton's interpreter towards zero, where errors are about 8e-3.
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}
COLUMNS = ("group", "case", "operation", "dtype", "head_size", "error", "tolerance", "seed")


@dataclass(frozen=True)
class Case:
    """One kind of layer, on which all operations are checked."""

    group: str
    kind: Kind

    def __str__(self) -> str:
        kind = self.kind
        rotation = f"{'neox' if kind.is_neox else 'interleaved'} {kind.rotary_dim}"
        marks = [str(kind.heads), f"{kind.dtype}".removeprefix("torch."), rotation, kind.layout]
        marks += [f"block {kind.block_size}"]
        marks += ["softcap"] if kind.softcap else []
        marks += ["ALiBi"] if kind.alibi else []
        return ", ".join(marks)


# Operation, error, tolerance.
Found = tuple[str, float, float]


def run(report: Report, args: argparse.Namespace) -> None:
    """Check all cases; a wrong one is an error of the report."""
    is_tiny = args.shapes == "tiny"
    cases = list(_tiny_cases() if is_tiny else _cases())
    works = _works(is_tiny)
    sheet = report.sheet("check", COLUMNS)
    worst: dict[tuple[str, torch.dtype], float] = {}
    wrong = 0
    began = time.perf_counter()
    for case, found in _check_all(cases, works, args.seed, report.device, args.workers):
        if isinstance(found, BaseException):
            wrong += 1
            report.error(f"{case}: {str(found)[:300]}")
            continue
        head_size, dtype = case.kind.heads.head_size, case.kind.dtype
        for operation, error, tolerance in found:
            sheet.add({
                "group": case.group, "case": str(case), "operation": operation, "dtype": dtype,
                "head_size": head_size, "error": error, "tolerance": tolerance, "seed": args.seed,
            })  # fmt: skip
            key = case.group, dtype
            worst[key] = max(worst.get(key, 0.0), error)
            if not error < tolerance:
                wrong += 1
                report.error(f"{operation} ({case}): error {error:.2e}, allowed {tolerance:.0e}")
        report.say(f"{case}: worst {max(error for _, error, _ in found):.1e}")
    for (group, dtype), error in worst.items():
        report.say(f"worst of {group}, {dtype}: {error:.2e} (allowed {TOLERANCE[dtype]:.0e})")
    seconds = time.perf_counter() - began
    report.note(f"check: {len(cases)} kinds of layers, {wrong} wrong results, {seconds:.0f} s")
    errors = [error for (_, dtype), error in worst.items() if dtype == torch.bfloat16]
    name, reason = "worst relative error in bfloat16", "nothing ran"
    report.bar(Bar(name, max(errors, default=None), 1e-2, is_least=False, reason=reason))


def _check_all(
    cases: list[Case], works: list[Work], seed: int, device: torch.device, workers: int | None
) -> Iterator[tuple[Case, list[Found] | BaseException]]:
    """Results in the order of the cases. Processes compile the kernels in parallel."""
    seeds = [seed + i for i in range(len(cases))]
    arguments = [(case, works, seed, device) for case, seed in zip(cases, seeds, strict=True)]
    workers = workers or (1 if device.type == "cpu" else max(1, min(8, (os.cpu_count() or 2) // 2)))
    if workers == 1:
        for case, rest in zip(cases, arguments, strict=True):
            yield case, _checked(*rest)
        return
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(workers, context) as pool:
        futures = [pool.submit(_checked, *rest) for rest in arguments]
        for case, future in zip(cases, futures, strict=True):
            # A process that dies takes the cases that wait for it along.
            yield case, future.exception() or future.result()


def _checked(
    case: Case, works: list[Work], seed: int, device: torch.device
) -> list[Found] | Exception:
    """The results of a case, or why there are none."""
    try:
        return check(case, works, seed, device)
    except Exception as error:
        return RuntimeError(f"{type(error).__name__}: {error}")


def check(case: Case, works: list[Work], seed: int, device: torch.device) -> list[Found]:
    """All operations on one kind of layer."""
    found = []
    for work in works:
        inputs = make_inputs(case.kind, work, seed, device)
        found += list(_attention(inputs))
    return found + list(_reposition(case.kind, seed, device))


def _attention(inputs: Inputs) -> Iterator[Found]:
    work = inputs.work
    expected = oracle.attention(inputs, range(work.q_len))
    reads = inputs.reads()
    kind = "decode" if work.q_len == 1 else f"prefill {work.q_len}"
    label = f"{kind}, {work.num_reqs} requests, {work.shared_tokens} shared tokens"
    for way, plan in (("grouped", reads), ("ungrouped", None)):
        if way == "grouped" and reads is None:
            continue
        output = torch.full_like(inputs.query, float("nan"))
        inputs.ours(output, plan)()
        error = oracle.relative_error(output.view(expected.shape), expected)
        yield f"{label}, {way}", error, TOLERANCE[inputs.kind.dtype]


def _reposition(kind: Kind, seed: int, device: torch.device) -> Iterator[Found]:
    if kind.rotary_dim == 0:
        return
    torch.manual_seed(seed)
    num_blocks = 24
    cache = make_cache(num_blocks, kind, device)
    moves = {"in place": (range(8), range(8)), "copy": (range(8), range(12, 20))}
    deltas = torch.randint(-5000, 5000, (8,))
    rotation = kind.rotation()
    for way, (src, dst) in moves.items():
        expected, moved = cache.double(), cache.clone()
        frequencies = rotation.inv_freq.to(device)
        for i, (source, target) in enumerate(zip(src, dst, strict=True)):
            keys, values = cache[source].double().chunk(2, dim=-1)
            turned = oracle.turn(keys, int(deltas[i]) * frequencies, kind.is_neox)
            expected[target] = torch.cat([turned, values], dim=-1)
        from_blocks, to_blocks = (
            torch.tensor(list(ids), dtype=torch.int32, device=device) for ids in (src, dst)
        )
        cos_sin = rotation.cos_sin(deltas).to(device)
        reposition_keys(
            moved,
            from_blocks,
            to_blocks,
            cos_sin,
            kind.is_neox,
            impl="triton",
            layout=Layout.SIDE_BY_SIDE,
        )
        error = oracle.relative_error(moved, expected)
        yield f"reposition, {way}", error, TOLERANCE[kind.dtype]


# -- the cases -------------------------------------------------------------------------------------


def _works(is_tiny: bool) -> list[Work]:
    """Decode and prefill; few requests and many, private messages, sub-spans, no parents at all."""
    if is_tiny:
        return [Work(3, 1, 70, 2, 5, 20, True), Work(2, 8, 40, 2, 3)]
    return [
        Work(1, 1, 700, 3, 40),
        Work(3, 1, 333, 4, 17, 150, True),
        Work(40, 1, 1500, 6, 60, 30),
        Work(16, 1, 5000, 1, 1),
        Work(2, 1, 0, 0, 900),
        Work(3, 70, 600, 3, 30, 100, True),
        Work(1, 300, 2500, 5, 200),
        Work(4, 33, 0, 0, 0),
    ]


def _cases() -> Iterator[Case]:
    base = Kind(Heads(8, 2, 128), rotary_dim=128)
    dtypes = (torch.bfloat16, torch.float16, torch.float32)
    for size in (64, 80, 96, 112, 128, 192, 256):
        for dtype in dtypes:
            kind = Kind(Heads(8, 2, size), dtype, rotary_dim=size)
            yield Case("head size", kind)
    for num_heads, num_kv_heads in ((4, 4), (2, 1), (9, 3), (10, 2), (14, 2), (16, 2), (16, 1)):
        heads = Heads(num_heads, num_kv_heads, 64)
        yield Case("query heads per KV head", Kind(heads, rotary_dim=64))
    for dtype in dtypes:
        for size, rotary_dim in ((128, 32), (80, 20), (64, 0)):
            kind = Kind(Heads(8, 2, size), dtype, rotary_dim)
            yield Case("partial rotary or none", kind)
        for size, rotary_dim in ((128, 128), (96, 32)):
            kind = Kind(Heads(8, 2, size), dtype, rotary_dim, is_neox=False)
            yield Case("interleaved rotary", kind)
        yield Case("softcap", dataclasses.replace(base, dtype=dtype, softcap=5.0))
        yield Case("ALiBi", dataclasses.replace(base, dtype=dtype, alibi=True, rotary_dim=0))
        yield Case(
            "softcap, ALiBi", dataclasses.replace(base, dtype=dtype, softcap=5.0, alibi=True)
        )
    for layout, block_size in (("NHD", 32), ("HND", 16), ("HND", 64), ("NHD", 128)):
        for dtype in dtypes:
            kind = dataclasses.replace(base, dtype=dtype, layout=layout, block_size=block_size)
            yield Case("layout, block size", kind)


def _tiny_cases() -> Iterator[Case]:
    yield Case("head size", Kind(Heads(4, 2, 64), rotary_dim=64))
    yield Case("head size", Kind(Heads(2, 2, 80), torch.float32, rotary_dim=80))
    yield Case("interleaved rotary", Kind(Heads(2, 1, 64), torch.float16, 32, is_neox=False))
    yield Case("softcap, ALiBi", Kind(Heads(3, 1, 64), softcap=5.0, alibi=True, layout="HND"))
