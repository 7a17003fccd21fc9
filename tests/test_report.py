"""Reports: one HTML file that needs nothing else, says what the plan says, and takes any name and any lack of data."""

import builtins
import copy
import json
import re
import shutil
import subprocess
from html.parser import HTMLParser

import pytest

from recollect import _charts, _page, report
from recollect._bench import Mark
from recollect._sizes import human
from recollect.fit import Frontier
from recollect.plan import Plan, Planned, Step
from recollect.policy import Recompute

pytest.importorskip("plotly", reason="plotly is not installed")
MiB = 2**20
HOSTILE = ["<script>alert(1)</script>", "</script><!--", '"><img src=x onerror=alert(1)>', "<b>$x$</b> %{y}", "\udc80"]


def marks_of(sizes, replay=0):
    """The moments of a step over blocks that hold so many bytes; weights take 10 MiB."""
    held, marks = 10 * MiB, [Mark("start", None, 10 * MiB, 11 * MiB)]
    for number, size in enumerate(sizes):
        marks.append(Mark("forward", number, held, held + 5 * MiB))
        held += size
        marks.append(Mark("between", number, held, held))
    marks.append(Mark("loss", None, held, held + MiB))
    for number, size in reversed(list(enumerate(sizes))):
        marks.append(Mark("backward", number, held, held + 2 * MiB + replay))
        held -= size
    return (*marks, Mark("end", None, held, held))


def block_of(name, choice="keep", kept=4 * MiB, seconds=0.0, out=0, number=0):
    decisions = {} if choice == "keep" else {name: Recompute()}
    return Planned(name, "Block", choice, decisions, kept, 4 * MiB, seconds, out, (number,))


def plan_of(blocks):
    plain, marks = marks_of([one.saved for one in blocks]), marks_of([one.kept for one in blocks], 3 * MiB)
    peaks = [max(mark.peak for mark in one) for one in (plain, marks)]
    return Plan(
        "Transformer",
        {"weight": (3, 4)},
        "cuda:0",
        peaks[1] + MiB,
        tuple(blocks),
        Step(peaks[0], 0.1),
        Step(peaks[1] - MiB, 0.125),
        Step(peaks[1], 0.13),
        0.013,
        False,
        (Step(20 * MiB, 0.2), Step(24 * MiB, 0.15), Step(peaks[0], 0.1)),
        plain,
        marks,
        ("a note",),
    )


def blocks_of():
    return [
        block_of("layers.0", "recompute", MiB // 2, 0.0075, number=0),
        block_of("layers.1", "recompute, keep 2 aten.mm", 2 * MiB, 0.004, number=1),
        block_of("layers.2", "offload", 0, 0.001, 4 * MiB, number=2),
        block_of("layers.3", number=3),
    ]


@pytest.fixture
def plan():
    return plan_of(blocks_of())


class Page(HTMLParser):
    """What a browser would find: elements, text by heading, data of charts, things to load."""

    def __init__(self, source):
        super().__init__()
        self.elements, self.loads, self.ids, self.charts, self.scripts = [], [], [], {}, []
        self.words = self.style = ""
        self._in = None
        self.feed(source)
        self.words = " ".join(self.words.split())

    def handle_starttag(self, tag, attributes):
        attributes = dict(attributes)
        self.elements.append(tag)
        self.loads += [attributes[name] for name in ("src", "href", "srcset", "action", "data") if name in attributes]
        self.ids.append(attributes.get("id"))
        assert not any(name.startswith("on") for name in attributes)
        if tag in ("script", "style"):
            self._in = attributes.get("data-chart", tag)

    def handle_endtag(self, tag):
        if tag in ("script", "style"):
            self._in = None

    def handle_data(self, data):
        if self._in is None:
            self.words += f" {data}"
        elif self._in == "style":
            self.style += data
        elif self._in == "script":
            self.scripts.append(data)
        else:
            self.charts[self._in] = json.loads(data)


def page_of(data):
    return Page(report.html_of(data))


# --- The file ---


def test_it_loads_nothing(plan):
    page = page_of(plan.to_dict())
    assert page.loads == []
    assert not {"link", "img", "iframe", "base", "object", "embed"} & set(page.elements)
    assert "@import" not in page.style
    assert "url(" not in page.style
    assert len(page.scripts) == 2  # plotly.js once, and ours
    assert "http" not in page.scripts[1]
    assert "default-src 'none'" in report.html_of(plan.to_dict())


def test_it_is_written_in_place_of_an_old_one(plan, tmp_path):
    path = tmp_path / "report.html"
    path.write_text("old")
    plan.report(path)
    assert path.read_text(encoding="utf-8") == report.html_of(plan.to_dict())
    plan.report(str(path))
    assert [one.name for one in tmp_path.iterdir()] == ["report.html"]


def test_a_failure_leaves_the_old_one_and_nothing_else(plan, tmp_path, monkeypatch):
    path = tmp_path / "report.html"
    path.write_text("old")

    def fail(*_):
        raise OSError("no room")

    monkeypatch.setattr(_page.os, "replace", fail)
    with pytest.raises(OSError, match="no room"):
        plan.report(path)
    assert [one.name for one in tmp_path.iterdir()] == ["report.html"]
    assert path.read_text() == "old"


def test_a_bad_path_is_named(plan, tmp_path):
    with pytest.raises(OSError, match=r"cannot be written to .*nowhere.*: there is no directory"):
        plan.report(tmp_path / "nowhere" / "report.html")
    with pytest.raises(OSError, match="it is a directory"):
        plan.report(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_bare_name_is_a_file_here(plan, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    plan.report("report.html")
    assert (tmp_path / "report.html").exists()


def test_without_plotly_it_says_what_to_install(plan, tmp_path, monkeypatch):
    original = builtins.__import__

    def refuse(name, *args, **kwargs):
        if name.split(".")[0] == "plotly":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return original(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(ImportError, match=re.escape("pip install 'recollect[report]'")) as raised:
        plan.report(tmp_path / "report.html")
    assert raised.value.name == "plotly"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("function", [report.html_of, report.html_of_frontier])
def test_data_that_is_none_is_refused(function):
    with pytest.raises(TypeError, match=r"must be what \w+\.to_dict\(\) gives, got"):
        function([1])


# --- What it says ---


def test_it_says_what_the_plan_says(plan):
    words = page_of(plan.to_dict()).words
    assert "A plan for Transformer" in words
    assert "cuda:0" in words
    assert f"for a budget of {human(plan.budget)}" in words
    assert "at most 1.3% more than the least possible" in words
    assert "estimated" not in words
    for title, step in (("Plain", plan.plain), ("Predicted", plan.predicted), ("Measured", plan.measured)):
        card = words[words.index(f" {title} {human(step.peak)} ") :][:140]
        assert f"{1e3 * step.seconds:.1f} ms" in card
        if step is not plan.plain:
            assert f"{step.peak / plan.plain.peak:.2f} ×" in card.replace("×", " ×")  # noqa: RUF001
            assert f"{step.seconds / plan.plain.seconds:.2f}" in card
    assert "1.0 MiB below the budget" in words
    assert "a note" in words


def test_the_table_has_a_row_for_every_block(plan):
    words = page_of(plan.to_dict()).words
    table = words[words.index("module decision held of time added") :]
    for block in plan.blocks:
        row = f"{block.name} {block.choice} {human(block.kept)} {human(block.saved)} {1e3 * block.seconds:.1f} ms"
        assert row in table
    assert "all 1 kept, 1 kept in part, 1 recomputed, 1 offloaded 6.5 MiB 16.0 MiB 12.5 ms" in table


def test_captions_say_what_charts_show(plan):
    page = page_of(plan.to_dict())
    peak = human(plan.measured.peak)
    assert f"Plain, the step peaks at {human(plan.plain.peak)}, in the backward of layers.3." in page.words
    assert f"Under the plan it peaks at {peak}, in the backward of layers.3: 1.0 MiB below the budget" in page.words
    assert (
        "3 plans that no other beats by the predictions, from 20.0 MiB in 200.0 ms to 28.0 MiB in 100.0 ms"
        in page.words
    )
    assert f"This plan: {human(plan.predicted.peak)} in 125.0 ms predicted, {peak} in 130.0 ms measured." in page.words
    assert (
        "Of 16.0 MiB that 4 blocks would hold, 6.5 MiB stay on the device, 4.0 MiB leave it and come back" in page.words
    )
    assert {"step", "step-caption", "frontier", "frontier-caption", "blocks", "blocks-caption"} <= set(page.ids)


def test_charts_are_such_that_plotly_knows_every_property_of_them(plan):
    from plotly.graph_objects import Figure

    for chart in page_of(plan.to_dict()).charts.values():
        text = json.dumps(chart)
        assert set(re.findall(r'"@(\w+)"', text)) <= set(re.findall(r"--(\w+):", _page._STYLE))
        Figure(json.loads(re.sub(r'"@\w+"', '"#123456"', text.replace('"narrow"', '"layout_narrow"')))["data"])
        Figure(layout=json.loads(re.sub(r'"@\w+"', '"#123456"', text))["layout"])
        Figure(layout=json.loads(re.sub(r'"@\w+"', '"#123456"', text))["narrow"])


# --- Charts ---


def stacked(chart):
    """The areas of the chart of a step, each with what it says."""
    return {one["text"]: one["y"] for one in chart["data"] if "stackgroup" in one}


def test_the_areas_add_up_to_what_was_measured(plan):
    chart = page_of(plan.to_dict()).charts["step"]
    areas = stacked(chart)
    (total,) = (one["y"] for one in chart["data"] if one["line"]["color"] == "@planned")
    assert [round(sum(values), 3) for values in zip(*areas.values(), strict=True)] == pytest.approx(total)
    assert max(total) == pytest.approx(plan.measured.peak / MiB)
    (plain,) = (one["y"] for one in chart["data"] if one["line"]["color"] == "@plain")
    assert max(plain) == pytest.approx(plan.plain.peak / MiB)
    assert next(iter(areas)) == "always there: 10.0 MiB"
    assert min(min(values) for values in areas.values()) >= 0


def test_a_block_holds_from_the_end_of_its_forward_to_the_end_of_its_backward(plan):
    chart = page_of(plan.to_dict()).charts["step"]
    (held,) = (values for words, values in stacked(chart).items() if words.startswith("layers.1<br>"))
    marks = [(mark.what, mark.block) for mark in plan.marks]
    first, last = marks.index(("between", 1)), marks.index(("backward", 1))
    assert held == [2.0 if 2 * first <= point <= 2 * last + 1 else 0.0 for point in range(2 * len(marks) - 1)]
    assert not any(words.startswith("layers.2<br>") for words in stacked(chart))  # it holds nothing


def test_blocks_that_add_up_to_more_than_was_alive_give_way(plan):
    data = plan.to_dict()
    for block in data["blocks"]:
        block["kept"] = 40 * MiB
    chart = page_of(data).charts["step"]
    (total,) = (one["y"] for one in chart["data"] if one["line"]["color"] == "@planned")
    areas = stacked(chart)
    assert [sum(values) for values in zip(*areas.values(), strict=True)] == pytest.approx(total, abs=1e-3)
    assert any("holds 40.0 MiB" in words for words in areas)


def test_the_budget_and_the_plan_are_in_the_frontier(plan):
    chart = page_of(plan.to_dict()).charts["frontier"]
    (budget,) = chart["layout"]["shapes"]
    assert budget["y0"] == budget["y1"] == pytest.approx(plan.budget / MiB)
    line, plain, foretold, chosen = chart["data"]
    assert (line["x"], line["y"]) == ([200.0, 150.0, 100.0], pytest.approx([20, 24, plan.plain.peak / MiB]))
    assert (plain["x"], plain["y"]) == ([100.0], pytest.approx([plan.plain.peak / MiB]))
    assert (foretold["x"], foretold["y"]) == ([125.0], pytest.approx([plan.predicted.peak / MiB]))
    assert (chosen["x"], chosen["y"]) == ([130.0], pytest.approx([plan.measured.peak / MiB]))


def test_bars_add_up_to_what_blocks_would_hold(plan):
    chart = page_of(plan.to_dict()).charts["blocks"]
    held, out, again = (one["x"] for one in chart["data"])
    assert (held, out, again) == ([0.5, 2, 0, 4], [0, 0, 4, 0], [3.5, 2, 0, 0])


def test_many_blocks_are_shown_together():
    alike = [block_of(f"model.layers.{n}", "keep" if n < 60 else "recompute", MiB, number=n) for n in range(100)]
    page = page_of(plan_of(alike).to_dict())
    assert len(page.charts["blocks"]["data"][0]["y"]) == 2
    names = page.charts["blocks"]["layout"]["yaxis"]["ticktext"]
    assert [name.strip() for name in names] == ["layers.0 … layers.59", "layers.60 … layers.99"]
    assert len(stacked(page.charts["step"])) == 4
    assert "model.layers.99 recompute" in page.words
    by_turns = [block_of(f"layers.{n}", "keep" if n % 2 else "recompute", MiB, number=n) for n in range(100)]
    groups = _charts.grouped(plan_of(by_turns).to_dict()["blocks"], 32)
    assert [(group.short, group.kept) for group in groups] == [("50 recomputed", 50 * MiB), ("50 kept", 50 * MiB)]


def test_calls_of_one_module_are_one_block():
    block = Planned("shared", "Block", "keep", {}, 8 * MiB, 8 * MiB, 0.0, 0, (0, 1))
    plan = Plan.from_dict(json.loads(json.dumps(plan_of([block]).to_dict())))
    assert plan.blocks == (block,)
    data = plan.to_dict() | {"marks": [vars(mark) for mark in marks_of([4 * MiB, 4 * MiB])]}
    chart = page_of(data).charts["step"]
    (held,) = (values for words, values in stacked(chart).items() if words.startswith("shared"))
    assert sorted(set(held)) == [0, 4, 8]
    assert all("block 1" not in text for one in chart["data"] for text in one.get("hovertext", ()))


def test_a_plan_that_was_not_run_shows_what_it_would_hold(plan):
    data = plan.to_dict() | {"marks": [], "measured": None, "is_estimated": True}
    page = page_of(data)
    (total,) = (one["y"] for one in page.charts["step"]["data"] if one["line"]["color"] == "@planned")
    nows = [mark.now / MiB for mark in plan.marks]
    assert total[::2] == pytest.approx(nows)
    assert "The plan was not run" in page.words
    assert "estimated Nothing was run" in page.words
    assert "Measured – the plan was not run" in page.words  # noqa: RUF001


# --- Names may be anything ---


def named(plan, name):
    """The data of a plan in which everything has this name."""
    data = plan.to_dict() | {"model": name, "device": name, "notes": [name]}
    for block in data["blocks"]:
        block |= {"name": name, "module": name, "choice": f"keep {name}"}
    return data


@pytest.mark.parametrize("name", HOSTILE)
def test_names_stay_names(name, plan, tmp_path):
    data = named(plan, name)
    page, ordinary = page_of(data), page_of(named(plan, "ordinary"))
    assert page.elements == ordinary.elements
    assert page.loads == []
    assert page.words.count(name) >= 3 + 2 * len(plan.blocks)
    shown = [
        text
        for chart in page.charts.values()
        for one in chart["data"]
        for text in [*one.get("hovertext", ()), one.get("text", "")]
    ]
    tags = {tag for text in shown for tag in re.findall(r"<[^>]*>?", text)}
    assert tags == {"<br>"}
    assert not any("$" in text for text in shown)
    report.write(data, tmp_path / "report.html")
    assert (tmp_path / "report.html").stat().st_size > 1e6


@pytest.mark.parametrize("name", HOSTILE)
def test_data_in_a_script_cannot_end_it(name):
    """Even what nobody has escaped before."""
    figure = {"data": [{"text": name, name: float("nan")}], "layout": {"height": 1}, "narrow": {}}
    made = _page.chart("chart", figure, "a caption")
    assert not set("<>&") & set(made[made.index("data-chart") :].partition(">")[2].removesuffix("</script></figure>"))
    assert Page(made).charts["chart"]["data"] == [{"text": name, name: None}]


# --- Something is always missing ---

LESS = {
    "no marks": {"marks": [], "plain_marks": []},
    "no marks of the plain step": {"plain_marks": []},
    "not measured": {"measured": None},
    "no frontier": {"frontier": []},
    "no blocks": {"blocks": []},
    "no blocks and no marks": {"blocks": [], "marks": []},
    "for a time": {"budget": None},
    "no notes": {"notes": []},
    "gap unknown": {"gap": float("nan")},
    "gap endless": {"gap": float("inf")},
    "optimal": {"gap": 0.0},
    "estimated": {"is_estimated": True, "measured": None, "marks": []},
    "plain takes no time": {"plain": {"peak": 0, "seconds": 0.0}},
    "one moment": {"marks": [{"what": "end", "block": None, "now": 5, "peak": 5}], "plain_marks": []},
    "another order": {"plain_marks": [vars(mark) for mark in marks_of([MiB] * 9)]},
    "one point": {"frontier": [{"peak": 5, "seconds": 0.0}], "plain": None, "measured": None, "predicted": None},
}


@pytest.mark.parametrize("less", LESS)
def test_a_page_comes_of_less(less, plan):
    page = page_of(plan.to_dict() | LESS[less])
    assert "A plan for Transformer" in page.words
    assert "Bytes alive over one step" in page.words
    assert "None" not in page.words
    assert "nan" not in page.words
    assert ("step" in page.charts) == (less != "no marks")
    assert ("frontier" in page.charts) == (less != "no frontier")
    assert ("blocks" in page.charts) == ("no blocks" not in less)


@pytest.mark.parametrize("field", [*Plan.__dataclass_fields__, "everything"])
def test_a_page_comes_without_any_one_field(field, plan):
    data = {} if field == "everything" else plan.to_dict()
    data.pop(field, None)
    assert "A plan for" in page_of(data).words


def test_the_data_is_left_as_it_was(plan):
    data = plan.to_dict()
    before = copy.deepcopy(data)
    report.html_of(data)
    assert data == before


# --- A frontier ---


def test_a_frontier_has_a_page(plan, tmp_path):
    points = (Step(20 * MiB, 0.2), Step(24 * MiB, 0.15))
    Frontier(plan.plain, points, (plan, plan)).plot(tmp_path / "frontier.html")
    page = Page((tmp_path / "frontier.html").read_text(encoding="utf-8"))
    assert "What memory costs in time, for Transformer" in page.words
    ratio = f"{20 * MiB / plan.plain.peak:.2f}"
    assert f"plan 1 1 kept, 1 kept in part, 1 recomputed, 1 offloaded 20.0 MiB {ratio} 200.0 ms 2.00" in page.words
    assert f"plain nothing is decided {human(plan.plain.peak)} 1.00 100.0 ms 1.00" in page.words
    assert page.charts["frontier"]["data"][0]["x"] == [200.0, 150.0]
    assert page.loads == []
    assert "There are no plans." in Page(report.html_of_frontier({})).words


# --- In a browser ---

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
LOOK = """<script>
window.addEventListener("load", function () {
  setTimeout(function () {
    var page = document.documentElement;
    console.log("SEEN " + JSON.stringify({
      charts: Array.from(document.querySelectorAll(".chart")).map(function (one) {
        return one.querySelectorAll("svg.main-svg").length > 0;
      }),
      bars: document.querySelectorAll("#blocks .bars path").length,
      scrolls: page.scrollWidth > page.clientWidth,
      ink: getComputedStyle(document.body).color
    }));
  }, 1000);
});
</script></body>"""


@pytest.mark.skipif(BROWSER is None, reason="no Chromium here")
@pytest.mark.parametrize(("width", "dark"), [(1280, False), (500, True)])
@pytest.mark.parametrize("name", ["layers.0", HOSTILE[0] * 8, HOSTILE[3]])
def test_a_browser_draws_it_without_a_complaint(name, width, dark, plan, tmp_path):
    data = plan.to_dict()
    data["blocks"][0]["name"] = data["notes"][0] = data["model"] = name
    source = report.html_of(data)
    (tmp_path / "report.html").write_text(LOOK.join(source.rsplit("</body>", 1)), encoding="utf-8")
    done = subprocess.run(
        [
            *(BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-sync"),
            *("--disable-background-networking", "--disable-component-update", "--hide-scrollbars"),
            *(f"--user-data-dir={tmp_path / 'user'}", f"--window-size={width},1200", "--virtual-time-budget=8000"),
            *("--enable-logging=stderr", f"--blink-settings=preferredColorScheme={0 if dark else 1}", "--dump-dom"),
            (tmp_path / "report.html").as_uri(),
        ],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    said = re.findall(r'CONSOLE[^"]*"(.*)", source', done.stderr)
    assert [one for one in said if not one.startswith("SEEN ")] == []
    (seen,) = (json.loads(one.removeprefix("SEEN ")) for one in said)
    assert seen["charts"] == [True, True, True]
    assert seen["bars"] == 12
    assert not seen["scrolls"]
    assert seen["ink"] == ("rgb(232, 235, 239)" if dark else "rgb(27, 31, 36)")
