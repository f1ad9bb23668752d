"""The list of runs of a store: how each stands, its best epoch, when it last wrote."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from urllib.parse import quote

from torchrelay.metadata.run_directory import RunDirectory
from torchrelay.runners.monitoring.status import standing
from torchrelay.runners.report.course import course_of, moment_of
from torchrelay.runners.report.facts import RunFacts
from torchrelay.runners.report.gather import best_of
from torchrelay.runners.report.limits import Troubles
from torchrelay.runners.report.line_chart import thinned
from torchrelay.runners.report.markup import Child, Markup, el
from torchrelay.runners.report.overview import best_text, state_of
from torchrelay.runners.report.page import whole_page
from torchrelay.runners.report.parts import scrolling, section, table
from torchrelay.runners.report.scales import Scale, scale_of
from torchrelay.runners.report.starts import points_of
from torchrelay.runners.report.wording import count, moment

_WIDTH, _HEIGHT = 120, 28


def glance(run: RunDirectory) -> RunFacts:
    """As much of a run as a line of the list shows: identity, status and metrics, not its checkpoints."""
    troubles = Troubles()
    identity = troubles.tried(run.identity, None) or {}
    status: dict[str, Any] = troubles.tried(run.status, {})
    epoch, state, job = status.get("epoch"), status.get("state"), identity.get("job")
    return RunFacts(
        name=run.name,
        path=str(run.where),
        job=job if isinstance(job, str) else None,
        state=state if isinstance(state, str) else None,
        epoch=epoch if type(epoch) is int else None,
        stands=standing(run.path),
        updated=moment_of({"time": status.get("updated")}),
        best=best_of(identity.get("best")),
        identity=identity,
        course=course_of(points_of(run, troubles), {}),
        trouble=tuple(troubles.said),
    )


def index_page(root: str, runs: Sequence[RunFacts], tag: str) -> str:
    """The list as a page, what wrote last on top."""
    ordered = sorted(runs, key=lambda run: (-(run.updated or 0.0), run.name))
    going = sum(run.stands.word == "running" for run in runs)
    title = f"{count(len(runs), 'run')}, {going} running" if going else count(len(runs), "run")
    rows = [_row(run) for run in ordered]
    body: Child = el("p", "A run appears here when its directory holds run.json.", class_="quiet")
    if rows:
        columns = ("run", "job", "state", "epoch", "best", "course", "updated")
        body = el("div", scrolling("runs", table(columns, rows)), class_="card")
    return whole_page(
        title, [el("span", root, class_="quiet")], section("runs", f"Runs in {root}", body), live=tag
    )


def _row(run: RunFacts) -> list[Child]:
    word, tone = state_of(run)
    trouble = (
        el("span", f"{count(len(run.trouble), 'thing')} unreadable", class_="state bad")
        if run.trouble
        else None
    )
    return [
        el("a", run.name, href=f"/run/{quote(run.name, safe='')}"),
        run.job or "",
        [el("span", word, class_=f"state {tone}"), trouble],
        "" if run.epoch is None else str(run.epoch),
        best_text(run),
        _spark(run),
        moment(run.updated) if run.updated is not None else "",
    ]


def _spark(run: RunFacts) -> Markup | None:
    """The course of the run's own metric, without numbers: the cell beside it has the one that counts."""
    if run.best is None:
        return None
    name = run.best[0]
    values = [(one.epoch, one.metrics[name]) for one in run.course.points if name in one.metrics]
    finite = [(epoch, value) for epoch, value in values if value - value == 0]
    if len(finite) < 2:
        return None
    x = Scale(finite[0][0], finite[-1][0], 2, _WIDTH - 2)
    y = scale_of([value for _, value in finite], _HEIGHT - 3, 3)
    path = "L".join(f"{x(epoch):.1f} {y(value):.1f}" for epoch, value in thinned(finite, 120))
    label = f"{name} over {count(len(finite), 'epoch')}"
    drawn = el("path", d=f"M{path}", class_="line s1")
    return el("svg", drawn, viewBox=f"0 0 {_WIDTH} {_HEIGHT}", class_="spark", role="img", aria_label=label)
