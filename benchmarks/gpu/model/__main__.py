# SPDX-License-Identifier: Apache-2.0
"""Predict what the paper's workflows take on GPUs: stock vLLM, and choreographed. Needs no GPU.

    python -m benchmarks.gpu.model                               write results/gpu_model*
    python -m benchmarks.gpu.model --against gpu-out/step.csv    what was measured, beside it

H100, H200 and B200, models of 8 to 70 billion weights in bfloat16, answers as long as those of the
paper. `bounds.py` has every rate with its source; `cost.py` has the law. Milliseconds are those in
the middle of all bounds, and with all of them fast, and slow.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from benchmarks.gpu.model.compare import compare
from benchmarks.gpu.model.counts import count_workflow
from benchmarks.gpu.model.picture import draw
from benchmarks.gpu.model.predict import break_even_rows, workflow_rows
from benchmarks.gpu.model.tables import TABLES
from benchmarks.gpu.step import paper_workflows
from benchmarks.harness.record import command_line, read_csv, write_csv
from benchmarks.harness.tables import as_text


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu.model",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--against", type=Path, metavar="FILE", help="step.csv of a run on a GPU")
    args = parser.parse_args()
    if args.against:
        try:
            print(compare(args.against, read_csv("gpu_model")))
        except (OSError, ValueError) as error:
            parser.error(str(error))
        return 0
    workflows = paper_workflows(is_tiny=False)
    runs = [row for name, w in workflows.items() for row in workflow_rows(name, count_workflow(w))]
    lengths = list(break_even_rows())
    write_csv("gpu_model", runs, command=command_line())
    write_csv("gpu_model_lengths", lengths, command=command_line())
    draw(runs, lengths)
    print(as_text(TABLES.values()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
