# SPDX-License-Identifier: Apache-2.0
"""Pages of results hold what the CSV files say, and cells say what they are."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from benchmarks.harness import record
from benchmarks.harness.record import PAGES, RESULTS, RESULTS_PAGE, write_csv
from benchmarks.harness.tables import (
    Table,
    as_text,
    filled,
    interval,
    mean,
    middle,
    of,
    only,
    over,
    paired_ratio,
    ratio,
    spread,
    stored,
    text,
)
from benchmarks.tables import TABLES

MOST_LINES = 500
ROWS = [
    {"side": side, "turn": turn, "s": str(seconds)}
    for side, times in (("ours", (1.0, 2.0)), ("theirs", (4.0, 6.0)))
    for turn, seconds in enumerate(times)
]
OURS, THEIRS = of("s", side="ours"), of("s", side="theirs")


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_pages_hold_what_the_csv_files_say(path: Path) -> None:
    page = path.read_text()
    assert page == filled(page, TABLES), "python -m benchmarks --page"
    assert len(page.splitlines()) <= MOST_LINES


def test_pictures_of_the_pages_are_there_and_all_of_them_are_shown() -> None:
    shown = [
        (page.parent / picture).resolve()
        for page in PAGES
        for picture in re.findall(r"!\[[^]]*\]\(([^)]*)\)", page.read_text())
    ]
    assert sorted(shown) == sorted(RESULTS.glob("*.png"))


def test_every_csv_file_has_a_table() -> None:
    files = {one for table in TABLES.values() for one in _files(table)}
    # Steps and the machine are read by cost models and pictures.
    of_workflows = {f"workflows{name}_steps" for name in ("", "_lengths", "_processes")}
    rest = {"scaling_machine", "ttft_steps"} | of_workflows
    found = {path.stem for path in (RESULTS_PAGE.parent / "results").glob("*.csv")}
    assert found - rest <= files


def _files(table: Table) -> tuple[str, ...]:
    return (table.file,) if isinstance(table.file, str) else table.file


@pytest.mark.parametrize(
    "cell",
    [spread(OURS, ".1f"), interval(OURS, ".1f"), mean(OURS, ".1f")],
    ids=["spread", "interval", "mean"],
)
def test_one_value_has_no_ends(cell: object) -> None:
    assert callable(cell)
    assert cell(ROWS[:1]) == "1.0" and cell([]) == ""
    assert cell(ROWS).startswith("1.5 [1.0, 2.0")


def test_one_pair_has_no_interval() -> None:
    pair = [row for row in ROWS if row["turn"] == 0]
    assert paired_ratio(THEIRS, OURS, ".1f")(pair) == "4.0"
    assert paired_ratio(THEIRS, OURS, ".2f")(ROWS) == "3.33 [3.00, 4.00]"
    assert ratio(THEIRS, OURS, ".2f")(ROWS) == "3.33" and ratio(THEIRS, OURS, ".2f")([]) == ""


def test_values_are_chosen_scaled_and_divided_in_pairs() -> None:
    assert of("s", 1e3, side="ours")(ROWS) == [1000.0, 2000.0]
    assert over(THEIRS, OURS)(ROWS) == [4.0, 3.0]
    assert [row["s"] for row in only(side=("ours", "theirs"), turn=1)(ROWS)] == ["2.0", "6.0"]
    assert text("s", side="theirs")(ROWS) == "4.0" and text("s", side="nobody")(ROWS) == ""
    row = {"score": "0.5", "score_low": "0.25", "score_high": "0.75"}
    assert stored("score", ".0f", 100)([row]) == "50 [25, 75]"
    assert stored("score", ".0f")([{**row, "score": ""}]) == ""


def test_lines_are_groups_and_empty_columns_are_left_out() -> None:
    table = Table(
        "none", {"turn": "turn"}, {"ours": middle(OURS, ".0f"), "nobody": text("s", side="nobody")}
    )
    assert table.markdown(ROWS).splitlines() == [
        "| turn | ours |",
        "| --- | ---: |",
        "| 0 | 1 |",
        "| 1 | 2 |",
    ]


def test_a_region_is_filled_from_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record, "RESULTS", tmp_path)
    tables = {"one": Table("one", {"side": "side"}, {"s": middle(of("s"), ".1f")})}
    page = "Said.\n<!-- table: one -->\nold <!-- end -->\nSaid, too.\n"
    with pytest.raises(FileNotFoundError):
        filled(page, tables)
    write_csv("one", ROWS, command="python -m one", date="today", cores=2)
    new = filled(page, tables)
    assert "| theirs | 5.0 |\n\n`python -m one`, today, 2 cores. <!-- end -->\nSaid, too." in new
    assert filled(new, tables) == new and "old" not in new
    assert as_text(tables.values()) in new
    with pytest.raises(KeyError):
        filled(page.replace("table: one", "table: two"), tables)


def test_a_command_names_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = tmp_path / "trivia.jsonl"
    data.touch()
    words = ["--data", str(data), "--model", "someone/model", "--share", "1/2"]
    monkeypatch.setattr("sys.argv", ["program", *words])
    told = record.command_line()
    assert told.endswith("--data trivia.jsonl --model someone/model --share 1/2"), told


def test_a_run_keeps_the_rows_of_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record, "RESULTS", tmp_path)
    assert record.rows_of_others("answers", data="musique") == []
    rows = [{"data": data, "side": side} for data in ("musique", "hotpotqa") for side in "ab"]
    write_csv("answers", rows)
    assert record.rows_of_others("answers", data="musique") == rows[2:]
    assert record.rows_of_others("answers", data="musique", side="a") == rows[1:]
