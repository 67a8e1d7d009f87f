# SPDX-License-Identifier: Apache-2.0
"""What layers encoded anew are worth input by input: Figure 8 of DroidSpeak.

    vllm-choreo profile-pair WRITER READER … --out PAIR
    python -m benchmarks.variants.inputs 'NAME OF THE PAIR' PAIR [--layers '[7, 24]' ...]

A row for each input of each set of a profile: the share of the distance between plain reading and
the reader's own encoding that these layers close. Rows of other pairs stay.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks.harness.record import read_numbers, record, rows_of_others, write_csv
from benchmarks.harness.tables import as_text
from benchmarks.variants.tables import INPUTS, TABLES
from vllm_choreo.lab.study.profile_pair.results import NUMBERS
from vllm_choreo.repair.pair import Ranges, layers_text, num_run


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", help="of the pair, in the table")
    parser.add_argument("pair", type=Path, help="folder of `vllm-choreo profile-pair`")
    parser.add_argument(
        "--layers",
        action="append",
        type=json.loads,
        help="a block, first and the one behind the last (default: those that were answered with)",
    )
    args = parser.parse_args()
    profile = read_numbers(args.pair / NUMBERS, "vllm-choreo profile-pair", "profile", "sets")
    blocks = args.layers and [((first, stop),) for first, stop in args.layers]
    where = record()
    rows = [{"pair": args.name, **row, **where} for row in inputs_of(profile, blocks)]
    write_csv(INPUTS, [*rows_of_others(INPUTS, pair=args.name), *rows])
    print(as_text([TABLES[INPUTS]]))
    return 0


def inputs_of(
    profile: Mapping[str, Any], blocks: Collection[Ranges] | None
) -> Iterator[dict[str, Any]]:
    """Rows of a profile's numbers: of each set, each choice of layers and each input.

    Args:
        profile: the content of `profile.json`.
        blocks: choices of layers; None: those that inputs were answered with.
    """
    num_layers = profile["profile"]["num_layers"]
    for one in profile["sets"]:
        answered = {row["arm"] for row in one["rows"]}
        for cell in one["inputs"]:
            layers: Ranges = tuple((first, stop) for first, stop in cell["layers"])
            name, num_anew = layers_text(layers), num_run(layers)
            is_wanted = layers in blocks if blocks else name in answered
            if not is_wanted or num_anew in (0, num_layers):
                continue
            row = {"set": one["name"], "layers": name, "anew": num_anew, "of": num_layers}
            for number, (kl, closed) in enumerate(zip(cell["kl"], cell["closed"], strict=True)):
                yield {**row, "input": number, "kl": kl, "closed": closed}


if __name__ == "__main__":
    sys.exit(main())
