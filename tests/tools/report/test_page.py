"""The page as text: whole in itself, hostile names harmless, colours that can be told apart."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from itertools import combinations
from pathlib import Path

import pytest
from test_markup import read

from torchrelay.errors import UsageError
from torchrelay.metadata.run_directory import RunDirectory
from torchrelay.tools.cli.main import main
from torchrelay.tools.report.gather import gather
from torchrelay.tools.report.page import asset, policy, report_page
from torchrelay.tools.report.run_data import ReadLimits

EVIL = "<script>alert(1)</script><img src=x onerror=alert(2)>\"'</title></style>"
QUICK = ReadLimits(norm_bytes=0)


def hostile(story: RunDirectory) -> RunDirectory:
    """The run with hostile text wherever a file can hold some."""
    path = story.path.with_name("a<b onclick='x'>&\"")
    story.path.rename(path)
    run = RunDirectory(path)
    line = {"epoch": 9, "time": 1e9, "saved": EVIL, "metrics": {EVIL: 1.5, f"{EVIL}/x": "nan", "v": EVIL}}
    run.log_metrics(10**6, line)
    for kind in ("failure", "warning", EVIL):
        run.log_event(10**6, kind, error=EVIL, text=EVIL, reason=EVIL)
    identity = {**(run.identity() or {}), "command": [EVIL], "best": [EVIL, "max"], EVIL: EVIL, "job": EVIL}
    (path / "run.json").write_text(json.dumps(identity))
    run.write_status("FAILED", error=EVIL, host=EVIL, stop=[EVIL], epoch=EVIL)
    (path / "config").mkdir()
    (path / "config/resolved.yaml").write_text(f"a: {json.dumps(EVIL)}\n")
    (path / f"lineage/{EVIL.replace('/', '_')}").mkdir(parents=True)
    (path / f"lineage/{EVIL.replace('/', '_')}/x.json").write_text(EVIL)
    for stats in run.checkpoints.glob("data/*/stats.json"):
        node = {"node": EVIL, "path": EVIL, "bytes": 1, "secs": {EVIL: 1.0}}
        stats.write_text(json.dumps({"bytes": 1, "nodes": [node]}))
    return run


def test_nothing_in_a_run_becomes_markup(story: RunDirectory) -> None:
    """Hostile names, metrics, events, configs and nodes are shown as text and make no element."""
    clean = read(report_page([gather(story, QUICK)]))
    found = read(report_page([gather(hostile(story), QUICK)]))
    assert set(found.tags) <= set(clean.tags) | {"div", "details", "summary", "pre", "h4"}
    assert found.tags.count("script") == found.tags.count("style") == 1
    assert "img" not in found.tags
    assert not [name for name, _ in found.attributes if name.startswith("on") or name in ("style", "src")]
    assert found.text.count("alert(1)") > 10


def test_a_page_asks_nothing_of_anybody(story: RunDirectory) -> None:
    """No address but anchors and namespaces stands in it, and its policy forbids every request."""
    page = report_page([gather(story)])
    assert set(re.findall(r"https?://[^\s\"'<)]*", page)) <= {"http://www.w3.org/2000/svg"}
    links = [value for name, value in read(page).attributes if name in ("href", "src", "srcset", "action")]
    assert links
    assert all(str(link).startswith("#") for link in links)
    assert policy(live=False).startswith("default-src 'none'")
    assert "connect-src 'none'" in page.replace("&#39;", "'")


def test_assets_cannot_end_their_own_elements() -> None:
    """Script and style hold nothing that HTML would read as the end of them, and load nothing."""
    for name in ("report.js", "report.css"):
        text = asset(name)
        assert "</" not in text
        assert "<!--" not in text
        assert "url(" not in text
        assert "@import" not in text


def test_what_could_not_be_read_stands_on_top(story: RunDirectory) -> None:
    """Damage is the first thing that a reader sees, in words."""
    (story.path / "run.json").write_text("{")
    page = read(report_page([gather(story, QUICK)]))
    assert "1 thing could not be read or verified" in page.text
    assert page.text.index("could not be read") < page.text.index("Values of story")


def test_several_runs_are_laid_over_each_other(story: RunDirectory, trained: Path) -> None:
    """Every run is in the legend and every chart, and settings that differ are marked."""
    other = RunDirectory(story.path.rename(story.path.with_name("other")))
    (other.path / "config").mkdir()
    (other.path / "config/resolved.yaml").write_text("lr: 1e-3\n")
    text = report_page([gather(RunDirectory(trained), QUICK), gather(other, QUICK)])
    page = read(text)
    assert "story and other compared" in page.text
    assert "Only lr differs" in page.text
    assert 'class="differs"' in text
    for series in (json.loads(value or "") for name, value in page.attributes if name == "data-series"):
        assert {"story", "other"} <= {one[0] for one in series}


def test_sixteen_runs_have_different_lines(story: RunDirectory) -> None:
    """Above eight runs the colours repeat in dashes, in the legend, the charts and the cards of the runs."""
    facts = gather(story, QUICK)
    text = report_page([replace(facts, name=f"run {number}") for number in range(16)])
    for place in ('class="(line s[0-9][^"]*)"></path></svg><span', 'class="(chip [^"]*)"'):
        found = re.findall(place, text)
        assert len(found) == len(set(found)) == 16
    assert 'class="line s8 dashed"' in text and ".line.dashed {" in text


def test_the_verb_writes_a_page_and_says_so(story: RunDirectory, tmp_path: Path, capsys) -> None:
    """One line says what was written; with --json it is an object; the file is replaced, never torn."""
    out = tmp_path / "out.html"
    out.write_text("old")
    assert main(["report", str(story.path), "-o", str(out), "--no-norms"]) == 0
    assert "wrote" in capsys.readouterr().out
    assert out.read_text().startswith("<!doctype html>")
    assert main(["report", str(story.path), "-o", str(out), "--json", "--max-bytes", "1M"]) == 0
    assert json.loads(capsys.readouterr().out)["runs"] == ["story"]
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".tmp-")] == []


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nowhere"], "nowhere does not exist"),
        (["."], "not a run"),
        (["{run}", "-o", "."], "is a directory"),
        (["{run}", "-o", "no/such/place.html"], "is not a directory"),
        (["{run}", "-o", "{run}/checkpoints/r.html"], "inside the checkpoints"),
        (["{run}", "--max-bytes", "lots"], "expected a number of bytes"),
    ],
)
def test_mistakes_are_one_line(
    story: RunDirectory, tmp_path: Path, monkeypatch, capsys, arguments: list[str], said: str
) -> None:
    """What cannot be is told in one line, with exit code 2, before anything is written."""
    empty = tmp_path / "empty"
    empty.mkdir()
    monkeypatch.chdir(empty)
    try:
        code = main(["report", *(one.replace("{run}", str(story.path)) for one in arguments)])
    except SystemExit as left:
        code = left.code
    assert code == 2
    error = capsys.readouterr().err
    assert said in error
    assert "Traceback" not in error
    assert list(empty.iterdir()) == []
    assert issubclass(UsageError, ValueError)


# Colours


def themes() -> dict[str, dict[str, str]]:
    """The colours of both themes by name, as the style sheet has them."""
    blocks = re.findall(r"(:root[^{]*)\{([^{}]*--page[^{}]*)\}", asset("report.css"))
    found = [dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6})", body)) for _, body in blocks]
    light, by_system, by_choice = found
    assert by_system == by_choice
    return {"light": light, "dark": by_choice}


def linear(colour: str) -> tuple[float, float, float]:
    red, green, blue = (int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5))
    return tuple(v / 12.92 if v <= 0.04045 else ((v + 0.055) / 1.055) ** 2.4 for v in (red, green, blue))


def contrast(one: str, other: str) -> float:
    """The ratio of WCAG 2."""
    light = [0.2126 * r + 0.7152 * g + 0.0722 * b for r, g, b in map(linear, (one, other))]
    return (max(light) + 0.05) / (min(light) + 0.05)


MATRICES = {  # how full deuteranopia and protanopia map linear colours (Vienot, Brettel and Mollon 1999)
    "deutan": ((0.29275, 0.70725, 0.0), (0.29275, 0.70725, 0.0), (-0.02234, 0.02234, 1.0)),
    "protan": ((0.11238, 0.88762, 0.0), (0.11238, 0.88762, 0.0), (0.00401, -0.00401, 1.0)),
}


def lab(colour: tuple[float, ...]) -> tuple[float, float, float]:
    """CIE L*a*b* of a linear colour."""
    r, g, b = colour
    xyz = (
        (0.4124 * r + 0.3576 * g + 0.1805 * b) / 0.9505,
        0.2126 * r + 0.7152 * g + 0.0722 * b,
        (0.0193 * r + 0.1192 * g + 0.9505 * b) / 1.089,
    )
    x, y, z = (max(v, 0.0) ** (1 / 3) if v > 0.008856 else 7.787 * v + 16 / 116 for v in xyz)
    return 116 * y - 16, 500 * (x - y), 200 * (y - z)


def apart(one: str, other: str, kind: str) -> float:
    """How different two colours look to a reader (CIE76)."""

    def seen(colour: str) -> tuple[float, ...]:
        base = linear(colour)
        if kind == "usual":
            return lab(base)
        return lab(tuple(sum(row[at] * base[at] for at in range(3)) for row in MATRICES[kind]))

    return sum((a - b) ** 2 for a, b in zip(seen(one), seen(other), strict=True)) ** 0.5


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_text_and_lines_stand_out(theme: str) -> None:
    """Text has a contrast of 4.5 to 1 on all it stands on, lines and bars 3 to 1 (WCAG AA)."""
    colours = themes()[theme]
    for text in ("ink", "quiet", "accent"):
        assert contrast(colours[text], colours["card"]) >= 4.5, text
        assert contrast(colours[text], colours["page"]) >= 4.5, text
    for tone in ("good", "bad", "calm", "busy", "warn"):
        assert contrast(colours[tone], colours[f"{tone}-soft"]) >= 4.5, tone
    for line in (*(f"s{number}" for number in range(1, 9)), "save", "wait", "load", "written"):
        assert contrast(colours[line], colours["card"]) >= 3.0, line


@pytest.mark.parametrize("kind", ["usual", "deutan", "protan"])
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_series_can_be_told_apart(theme: str, kind: str) -> None:
    """The first four series, and what a timeline is made of, differ for readers who confuse red and green."""
    colours = themes()[theme]
    series = [colours[f"s{number}"] for number in range(1, 5)]
    bars = [colours[name] for name in ("train", "save", "wait", "load")]
    for group in (series, bars):
        for one, other in combinations(group, 2):
            assert apart(one, other, kind) >= 15, (one, other)


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_cells_of_a_heat_map_can_be_read(theme: str) -> None:
    """Numbers on all shades have a contrast of 4.5 to 1, and shades go one way from short to long."""
    colours = themes()[theme]
    css = asset("report.css")
    ink = {name: colours["quiet"] if name == "h0" else None for name in (f"h{n}" for n in range(8))}
    for names, colour in re.findall(r"^((?:\.h\d(?:, )?)+) \{ color: ([^;]+); \}", css, re.MULTILINE):
        for name in re.findall(r"h\d", names):
            ink[name] = colours[colour[6:-1]] if colour.startswith("var(") else colour
    for name, text in ink.items():
        assert contrast(text or "", colours[name]) >= 4.5, name
