"""The section of sizes: the blobs of the newest epoch, and what each epoch wrote and referenced."""

from __future__ import annotations

from collections.abc import Sequence

from torchrelay.runners.monitoring.text import human_bytes
from torchrelay.runners.report.facts import BlobBytes, EpochBytes, RunFacts
from torchrelay.runners.report.markup import Markup, chart_card, el
from torchrelay.runners.report.parts import legend, of_run, scrolling, section, table
from torchrelay.runners.report.scales import Scale, ticks
from torchrelay.runners.report.wording import count, share

WIDTH, HEIGHT = 360, 216
_LEFT, _RIGHT, _TOP, _BOTTOM = 58, 12, 12, 28
_MOST_BLOBS = 12
_ROW = 30


def sizes(runs: Sequence[RunFacts]) -> Markup:
    """How large epochs are, and why."""
    known = [run for run in runs if run.sizes]
    if not known:
        return section("sizes", "No epoch is committed yet")
    parts = [
        of_run(
            run.name,
            len(runs) > 1,
            el("div", _blobs(run.sizes[-1]), _epochs(run.sizes), class_="charts"),
            _table(run),
        )
        for run in known
    ]
    return section(
        "sizes",
        _finding(known),
        legend([("written", "written by the epoch"), ("referenced", "referenced in an earlier epoch")]),
        parts,
    )


def _finding(runs: Sequence[RunFacts]) -> str:
    if len(runs) > 1:
        each = (f"{run.name} {human_bytes(_total(run.sizes[-1]))}" for run in runs)
        return f"The newest epochs: {', '.join(each)}"
    newest = runs[0].sizes[-1]
    total = _total(newest)
    if not newest.blobs or not total:
        return "The newest epoch holds no bytes"
    first = newest.blobs[0]
    saved = sum(one.referenced for one in newest.blobs)
    tail = f"; {share(saved, total)} was not written again" if saved else ""
    return f"{first.blob} is {share(first.total, total)} of an epoch of {human_bytes(total)}{tail}"


def _total(epoch: EpochBytes) -> int:
    return sum(one.total for one in epoch.blobs)


def _shown(blobs: Sequence[BlobBytes]) -> list[BlobBytes]:
    if len(blobs) <= _MOST_BLOBS:
        return list(blobs)
    rest = blobs[_MOST_BLOBS - 1 :]
    name = f"{count(len(rest), 'other blob')}"
    other = BlobBytes(name, sum(one.written for one in rest), sum(one.referenced for one in rest))
    return [*blobs[: _MOST_BLOBS - 1], other]


def _blobs(epoch: EpochBytes) -> Markup:
    blobs = _shown(epoch.blobs)
    x = Scale(0.0, max((one.total for one in blobs), default=0) or 1, 8, WIDTH - 12)
    height = _ROW * len(blobs) + 8
    rows = [_blob(one, index * _ROW + 4, x) for index, one in enumerate(blobs)]
    label = f"Bytes by blob at epoch {epoch.epoch}"
    return chart_card(
        f"epoch {epoch.epoch}",
        label,
        el("svg", rows, viewBox=f"0 0 {WIDTH} {height}", class_="chart", role="img", aria_label=label),
    )


def _blob(blob: BlobBytes, y: float, x: Scale) -> Markup:
    middle, end = x(blob.written), x(blob.total)
    text = f"{blob.blob}: {human_bytes(blob.written)} written, {human_bytes(blob.referenced)} referenced"
    return el(
        "g",
        el("title", text),
        el("text", _short(blob.blob), x=8, y=y + 10, class_="tick"),
        el("text", human_bytes(blob.total), x=WIDTH - 12, y=y + 10, class_="tick end"),
        el("rect", x=8, y=y + 14, width=max(0.0, middle - 8), height=9, class_="written"),
        el("rect", x=middle, y=y + 14, width=max(0.0, end - middle), height=9, class_="referenced"),
    )


def _short(name: str, most: int = 40) -> str:
    return name if len(name) <= most else f"{name[: most - 1]}…"


def _epochs(epochs: Sequence[EpochBytes]) -> Markup:
    totals = [(one.epoch, sum(b.written for b in one.blobs), _total(one)) for one in epochs]
    top = max(total for _, _, total in totals) or 1
    y = Scale(0.0, top * 1.05, HEIGHT - _BOTTOM, _TOP)
    slot = (WIDTH - _LEFT - _RIGHT) / len(totals)
    bars = [_column(one, _LEFT + index * slot, slot, y) for index, one in enumerate(totals)]
    every = max(1, -(-len(totals) // 8))
    names = [
        el("text", str(epoch), x=_LEFT + (index + 0.5) * slot, y=HEIGHT - 9, class_="tick middle")
        for index, (epoch, _, _) in enumerate(totals)
        if index % every == 0
    ]
    label = "Bytes by epoch, written and referenced"
    written, whole = sum(one[1] for one in totals), sum(one[2] for one in totals)
    return chart_card(
        f"{count(len(totals), 'epoch')} looked at",
        f"Of {human_bytes(whole)}, {human_bytes(written)} were written",
        el(
            "svg",
            _grid(y),
            bars,
            names,
            viewBox=f"0 0 {WIDTH} {HEIGHT}",
            class_="chart",
            role="img",
            aria_label=label,
        ),
    )


def _grid(y: Scale) -> list[Markup]:
    found = []
    for value in ticks(y, 4):
        found.append(el("line", x1=_LEFT, x2=WIDTH - _RIGHT, y1=y(value), y2=y(value), class_="grid"))
        found.append(el("text", human_bytes(int(value)), x=_LEFT - 6, y=y(value) + 3.5, class_="tick end"))
    return found


def _column(one: tuple[int, int, int], left: float, slot: float, y: Scale) -> Markup:
    epoch, written, total = one
    text = f"epoch {epoch}: {human_bytes(written)} written, {human_bytes(total - written)} referenced"
    width, x = max(0.8, slot * 0.72), left + slot * 0.14
    return el(
        "g",
        el("title", text),
        el("rect", x=x, y=y(written), width=width, height=max(0.0, y.start - y(written)), class_="written"),
        el("rect", x=x, y=y(total), width=width, height=max(0.0, y(written) - y(total)), class_="referenced"),
    )


def _table(run: RunFacts) -> Markup:
    newest = run.sizes[-1]
    rows = [
        (one.blob, human_bytes(one.total), human_bytes(one.written), human_bytes(one.referenced))
        for one in newest.blobs[:400]
    ]
    summary = f"Blobs of epoch {newest.epoch} of {run.name}"
    columns = ("blob", "bytes", "written", "referenced")
    return el("details", el("summary", summary), scrolling(summary, table(columns, rows, numeric=True)))
