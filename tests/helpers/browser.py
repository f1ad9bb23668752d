"""A headless Chromium: what a page became in it, what it looked like, what it said and asked for."""

from __future__ import annotations

import html
import json
import os
import re
import shutil
import subprocess
import zlib
from base64 import b64encode
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

import numpy as np
import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
needs_browser = pytest.mark.skipif(
    CHROMIUM is None,
    reason="no chromium: scripts/test-services installs it (Debian: apt-get install chromium)",
)
_OPTIONS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars"),
    *("--no-first-run", "--disable-background-networking", "--disable-component-update", "--disable-sync"),
    *("--enable-logging=stderr", "--log-level=0", "--force-device-scale-factor=1"),
)
_PROBE = """
addEventListener("load", () => setTimeout(() => {
  const root = document.documentElement;
  const box = document.querySelector("svg[data-series]").getBoundingClientRect();
  document.querySelector("svg[data-series]").dispatchEvent(new PointerEvent("pointermove", {
    bubbles: true, clientX: box.left + box.width * 0.6, clientY: box.top + box.height / 2,
  }));
  parent.postMessage({
    name: new URLSearchParams(location.search).get("name"),
    inner: innerWidth,
    scroll: Math.max(root.scrollWidth, document.body.scrollWidth),
    asked: performance.getEntriesByType("resource").length,
    tip: document.getElementById("tip").hidden ? "" : document.getElementById("tip").textContent,
    dom: root.outerHTML,
  }, "*");
}, 300));
"""
_FRAMES = """<!doctype html><meta charset="utf-8">
<style>body {{ margin: 0; display: flex }} iframe {{ border: 0; height: {height}px; flex: none }}</style>
{frames}
<script>
addEventListener("message", (event) => {{
  const told = document.createElement("pre");
  told.textContent = JSON.stringify(event.data);
  told.hidden = true;
  document.body.append(told);
}});
</script>"""


@dataclass(frozen=True)
class Seen:
    """`dom` after scripts have run, `pixels` by row and column (red, green, blue), `console` lines."""

    dom: str
    pixels: np.ndarray
    console: list[str]


@dataclass(frozen=True)
class Framed:
    """A page in a frame: widths, requests made, values under the pointer, DOM, pixels."""

    inner: int
    scroll: int
    asked: int
    tip: str
    dom: str
    pixels: np.ndarray


def look(url: str, folder: Path, *, width: int = 1200, height: int = 1400, millis: int = 1500) -> Seen:
    """Open an address in a fresh profile. Virtual time passes as fast as the page can go."""
    assert CHROMIUM is not None
    folder.mkdir(parents=True, exist_ok=True)
    picture = folder / "seen.png"
    done = subprocess.run(
        [CHROMIUM, *_OPTIONS, f"--user-data-dir={folder / 'profile'}", f"--window-size={width},{height}",
         f"--virtual-time-budget={millis}", f"--screenshot={picture}", "--dump-dom", url],
        capture_output=True, text=True, timeout=100, check=False,
        env={**os.environ, "LANG": "C.UTF-8", "HOME": str(folder)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    console = [line for line in done.stderr.splitlines() if ":CONSOLE" in line]
    return Seen(done.stdout, pixels(picture.read_bytes()), console)


def frames(
    page: str, folder: Path, widths: dict[str, tuple[int, str]], height: int
) -> tuple[dict[str, Framed], list[str]]:
    """A page in several frames side by side, each of a name, a width and a theme; and what the console says.

    A window cannot be as narrow as a phone, a frame can: for the page in it the frame is the window.
    """
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "page.html"
    file.write_text(probed(page), encoding="utf-8")
    elements = [
        f'<iframe width="{width}" src="{file.as_uri()}?theme={theme}&name={name}"></iframe>'
        for name, (width, theme) in widths.items()
    ]
    outer = folder / "frames.html"
    outer.write_text(_FRAMES.format(height=height, frames="".join(elements)), encoding="utf-8")
    total = sum(width for width, _ in widths.values())
    seen = look(outer.as_uri(), folder, width=total, height=height)
    told = [
        json.loads(html.unescape(one))
        for one in re.findall(r"<pre hidden=\"\">(.*?)</pre>", seen.dom, re.DOTALL)
    ]
    by_name = {one.pop("name"): one for one in told}
    found, left = {}, 0
    for name, (width, _) in widths.items():
        found[name] = Framed(pixels=seen.pixels[:, left : left + width], **by_name[name])
        left += width
    return found, seen.console


def probed(page: str, probe: str = _PROBE) -> str:
    """The page with a script behind its own, which its policy allows; by default one that measures it."""
    before, script, after = re.split(r"<script>|</script>", page)
    old, new = (b64encode(sha256(one.encode()).digest()).decode() for one in (script, script + probe))
    assert old in before
    return f"{before.replace(old, new)}<script>{script}{probe}</script>{after}"


def pixels(png: bytes) -> np.ndarray:
    """The pixels of a PNG of 8 bits per channel, not interlaced, without alpha."""
    assert png[:8] == b"\x89PNG\r\n\x1a\n"
    at, packed, width, height, channels = 8, b"", 0, 0, 3
    while at < len(png):
        size, kind = int.from_bytes(png[at : at + 4], "big"), png[at + 4 : at + 8]
        body = png[at + 8 : at + 8 + size]
        if kind == b"IHDR":
            width, height = (int.from_bytes(body[i : i + 4], "big") for i in (0, 4))
            channels = {2: 3, 6: 4}[body[9]]
        elif kind == b"IDAT":
            packed += body
        at += size + 12
    rows = np.frombuffer(zlib.decompress(packed), np.uint8).reshape(height, 1 + width * channels)
    out = np.zeros((height, width * channels), np.uint8)
    above = np.zeros(width * channels, np.uint8)
    for number, row in enumerate(rows):
        above = out[number] = _unfiltered(row[0], row[1:], above, channels)
    return out.reshape(height, width, channels)[:, :, :3]


def _unfiltered(kind: int, row: np.ndarray, above: np.ndarray, step: int) -> np.ndarray:
    if kind == 0:
        return row
    if kind == 2:
        return row + above
    if kind == 1:
        return np.cumsum(row.reshape(-1, step), axis=0, dtype=np.uint8).reshape(-1)
    if kind == 3:
        return _averaged(row, above, step)
    return _paeth(row, above, step)


def _averaged(row: np.ndarray, above: np.ndarray, step: int) -> np.ndarray:
    line, up = row.tolist(), above.tolist()
    for at in range(len(line)):
        left = line[at - step] if at >= step else 0
        line[at] = (line[at] + (left + up[at]) // 2) % 256
    return np.array(line, np.uint8)


def _paeth(row: np.ndarray, above: np.ndarray, step: int) -> np.ndarray:
    """By far the most bytes, so written for speed: of left, up and corner the nearest to their sum."""
    line, up = [0] * step + row.tolist(), [0] * step + above.tolist()
    for at in range(step, len(line)):
        left, high, corner = line[at - step], up[at], up[at - step]
        to_left, to_up = abs(high - corner), abs(left - corner)
        to_corner = abs(left + high - 2 * corner)
        if to_left <= to_up and to_left <= to_corner:
            line[at] = (line[at] + left) & 255
        else:
            line[at] = (line[at] + (high if to_up <= to_corner else corner)) & 255
    return np.array(line[step:], np.uint8)
