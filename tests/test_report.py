"""The report of a comparison: pictures with titles, units and legends, and one page that needs nothing but itself."""

from __future__ import annotations

import re
import shutil
import subprocess

import pytest

from kvframe.comparison.compare import compare
from kvframe.comparison.html import headline, report
from kvframe.comparison.pictures import pictures
from kvframe.comparison.summary import rows
from kvframe.config import compose

pytest.importorskip("matplotlib")
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
CHROMIUM = next((path for name in BROWSERS if (path := shutil.which(name))), None)
OVERRIDES = [
    "model=random", "model.shape=tiny", "model.dtype=float32", "cache.memory=4MiB", "kernel=reference",
    "engine.clock=virtual", "workload.requests=2", "workload.prompt=[4,20]", "workload.output=[3,6]", "repeat=2",
    "caches=[contiguous,paged,int8,'paged cache.layout.block_size=4',hf_dynamic]", "quality_tokens=24",
    "timeline={prompt: 10, output: 30}",
]  # fmt: skip


@pytest.fixture(scope="module")
def results():
    return compare(compose(OVERRIDES, "compare"), OVERRIDES)


@pytest.fixture(scope="module")
def figures(results):
    from kvframe.report import figure_class

    return pictures(results, figure_class())


@pytest.fixture(scope="module")
def page(results, figures):
    return report(results, figures)


def test_every_picture_has_a_title_units_and_a_legend(figures):
    assert set(figures) == {"tradeoff", "timeline", "latency", "quality"}
    for name, figure in figures.items():
        panels = [axes for axes in figure.axes if axes.get_label() != "<colorbar>"]
        assert figure._suptitle is not None or any(axes.get_title() for axes in panels), name
        labels = [axes.get_xlabel() or axes.get_ylabel() for axes in panels]
        assert all(labels), name
        told = " ".join(axes.get_xlabel() + axes.get_ylabel() for axes in figure.axes)
        assert re.search(r"MiB|KiB|ms|nats|tokens", told), name
        told = figure.legends or any(axes.get_legend() for axes in panels)
        assert told or name == "latency"  # there the rows are named


def test_the_timeline_draws_what_was_measured(figures, results):
    above, below = figures["timeline"].axes
    line = results["timeline"]["contiguous"]
    drawn = next(one for one in above.get_lines() if "contiguous" in one.get_label())
    assert [round(y * 2**20) for y in drawn.get_ydata()] == [a + b for a, b in zip(line["reserved"], line["tail"])]
    waste = [100 * (1 - u / r) for u, r in zip(line["used"], line["reserved"])]
    assert any(one.get_ydata() == pytest.approx(waste) for one in below.get_lines())


def test_the_page_fetches_nothing_and_shows_every_row(page, results):
    assert not re.search(r"""(src|href)=["'](?!data:)|@import|url\(|<link""", page)
    for row in results["rows"]:
        assert row["cache"].replace("'", "&#39;") in page
    assert page.count("data:image/png;base64,") == 4
    assert "transformers" in page and "reference" in page


def test_names_and_notes_cannot_break_the_page(results, figures):
    nasty = {**results, "notes": ["<script>alert(1)</script>"], "complete": False}
    text = report(nasty, {})
    assert "<script>alert" not in text and "not complete" in text


def raced(results, speeds):
    """The same comparison with set speeds (a clock is no thing to assert): tokens per second of each run, by cache."""
    runs = []
    for run in results["runs"]:
        nth = sum(one["cache"] == run["cache"] for one in runs)
        runs.append({**run, "output_tokens_per_s": speeds.get(run["cache"], (20.0, 40.0))[nth]})
    return {**results, "runs": runs, "rows": rows({**results, "runs": runs})}


def test_the_headline_names_the_best(results):
    told = headline(raced(results, {"int8": (50.0, 60.0)}))
    assert "int8 was the fastest: 55.0 output tokens per second." in told
    kept = {row["cache"]: row["kv_bytes_peak"] for row in results["rows"] if row["kv_bytes_peak"]}
    assert any(min(kept, key=kept.get) in sentence and "smallest" in sentence for sentence in told)


def test_the_headline_says_when_the_runs_do_not_tell_who_is_fastest(results):
    told = headline(raced(results, {"int8": (30.0, 60.0)}))
    assert [sentence for sentence in told if "fastest" in sentence] == [
        "The runs do not tell which was the fastest: the ranges of output tokens per second overlap."
    ]


def test_a_comparison_without_quality_or_timeline_has_fewer_pictures(results):
    from kvframe.report import figure_class

    bare = {**results, "timeline": {}, "rows": [{**row, "kl_mean": None} for row in results["rows"]]}
    assert set(pictures(bare, figure_class())) == {"tradeoff", "latency"}


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed")
@pytest.mark.parametrize("width", [400, 1200])
def test_a_browser_opens_it_without_errors(width, page, results, tmp_path):
    """Sorts by every column in the browser; errors of the page would be in its title."""
    probe = """<script>
      window.addEventListener("error", event => { document.title = "ERROR " + event.message; });
    </script>"""
    check = """<script>
      document.querySelectorAll("#figures thead th").forEach(head => { head.click(); head.click(); });
      const images = [...document.images].filter(image => image.naturalWidth > 0).length;
      const rows = document.querySelectorAll("#figures tbody tr").length;
      const wide = document.documentElement.scrollWidth > window.innerWidth + 1;
      if (!document.title.startsWith("ERROR")) document.title = `rows ${rows} images ${images} wide ${wide}`;
    </script>"""
    file = tmp_path / "report.html"
    file.write_text(page.replace("<head>", "<head>" + probe, 1).replace("</body>", check + "</body>"), encoding="utf-8")
    command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", f"--window-size={width},900"]
    command += [f"--user-data-dir={tmp_path / 'profile'}", "--virtual-time-budget=5000", "--dump-dom", file.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=180)
    title = re.search(r"<title>(.*?)</title>", done.stdout)[1]
    assert title == f"rows {len(results['rows'])} images 4 wide false"
