# SPDX-License-Identifier: Apache-2.0
"""The page of the soak of all routes, from its CSV files."""

from __future__ import annotations

from benchmarks.harness.record import machine_line, read_csv
from benchmarks.harness.tables import table

_TIMES = [f"p{share}_ms_{phase}" for phase in ("idle", "attack", "load") for share in (50, 99)]
_STATUSES = ("200", "400", "404", "409", "413", "429", "others", "hung up", "no answer")


def section() -> str:
    """This benchmark's part of RESULTS.md, from its CSV files."""
    lives, rows = read_csv("soak_lives"), read_csv("soak_routes")
    if not rows:
        return ""
    total = sum(int(row["requests"]) for row in rows)
    problems = sum(int(life["problems"]) for life in lives)
    killed = [life["killed"] for life in lives if life["killed"]]
    return "\n\n".join(
        [
            "## Soak: all routes by two tenants",
            f"{total} requests to {len(rows)} operations, drawn from the server's own description: "
            "legal ones, odd ones, broken ones, some hung up on. Meanwhile the wall clock is set, "
            "the disk is full, and what was saved is damaged; at the end of a life a process is "
            f"killed ({', '.join(killed)}). Every answer is checked: no status of 500 and more but "
            "503 after a kill, errors of the documented form, answers as described, no word of the "
            "other tenant. A third tenant's small call is timed while nobody else does anything, "
            "while one sender attacks, and under the whole load; its tokens never change, and "
            "nothing is held at the end of a life.",
            table(
                ("life", "requests", *(t.replace("_ms_", ", ms, ") for t in _TIMES))
                + ("memory, MiB", "then killed", "ended after, s", "processes left", "problems"),
                [
                    (
                        *(life.get(key, "") for key in ("life", "requests", *_TIMES)),
                        *(life[key] for key in ("memory_mib", "killed", "seconds_to_end")),
                        *(life[key] for key in ("processes_left", "problems")),
                    )
                    for life in lives
                ],
            ),
            table(
                ("operation", "requests", *_STATUSES),
                [(row["operation"], row["requests"], *(row[s] for s in _STATUSES)) for row in rows],
            ),
            f"Problems: {problems}.",
            machine_line(rows),
        ]
    )
