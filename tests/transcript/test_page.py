# SPDX-License-Identifier: Apache-2.0
"""The page: what is in the file, and what its scripts make of it in a real browser."""

from __future__ import annotations

import json
import re
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from tests.browser import CHROMIUM, needs_chromium
from tests.transcript.transcripts import HOSTILE, debate
from vllm_choreo.transcript.page import Shown, ShownProblem, page_html

FACTS = {"model": "SmolLM2", "mode": "choreo and baseline"}


def slow_baseline() -> Any:
    """The debate as text: its prefills cost nothing, its decodes read everything again."""
    transcript = debate("baseline", slow=12)
    for step in transcript["steps"]:
        if step["kind"] == "prefill":
            step["metrics"] = {"submitted": 0.0, "waiting": None, "ttft": 0.0, "latency": 0.0}
            step["usage"] = {**step["usage"], "reused_tokens": 0, "encoded_tokens": 0}
    return transcript


def two_problems() -> list[ShownProblem]:
    runs = [Shown(debate(), True), Shown(slow_baseline(), False)]
    return [
        ShownProblem("train/1", "How many wagons?", ("36",), runs),
        ShownProblem("train/2", "How many seats?", ("12", "14"), [Shown(debate(rounds=1))]),
    ]


class Reader(HTMLParser):
    """Collects the elements of a page, with their attributes and the text inside them."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.data = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        _, attributes = self.found[-1] if self.found else ("", {})
        if attributes.get("type") == "application/json":
            self.data += data

    def classes(self, tag: str, name: str) -> list[dict[str, str | None]]:
        """The attributes of the elements of a class."""
        return [a for t, a in self.found if t == tag and name in (a.get("class") or "").split()]


def browser(page: Path, anchor: str = "", *options: str) -> tuple[Reader, str]:
    """The document as the browser has it once the scripts have run, and its text."""
    command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr"]
    command += ["--virtual-time-budget=3000", "--window-size=1360,2000", *options, "--dump-dom"]
    shown = subprocess.run([*command, page.as_uri() + anchor], capture_output=True, text=True)
    assert shown.returncode == 0, shown.stderr[-2000:]
    assert "CONSOLE" not in shown.stderr, shown.stderr
    return Reader(shown.stdout), shown.stdout


@pytest.fixture
def page(tmp_path: Path) -> Path:
    path = tmp_path / "index.html"
    path.write_text(page_html("parallel_debate", two_problems(), FACTS), encoding="utf-8")
    return path


# -- the file ------------------------------------------------------------------------------------


def test_the_page_needs_nothing_from_elsewhere(page: Path) -> None:
    text = page.read_text()
    loading = {"src", "href", "srcset", "action", "data", "poster"}
    for tag, attributes in Reader(text).found:
        assert not loading & set(attributes), (tag, attributes)
    assert not re.search(r"@import|url\(|fetch\(|XMLHttp|<!-- include|\{\{", text)
    # What the browser is told to refuse, in case that something slipped through.
    assert "default-src 'none'" in text


def test_the_page_holds_all_but_the_token_ids(page: Path) -> None:
    data = json.loads(Reader(page.read_text()).data)
    assert [len(problem["runs"]) for problem in data["problems"]] == [2, 1]
    recorded = debate()
    shown = data["problems"][0]["runs"][0]
    for key in ("mode", "seconds", "answers"):
        assert shown[key] == recorded[key]
    for one, other in zip(shown["steps"], recorded["steps"], strict=True):
        assert one.pop("num_generated") == len(other["generated_token_ids"])
        assert one == {k: v for k, v in other.items() if not k.endswith("token_ids")}


def test_no_text_of_a_message_ends_the_script_or_becomes_markup() -> None:
    run = Shown(debate(text=HOSTILE), True)
    text = page_html(HOSTILE, [ShownProblem(HOSTILE, HOSTILE, (HOSTILE,), [run])], {HOSTILE: "x"})
    reader = Reader(text)
    assert all(tag != "img" for tag, _ in reader.found)
    assert text.count("<!--") == 1  # the licence's
    data = json.loads(reader.data)
    assert data["problems"][0]["runs"][0]["steps"][-1]["generated_text"] == HOSTILE
    assert data["facts"] == {HOSTILE: "x"}


# -- in a browser --------------------------------------------------------------------------------


@needs_chromium
def test_the_graph_has_a_node_for_each_message_and_an_edge_for_each_parent(page: Path) -> None:
    reader, text = browser(page)
    steps = debate()["steps"]
    nodes = reader.classes("g", "node")
    assert len(nodes) == len(steps) == 14
    assert [a["data-step"] for a in nodes] == [str(i) for i in range(14)]
    edges = {(a["data-from"], a["data-to"]) for a in reader.classes("path", "edge")}
    ids = [step["id"] for step in steps]
    assert edges == {
        (str(ids.index(parent)), str(i))
        for i, step in enumerate(steps)
        for parent, _, _ in step["parents"]
    }
    # A message stands to the right of all that it reads.
    left = [float(re.findall(r"[\d.]+", a["transform"] or "")[0]) for a in nodes]
    assert all(left[int(a or 0)] < left[int(b or 0)] for a, b in edges)
    assert "How many wagons?" in text and "✗ wrong" in text and "✓ right" in text


@needs_chromium
def test_times_are_told_apart_and_share_one_axis(page: Path) -> None:
    reader, _ = browser(page)
    rows = reader.classes("button", "row")
    # The baseline's prefills took no time: 14 and 9 rows.
    assert [a["data-run"] for a in rows] == ["0"] * 14 + ["1"] * 9
    labels = [a["aria-label"] or "" for a in rows]
    assert all("prefill" in label for label in labels)
    assert sum("decoding" in label for label in labels) == 18
    said = "agent 2, round 2: from 2.10 s, waiting 120 ms, prefill 1.08 s, decoding 1.20 s"
    assert labels[14 + 4] == said

    end = max(s["metrics"]["submitted"] + s["metrics"]["latency"] for s in slow_baseline()["steps"])
    step = slow_baseline()["steps"][-1]["metrics"]
    waiting, prefill, decoding = (
        [share(a) for a in reader.classes("i", kind) if "left" in (a.get("style") or "")]
        for kind in ("waiting", "prefill", "decoding")
    )
    percent = [100 * step[key] / end for key in ("submitted", "waiting", "ttft")]
    assert waiting[-1] == pytest.approx(percent[:2], abs=0.01)
    assert prefill[-1][1] == pytest.approx(percent[2] - percent[1], abs=0.01)
    assert sum(decoding[-1]) == pytest.approx(100, abs=0.01)


def share(attributes: dict[str, str | None]) -> list[float]:
    """Left end and width of a bar, in percent."""
    left, width = re.findall(r"(?:left|width): ([\d.e-]+)%", attributes["style"] or "")
    return [float(left), float(width)]


@needs_chromium
def test_the_tokens_of_each_call_are_shown_for_both_modes(page: Path) -> None:
    reader, _ = browser(page)
    bars = [a["aria-label"] for a in reader.classes("div", "tokenbar")]
    assert len(bars) == 14 + 9
    last = debate()["steps"][-1]
    reused, generated = last["usage"]["reused_tokens"], len(last["generated_token_ids"])
    said = f"{reused} reused, 20 given and {generated} generated tokens encoded"
    assert bars[-2:] == [said, said]


@needs_chromium
def test_the_address_chooses_problem_run_and_message(page: Path) -> None:
    reader, text = browser(page, "#0.1.9")
    chosen = reader.classes("g", "chosen")
    assert [a["data-step"] for a in chosen] == ["9"]
    assert [a["data-step"] for a in reader.classes("g", "reads")] == ["0", "3", "5", "6", "7"]
    assert [a["data-step"] for a in reader.classes("g", "readers")] == ["11", "12", "13"]
    assert "question tokens 2 to 9" in re.sub(r"<[^>]*>", "", text)
    assert [a["data-run"] for a in reader.classes("button", "chosen")] == ["1"]
    second, _ = browser(page, "#1.0")
    assert len(second.classes("g", "node")) == 8


def with_script(page: Path, script: str) -> Path:
    """A copy of the page on which somebody does something."""
    path = page.with_name("used.html")
    path.write_text(page.read_text().replace("</body>", f"<script>{script}</script></body>"))
    return path


ACTIONS = """
  const seen = {};
  const note = (what) => {
    const chosen = [...document.querySelectorAll(".node.chosen")];
    seen[what] = chosen.map((one) => one.dataset.step).join();
    document.documentElement.dataset.seen = JSON.stringify(seen);
  };
  const node = document.querySelectorAll(".node")[6];
  const on = (element, type, key) =>
    element.dispatchEvent(new KeyboardEvent(type, {key, bubbles: true}));
  on(node, "pointerenter"); note("point");
  on(node, "pointerleave"); note("leave");
  on(node, "pointerenter"); on(node, "click"); on(node, "pointerleave"); note("click");
  on(node, "pointerenter"); on(node, "click"); on(node, "pointerleave"); note("click again");
  on(node, "click"); on(document.body, "keydown", "Escape"); note("Escape");
  on(node, "keydown", "ArrowRight"); note("arrow");
  document.activeElement.blur();
  document.querySelector('.row[data-run="1"]').click(); note("other mode");
"""


@needs_chromium
def test_pointing_clicking_and_keys(page: Path) -> None:
    reader, _ = browser(with_script(page, ACTIONS))
    (_, root) = reader.found[0]
    assert json.loads(root["data-seen"] or "") == {
        "point": "6",
        "leave": "",
        "click": "6",
        "click again": "",
        "Escape": "",
        "arrow": "8",  # on to the first reader
        "other mode": "5",  # the first call of that mode that took time
    }


PLAY_TWO_SECONDS = """
  let frame;
  requestAnimationFrame = (given) => { frame = given; };
  document.getElementById("play").click();
  frame(performance.now() + 2000);
"""


@needs_chromium
def test_play_lights_the_messages_up_as_they_come_to_be(page: Path) -> None:
    reader, _ = browser(with_script(page, PLAY_TWO_SECONDS))
    times = [step["metrics"] for step in debate()["steps"]]
    ends = [t["submitted"] + t["latency"] for t in times]
    begun = [i for i, t in enumerate(times) if t["submitted"] <= 2]
    done = [str(i) for i in begun if ends[i] <= 2]
    running = [str(i) for i in begun if ends[i] > 2]
    assert len(done) == 8 and len(running) == 3
    assert [a["data-step"] for a in reader.classes("g", "done")] == done
    assert [a["data-step"] for a in reader.classes("g", "running")] == running
    assert len(reader.classes("i", "cursor")) == 2


@needs_chromium
def test_hostile_text_is_shown_as_text(tmp_path: Path) -> None:
    run = Shown(debate(text=HOSTILE), True)
    path = tmp_path / "hostile.html"
    problems = [ShownProblem(HOSTILE, HOSTILE, (HOSTILE,), [run])]
    path.write_text(page_html(HOSTILE, problems, {HOSTILE: HOSTILE}), encoding="utf-8")
    reader, text = browser(path, "#0.0.9")
    assert len(reader.classes("g", "node")) == 14
    assert all(tag != "img" for tag, _ in reader.found)
    assert "<title>owned" not in text
    assert "&lt;/script&gt;&lt;img src=x onerror=" in text


@needs_chromium
def test_a_picture_is_drawn_in_light_and_in_dark(page: Path, tmp_path: Path) -> None:
    import matplotlib.image

    brightness = []
    for scheme in (1, 0):
        png = tmp_path / f"{scheme}.png"
        browser(page, "", f"--screenshot={png}", f"--blink-settings=preferredColorScheme={scheme}")
        brightness.append(matplotlib.image.imread(png)[..., :3].mean())
    light, dark = brightness
    assert light > 0.8 and dark < 0.3
