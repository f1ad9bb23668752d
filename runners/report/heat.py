"""The section of save times: nodes by phases as a heat map; whether one dominates, as `stats` says."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from torchrelay.metadata.statistics import WAITING, NodeRow, NodeTimes, Summary, summary
from torchrelay.runners.report.facts import RunFacts, SavedEpoch
from torchrelay.runners.report.markup import Markup, el
from torchrelay.runners.report.parts import of_run, scrolling, section, table
from torchrelay.runners.report.wording import count, number, seconds, share

_PHASES = ("stage", "plan", "hash", "write", "fsync", "commit")
_MOST_NODES = 32
_SHADES = 7


def summed_up(saves: Sequence[SavedEpoch]) -> Summary:
    """Nodes, the slowest first, with the medians of their phases over all saves."""
    return summary(
        [
            [NodeTimes(node, "", 0, dict(secs)) for node, secs in saved.save.nodes.items()]
            for saved in saves
            if saved.save.nodes
        ]
    )


def heat(runs: Sequence[RunFacts]) -> Markup:
    """How long saves took, and where."""
    found = [(run, summed_up(run.save_times)) for run in runs]
    known = [(run, times) for run, times in found if times.nodes]
    if not known:
        return section("saves", "No save times are noted yet")
    many = len(runs) > 1
    worst, slowest = max(known, key=lambda pair: pair[1].nodes[0].own_secs)
    title = finding_of(slowest, worst.name if many else "")
    return section("saves", title, [of_run(run.name, many, _figure(times)) for run, times in known])


def finding_of(times: Summary, run: str = "") -> str:
    """Which node the others wait for, or which phase takes the time where none dominates."""
    where, verdict = f" of {run}" if run else "", times.verdict
    if verdict is not None and verdict.dominates:
        ratio = "" if verdict.ratio is None else f", {verdict.ratio:.1f} times the others"
        own = f"{seconds(verdict.secs)} of its own work per save"
        return f"{verdict.node} dominates the saves{where}: {own}{ratio}"
    first = times.nodes[0]
    phase = max(first.phases, key=lambda one: first.phases[one][0], default="")
    longest = f"{share(first.phases[phase][0], _all_secs(first))} of it {phase}" if phase else "in no phase"
    alike = "" if verdict is None else ", no node dominates"
    return f"A save{where} takes {seconds(_all_secs(first))}, {longest}{alike}"


def _all_secs(row: NodeRow) -> float:
    return sum(middle for middle, _ in row.phases.values())


def _figure(times: Summary) -> Markup:
    shown, rest = times.nodes[:_MOST_NODES], times.nodes[_MOST_NODES:]
    phases = [one for one in _PHASES if one in times.phases]
    phases += sorted(set(times.phases) - set(_PHASES))
    label = f"Median seconds of a save by node and phase, over {count(times.actions, 'save')}"
    top = max((middle for row in times.nodes for middle, _ in row.phases.values()), default=0.0)
    rows = [
        [
            el("span", row.node, class_="nodename"),
            *(_cell(row.phases[phase][0] if phase in row.phases else None, top) for phase in phases),
            el("strong", seconds(row.own_secs)),
        ]
        for row in shown
    ]
    waiting = " and ".join(sorted(WAITING))
    note = f"{label}. Own work leaves out {waiting}, where nodes wait for each other. {_key(top)}"
    usual = median([row.own_secs for row in rest] or [0.0])
    more = f"{count(len(rest), 'quicker node')} not shown: {seconds(usual)} of own work per save"
    return el(
        "div",
        scrolling(label, el("div", table(("node", *phases, "own work"), rows), class_="heat")),
        el("p", note, class_="quiet"),
        el("p", more, class_="quiet") if rest else None,
        class_="card",
    )


def _cell(value: float | None, top: float) -> Markup:
    """A number on its shade: a strong one is long; the number says it too, so colour is never alone."""
    if value is None:
        return el("span", "\N{EN DASH}", class_="cell h0", title="this node has no such phase")
    level = min(_SHADES, int((value / top) ** 0.5 * _SHADES) + 1) if top > 0 and value > 0 else 0
    return el("span", seconds(value), class_=f"cell h{level}", title=f"{number(value)} s")


def _key(top: float) -> str:
    return f"The strongest shade is {seconds(top)}."
