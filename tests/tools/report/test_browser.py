"""The page in a real browser: light, dark, on a phone; nothing asked for, nothing complained about."""

from __future__ import annotations

import re
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import numpy as np
import pytest
from browser import Framed, frames, look, needs_browser, probed
from report_runs import noted

from torchrelay.metadata.run_directory import RunDirectory
from torchrelay.tools.report.gather import gather
from torchrelay.tools.report.page import report_page
from torchrelay.tools.report.server import glance, index_page

pytestmark = needs_browser


@pytest.fixture(scope="module")
def page(trained: Path) -> str:
    """The page of the run with a failure, a resume and a rewind."""
    return report_page([gather(RunDirectory(trained))])


FRAMES = {"light": (900, "light"), "dark": (900, "dark"), "phone": (375, "light")}


@pytest.fixture(scope="module")
def looked(page: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Framed], list[str]]:
    """The page as it looks in light, in dark, and on a phone; and what the browser had to say."""
    return frames(page, tmp_path_factory.mktemp("browser"), FRAMES, 900)


@pytest.fixture
def seen(looked: tuple[dict[str, Framed], list[str]]) -> dict[str, Framed]:
    return looked[0]


def test_nothing_is_asked_for_and_nothing_is_wrong(looked: tuple[dict[str, Framed], list[str]]) -> None:
    """The browser loads the file and nothing else, and its console stays empty."""
    seen, console = looked
    assert [one.asked for one in seen.values()] == [0, 0, 0]
    assert console == []


def test_curves_and_marks_are_there(seen: dict[str, Framed]) -> None:
    """Lines, the resume, the rewind and the best epoch are elements of the page, with their words."""
    dom = seen["light"].dom
    for wanted in ("line s1", "line s1 stale", "mark resume", "mark rewind", "best s1"):
        assert f'class="{wanted}"' in dom, wanted
    for text in ("resumed from epoch 3", "rewound to epoch 2", "story finished at epoch 5", ">Attempt 0<"):
        assert text in dom, text


@pytest.mark.parametrize("name", ["light", "dark", "phone"])
def test_the_page_is_as_wide_as_its_window(seen: dict[str, Framed], name: str) -> None:
    """Nothing sticks out sideways, at 375 pixels as little as at 900."""
    one = seen[name]
    assert one.inner == FRAMES[name][0]
    assert one.scroll <= one.inner


def test_values_follow_the_pointer(seen: dict[str, Framed]) -> None:
    """Over the first chart the epoch under the pointer is named, with its value and the abandoned one."""
    lines = seen["light"].tip.splitlines()
    assert lines[0].startswith("epoch ")
    assert [line.partition(":")[0] for line in lines[1:]] == ["story, abandoned", "story"]


COMPARED = {"wide": (1400, "dark"), "narrow": (390, "light")}


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Framed], list[str]]:
    """Two runs with long names and values side by side, on a desk and on a phone."""
    folder = tmp_path_factory.mktemp("compared")
    names = ("a_very_long_name_of_a_run_without_any_blank_in_it", "b")
    runs = [
        noted(
            folder / name,
            {"val/acc": [0.5, 0.6, 0.7], "a/very/long/name/of/a/metric/of/a/layer.0.weight": [1, 2, 3]},
            params=[{"lr": lr, "path": f"/d{'/deep' * 20}/{name}", "model.layers.attention.heads": 8}],
        )
        for name, lr in zip(names, (0.1, 0.2), strict=True)
    ]
    page = report_page([gather(run) for run in runs])
    return frames(page, tmp_path_factory.mktemp("browser"), COMPARED, 900)


def test_a_comparison_fits_a_phone(compared: tuple[dict[str, Framed], list[str]]) -> None:
    """Long names, paths and values neither widen the page nor make it ask for anything or complain."""
    seen, console = compared
    assert console == []
    for name, one in seen.items():
        assert (one.inner, one.asked) == (COMPARED[name][0], 0)
        assert one.scroll <= one.inner, name


def test_steps_follow_the_pointer(compared: tuple[dict[str, Framed], list[str]]) -> None:
    """Over a chart by epoch the step at its end is named with the values of both runs."""
    for one in compared[0].values():
        first, *values = one.tip.splitlines()
        epoch = int(first.partition(",")[0].removeprefix("epoch "))
        assert first == f"epoch {epoch}, step {epoch * 16}"
        assert len(values) == 2


@pytest.mark.parametrize(("chosen", "link"), [(1, ""), (2, "/compare/run0/run%201"), (8, "8 runs"), (9, "")])
def test_chosen_runs_have_a_link_to_their_comparison(tmp_path: Path, chosen: int, link: str) -> None:
    """Two to eight runs that are chosen in the list of a dashboard can be compared; one, or nine, cannot."""
    names = ["run 1", *(f"run{at}" for at in range(9))]
    runs = [glance(noted(tmp_path / name, {"val/acc": [0.5]})) for name in names]
    probe = (
        'addEventListener("load", () => [...document.querySelectorAll(".pick")]'
        f".sort((a, b) => (a.value < b.value ? -1 : 1)).slice(0, {chosen}).forEach((one) => one.click()));"
    )
    file = tmp_path / "index.html"
    file.write_text(probed(index_page("runs", runs, "tag"), probe), encoding="utf-8")
    dom = look(file.as_uri(), tmp_path / "browser").dom
    found = re.search(r'<a [^>]*id="comparison"[^>]*>[^<]*</a>', dom)
    assert found is not None
    assert ("hidden" in found[0]) == (not link)
    assert link in found[0]


def brightness(one: Framed) -> float:
    return float(one.pixels.mean())


def test_pictures_are_not_blank_and_themes_differ(seen: dict[str, Framed]) -> None:
    """Light is light, dark is dark, and in each there is text and colour to be seen."""
    assert brightness(seen["light"]) > 215
    assert brightness(seen["dark"]) < 60
    for one in seen.values():
        colours = np.unique(one.pixels.astype(np.uint32) @ np.array([1 << 16, 1 << 8, 1], np.uint32))
        assert len(colours) > 200
        saturated = (one.pixels.max(axis=2).astype(int) - one.pixels.min(axis=2)) > 90
        assert saturated.mean() > 0.0005


def test_the_line_of_a_curve_is_drawn(seen: dict[str, Framed]) -> None:
    """Pixels of the first series' very colour are in the picture, in both themes."""
    for name, colour in (("light", (0x0B, 0x62, 0xB8)), ("dark", (0x5F, 0xB0, 0xFF))):
        assert (seen[name].pixels == colour).all(axis=2).sum() > 300


class Canary(BaseHTTPRequestHandler):
    asked: list[str]

    def do_GET(self) -> None:
        self.asked.append(self.path)
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


def test_the_policy_stops_what_slipped_in(page: str, tmp_path: Path) -> None:
    """Markup and scripts that got into the page could neither run nor fetch."""
    asked: list[str] = []
    server = HTTPServer(("127.0.0.1", 0), type("Listening", (Canary,), {"asked": asked}))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    here = f"http://127.0.0.1:{server.server_address[1]}"
    for name, text in (("with", page), ("without", page.replace("Content-Security-Policy", "x"))):
        evil = f"<img src='{here}/{name}/img'><script>fetch('{here}/{name}/js')</script><main "
        (tmp_path / f"{name}.html").write_text(text.replace("<main ", evil, 1), encoding="utf-8")
    outer = tmp_path / "outer.html"
    outer.write_text('<!doctype html><iframe src="with.html"></iframe><iframe src="without.html"></iframe>')
    try:
        console = look(outer.as_uri(), tmp_path).console
    finally:
        server.shutdown()
        server.server_close()
    assert set(asked) == {"/without/img", "/without/js"}
    assert sum("Content Security Policy" in line for line in console) >= 2
