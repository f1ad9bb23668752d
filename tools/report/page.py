"""The whole page, one file that asks nothing of any network; the page of all runs of a store.

The list says which runs there are, how each stands, whether files of one have changed.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import time
from base64 import b64encode
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any
from urllib.parse import quote

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

import torchrelay
from torchrelay.checkpoint.log.record import has_job
from torchrelay.errors import RelayError, StorageError, UsageError
from torchrelay.jobs.config.yaml_reader import read_yaml
from torchrelay.metadata.run_directory import RunDirectory
from torchrelay.runners.monitoring.status import standing
from torchrelay.runners.monitoring.text import human_bytes
from torchrelay.runners.remote_runs.local_copies import Wanted, mirror_of
from torchrelay.runners.remote_runs.names import for_a_glance, for_a_look
from torchrelay.tools.report.charts import Chart, PageSection, count, moment, number, seconds, spark, visible
from torchrelay.tools.report.curves import metrics, weights
from torchrelay.tools.report.epochs import checkpoints, sizes, story, tone_of
from torchrelay.tools.report.gather import best_of, points_of
from torchrelay.tools.report.run_data import RunFacts, Troubles, course_of, moment_of
from torchrelay.tools.report.timeline import saves, timeline, wall_secs

_WORDS = {
    "FINISHED": ("finished", "good"),
    "RUNNING": ("running", "busy"),
    "STOPPED": ("stopped", "calm"),
    "PREEMPTED": ("preempted", "calm"),
    "FAILED": ("failed", "bad"),
}


def headline(runs: Sequence[RunFacts]) -> str:
    """The page's title: what happened, in one line."""
    if len(runs) > 1:
        jobs = {run.job for run in runs if run.job}
        return f"{count(len(runs), 'run')} of {jobs.pop()}" if len(jobs) == 1 else count(len(runs), "run")
    run = runs[0]
    word, _ = state_of(run)
    at = f" at epoch {run.epoch}" if run.epoch is not None else ""
    return f"{run.name} {'is ' if word == 'running' else ''}{word}{at}"


def state_of(run: RunFacts) -> tuple[str, str]:
    """A word for people and the class of its colour. A run that cannot be alive is not called running."""
    if run.state == "RUNNING" and run.stands.word != "running":
        return run.stands.shown, "bad"
    if run.state is None:
        return ("has no status", "calm") if run.epochs or run.identity else ("is unreadable", "bad")
    return _WORDS.get(run.state, (run.state.lower(), "calm"))


def best_text(run: RunFacts) -> str:
    """`val/acc 0.9933 at epoch 6`; empty where the run names no best metric or has no value of it."""
    if run.best is None or run.best_point is None:
        return ""
    epoch, value = run.best_point
    return f"{run.best[0]} {number(value)} at epoch {epoch}"


def place_of(run: RunFacts) -> str:
    """Where a run is, behind the word for its state."""
    text = f" at epoch {run.epoch}" if run.epoch is not None else ""
    if run.state == "RUNNING" and run.updated is not None and run.stands.word == "running":
        text += f", last word {moment(run.updated)}"
    return text


def details_of(run: RunFacts) -> list[tuple[str, str]]:
    """Names and values of the card of a run."""
    reason = run.stands.why if run.state == "RUNNING" else run.exit_reason
    exit_code = "" if run.exit_code is None else f" (exit {run.exit_code})"
    ended = run.state != "RUNNING" or run.stands.word == "interrupted"
    more = f" and {len(run.hosts) - 8} more" if len(run.hosts) > 8 else ""
    found = [
        ("best", best_text(run)),
        ("job", run.job),
        ("why it ended", f"{reason}{exit_code}" if ended and reason else ""),
        ("went on for", seconds(wall_secs(run)) if run.attempts else ""),
        ("attempts", str(len(run.attempts)) if run.attempts else ""),
        ("hosts", ", ".join(run.hosts[:8]) + more),
        ("began", moment(run.created) if run.created is not None else ""),
        ("a start now", run.start_now.removeprefix("a start now ")),
        ("directory", run.path),
    ]
    return [(name, value) for name, value in found if value]


_LEFT_OUT = frozenset({"format", "uuid", "created"})
_MOST_FIELDS = 400


def config(runs: Sequence[RunFacts]) -> PageSection:
    """What each run was, and differences first where there are several."""
    fields = [flat(run) for run in runs]
    names = dict.fromkeys(name for one in fields for name in one)
    rows = [(name, [one.get(name) for one in fields]) for name in names]
    settings = sorted(((name, said, len(set(said)) > 1) for name, said in rows), key=lambda row: not row[2])
    differ = sum(differs for _, _, differs in settings)
    title = f"{count(differ, 'setting')} differ between the runs" if differ else "The runs were set up alike"
    content = {"columns": ["setting", *(run.name for run in runs)], "settings": settings}
    return PageSection("config", "Config", _how_started(runs[0]) if len(runs) == 1 else title, content)


def flat(run: RunFacts) -> dict[str, str]:
    """`run.json` and the configuration as one level of names; what says who a run is, is left out."""
    found: dict[str, str] = {}
    said = {name: value for name, value in run.identity.items() if name not in _LEFT_OUT}
    command = said.pop("command", None)
    if isinstance(command, list):
        found["command"] = " ".join(map(str, command))
    _flatten("", said, found)
    _flatten("config", _parsed(run.config), found)
    return found


def _parsed(text: str | None) -> Any:
    if text is None:
        return {}
    try:
        return read_yaml(text.encode(), "config/resolved.yaml").value
    except RelayError:
        return {}  # the text itself is shown below


def _flatten(prefix: str, value: Any, into: dict[str, str]) -> None:
    if isinstance(value, Mapping) and len(into) < _MOST_FIELDS:
        for name, inner in value.items():
            _flatten(f"{prefix}.{name}" if prefix else str(name), inner, into)
    elif prefix and prefix != "config":
        into[prefix] = value if isinstance(value, str) else json.dumps(value, default=str, ensure_ascii=False)


def _how_started(run: RunFacts) -> str:
    world = run.identity.get("world_size")
    ranks = f" on {count(world, 'rank')}" if type(world) is int else ""
    return (
        f"Started{ranks} by this command"
        if run.identity.get("command")
        else "How it was started is not known"
    )


def report_page(runs: Sequence[RunFacts], *, live: str | None = None, back: str | None = None) -> str:
    """The page of some runs as HTML. A `live` one, which is its tag, asks its server again; others nobody.

    `back` is a path to return to, where there is one. What a run has nothing of is left out.
    """
    found = (make(runs) for make in (metrics, timeline, saves, sizes, weights, checkpoints, story, config))
    sections = [one for one in found if one is not None]
    many = len(runs) > 1
    return whole_page(
        "report.html", headline(runs), live=live, runs=runs, many=many, sections=sections, back=back
    )


def whole_page(template: str, title: str, *, live: str | None = None, **content: Any) -> str:
    """A page in the house's form: head, navigation, content, the policy that forbids the network."""
    said = f"torchrelay {torchrelay.__version__}, written {moment(time.time())}"
    return (
        _environment()
        .get_template(template)
        .render(
            title=title,
            live=live,
            policy=policy(live=live is not None),
            style=Markup(asset("report.css")),  # noqa: S704 - our own files
            script=Markup(asset("report.js")),  # noqa: S704
            footer="live, asked again every few seconds" if live else said,
            **content,
        )
    )


_ASSETS = Path(__file__).with_name("assets")


@cache
def _environment() -> Environment:
    """Templates escape what is put into them, so names out of files may hold anything."""
    made = Environment(
        loader=FileSystemLoader(_ASSETS),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
        finalize=shown,
    )
    made.filters.update(number=number, moment=moment, bytes=human_bytes)
    made.globals.update(
        count=count,
        state_of=state_of,
        place_of=place_of,
        details_of=details_of,
        best_text=best_text,
        tone_of=tone_of,
    )
    return made


def shown(value: Any) -> Any:
    """What a template writes for a value: nothing for None, six figures, no signs that a page cannot hold."""
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:.6g}"
    return visible(value) if isinstance(value, str) and not isinstance(value, Markup) else value


def policy(*, live: bool) -> str:
    """What a browser may load for the page: nothing from anywhere, and only our own script and style.

    They are named by their digests, so markup that slipped in could neither run nor fetch. A live page
    may ask its own server.
    """
    rules = {
        "default-src": "'none'",
        "script-src": _digest("report.js"),
        "style-src": _digest("report.css"),
        "connect-src": "'self'" if live else "'none'",
        "base-uri": "'none'",
        "form-action": "'none'",
    }
    return "; ".join(f"{name} {value}" for name, value in rules.items())


@cache
def asset(name: str) -> str:
    """A file of `assets/`, which must not be able to end the element it is put into."""
    return (_ASSETS / name).read_text(encoding="utf-8")


def _digest(name: str) -> str:
    return f"'sha256-{b64encode(sha256(asset(name).encode()).digest()).decode()}'"


MOST_RUNS = 1000
_LOOK_SECS = 10
_FILES = ("run.json", "status.json", "metadata.jsonl", "config/resolved.yaml", "lineage")
_OF_CHECKPOINTS = ("log", "log/HINT", "data")


class RunIndex:
    """Directories of runs directly below a root, or the root itself where it is a run.

    Links are not followed: what they lead to lies elsewhere. Raises UsageError for what is no directory.
    """

    def __init__(self, root: Path) -> None:
        if not root.is_dir():
            what = "a file" if root.exists() else "not there"
            raise UsageError(f"{root} is {what}: give the directory in which runs lie")
        self.root = root.absolute()
        self.shown = str(self.root)
        self._single = is_run(self.root)

    def names(self) -> list[str]:
        """The runs that are there now, sorted; at most a thousand."""
        if self._single:
            return [self.root.name]
        try:
            with os.scandir(self.root) as found:
                names = (one.name for one in found if one.is_dir(follow_symlinks=False))
                return sorted(name for name in names if is_run(self.root / name))[:MOST_RUNS]
        except OSError:
            return []  # the directory is away now; the page says that there is no run

    def runs(self) -> list[RunDirectory]:
        """The same, as run directories."""
        return [RunDirectory(self.root if self._single else self.root / name) for name in self.names()]

    def run(self, name: str) -> RunDirectory | None:
        """The run of a name that the listing has; None for any other text, whatever it spells."""
        return next((run for run in self.runs() if run.name == name), None)


def is_run(path: Path) -> bool:
    """Whether a directory is one of a run. One whose notes are links is none: they may lead to any file."""
    begun = (path / "run.json").is_file() or has_job(path / "checkpoints")
    return begun and not any(one.is_symlink() for one in _notes(RunDirectory(path)))


def signature(run: RunDirectory) -> str:
    """Another text when a file that a page is made of was changed; the same costs some calls of stat."""
    seen = hashlib.sha256(_now_and_then(run).encode())
    for path in (*_notes(run), *(run.path / "checkpoints" / name for name in _OF_CHECKPOINTS)):
        try:
            status = path.stat(follow_symlinks=False)
            seen.update(f"{path.name} {status.st_mtime_ns} {status.st_size} {status.st_ino}\n".encode())
        except OSError as error:
            seen.update(f"{path.name} {error.errno}\n".encode(errors="replace"))
    return seen.hexdigest()[:32]


def _now_and_then(run: RunDirectory) -> str:
    """Of a run that calls itself running also the time: its process may be gone, and no file would say so."""
    try:
        going = run.status().get("state") == "RUNNING"
    except (RelayError, OSError):
        going = False
    return str(time.time() // _LOOK_SECS) if going else ""


def _notes(run: RunDirectory) -> Iterator[Path]:
    for name in _FILES:
        yield run.path / name
    for kind in ("metrics", "steps", "events"):
        for _, path in run.generations(kind):
            yield path


NOT_OLDER_SECS = 5.0
"""Pages ask again every few seconds, in many browsers; the store is asked once meanwhile."""


class FarRuns(RunIndex):
    """What RunStore is of a directory. A store that does not answer shows what was seen last.

    Raises UsageError for a URL that is none, StorageError for a store that does not answer at the start.
    """

    def __init__(self, url: str) -> None:
        self._mirror = mirror_of(url)
        self.root = self._mirror.root
        self.shown = self._mirror.url
        self._single = self._mirror.is_run()
        self._names: list[str] = []
        self._looked = float("-inf")
        if not self._single and not self.names():
            raise UsageError(f"no run lies at {url}, or below it: give the URL of a run, or of several")

    def names(self) -> list[str]:
        """The runs that are there now, sorted; at most a thousand."""
        if not self._single and time.monotonic() - self._looked > NOT_OLDER_SECS:
            try:
                self._names = self._mirror.names()[:MOST_RUNS]
            except StorageError:
                if not self._names:
                    raise
            self._looked = time.monotonic()
        return [self._mirror.root.name] if self._single else self._names

    def runs(self) -> list[RunDirectory]:
        """The same, with what a list shows of them."""
        if self._single:
            return [self._run("", for_a_look)]
        return [self._run(name, for_a_glance) for name in self.names()]

    def run(self, name: str) -> RunDirectory | None:
        """The run of a name that the listing has, with what its page shows; None for any other text."""
        if name not in self.names():
            return None
        return self._run("" if self._single else name, for_a_look)

    def _run(self, name: str, wanted: Wanted) -> RunDirectory:
        try:
            return self._mirror.run(name, wanted, NOT_OLDER_SECS)
        except StorageError:
            return RunDirectory(Path(self._mirror.root, name), f"{self.shown}/{name}".rstrip("/"))


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
    rows = [(run, quote(run.name, safe=""), _course(run)) for run in ordered]
    return whole_page("runs.html", title, live=tag, root=root, rows=rows)


def _course(run: RunFacts) -> Chart | None:
    """The course of the run's own metric, without numbers: the cell beside it has the one that counts."""
    if run.best is None:
        return None
    name = run.best[0]
    values = [(one.epoch, one.metrics[name]) for one in run.course.points if name in one.metrics]
    finite = [(epoch, value) for epoch, value in values if math.isfinite(value)]
    return spark(f"{name} over {count(len(finite), 'epoch')}", finite) if len(finite) > 1 else None
