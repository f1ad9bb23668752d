"""The whole page, one file that makes no request: head, hyper-parameters, comparison, all sections."""

from __future__ import annotations

import json
import math
import re
import time
from base64 import b64encode
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

import torchrelay
from torchrelay.errors import RelayError
from torchrelay.jobs.config.yaml_reader import read_yaml
from torchrelay.runners.monitoring.text import human_bytes
from torchrelay.tools.report.charts import PageSection, brief, count, hue, moment, number, seconds, visible
from torchrelay.tools.report.checkpoints import NOT_ASKED
from torchrelay.tools.report.curves import metric_names, metrics, sizes, weights
from torchrelay.tools.report.run_data import RunFacts
from torchrelay.tools.report.timeline import checkpoints, saves, story, timeline, tone_of, wall_secs

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
        names = [run.name for run in runs]
        if len(names) <= 3:
            return f"{', '.join(names[:-1])} and {names[-1]} compared"
        return f"{count(len(runs), 'run')} compared"
    run = runs[0]
    word, _ = state_of(run)
    at = f" at epoch {run.epoch}" if run.epoch is not None else ""
    return f"{run.name} {'is ' if word == 'running' else ''}{word}{at}"


def state_of(run: RunFacts) -> tuple[str, str]:
    """A word for the state and the class of its colour. A run that cannot be alive is not called running."""
    if run.state == "RUNNING" and run.stands.word != "running":
        return run.stands.shown, "bad"
    if run.state is None:
        without = ("has no status" if run.identity else "saved", "calm")
        return without if run.epochs or run.identity else ("is unreadable", "bad")
    return _WORDS.get(run.state, (run.state.lower(), "calm"))


def best_text(run: RunFacts) -> str:
    """`val/acc 0.9933 at epoch 6`; empty where the run names no best metric or has no value of it."""
    if run.best is None or run.best_point is None:
        return ""
    epoch, value = run.best_point
    return f"{run.best[0]} {number(value)} at epoch {epoch}"


def place_of(run: RunFacts) -> str:
    """Where a run is, after the word for its state."""
    text = f" at epoch {run.epoch}" if run.epoch is not None else ""
    if run.state == "RUNNING" and run.updated is not None and run.stands.word == "running":
        text += f", last update {moment(run.updated)}"
    return text


_LONG = 48
"""A value with more characters takes a whole row of a card."""


def details_of(run: RunFacts, directory: str, many: bool) -> list[tuple[str, str, bool]]:
    """Names and values of the card of a run, and whether the value is a long one, which comes last."""
    reason = run.stands.why if run.state == "RUNNING" else run.exit_reason
    exit_code = "" if run.exit_code is None else f", exit code {run.exit_code}"
    ended = run.state != "RUNNING" or run.stands.word == "interrupted"
    more = f" and {len(run.hosts) - 8} more" if len(run.hosts) > 8 else ""
    found = [
        ("best", best_text(run)),
        ("job", run.job if run.job != run.name else ""),
        ("ended", f"{reason}{exit_code}" if ended and reason else ""),
        ("run time", seconds(wall_secs(run)) if run.attempts else ""),
        ("attempts", str(len(run.attempts)) if run.attempts else ""),
        ("hosts", ", ".join(run.hosts[:8]) + more),
        ("started", moment(run.created) if run.created is not None else ""),
        ("directory", directory),
        ("next launch", "" if many else run.start_now.removeprefix("the next launch ")),
    ]
    known = [(name, value, len(value) > _LONG) for name, value in found if value]
    return sorted(known, key=lambda one: one[2])


# Paths

_KEPT = 2
_PATH = re.compile(r"(?<![\w./:~-])(?:/[^\s/\"',;:=\[\](){}<>]+){4,}")


def short_paths(paths: Sequence[str]) -> list[str]:
    """Paths with the part before their last two names left out, or more names where two would be alike."""
    for kept in range(_KEPT, 2 + max((path.count("/") for path in paths), default=0)):
        found = [_short_path(path, kept) for path in paths]
        if len(set(found)) == len(set(paths)):
            return found
    return list(paths)


def _short_path(path: str, kept: int = _KEPT) -> str:
    scheme, mark, rest = path.rpartition("://")
    home = "" if mark else str(Path.home()).rstrip("/")
    head, names = f"{scheme}{mark}", [name for name in rest.split("/") if name]
    if home and (path == home or path.startswith(f"{home}/")):
        head, names = "~/", [name for name in path.removeprefix(home).split("/") if name]
    elif rest.startswith("/"):
        head = "/"
    root = names[:1] if mark else []  # a bucket names the store
    names = names[len(root) :]
    if len(names) <= kept + (head == "/"):
        return path if head != "~/" else head + "/".join(names)
    return "/".join(
        [*([head.rstrip("/")] if head == "~/" else [f"{head}{root[0]}"] if root else []), "…", *names[-kept:]]
    )


def short(text: str) -> str:
    """A text in which each long absolute path is shortened; pages have the whole text in a `title`."""
    return _PATH.sub(lambda found: _short_path(found[0]), text)


def breakable(name: str) -> Markup:
    """A dotted name that may continue in the next line after each of its parts."""
    parts = re.split(r"(?<=[._/])(?=[^._/])", visible(name))
    return Markup("<wbr>").join(parts)


# Hyper-parameters and launches

_MOST_FIELDS = 400
_OURS = frozenset({"resume-from-epoch", "resume", "again", "time-limit", "max-attempts"})
"""Options of `JobRunner.main`, which are not hyper-parameters."""
_CONFIG = "from config/resolved.yaml"
_MAIN = ("hyper_parameters.", "dataset.", "seed")
"""Settings of a configuration that are shown first; the others are folded away."""


def settings_of(run: RunFacts) -> tuple[str, dict[str, str]]:
    """Hyper-parameters as one level of dotted names, and where they are from; empty where none are known.

    They are those that the program passed as `params=`, else the configuration, else options of the command.
    """
    launch = run.launches[-1] if run.launches else None
    found: dict[str, str] = {}
    if launch is not None and launch.params is not None:
        _flatten("", launch.params, found)
        return "passed as params=", found
    if run.config is not None:
        with suppress(RelayError):  # the text itself is shown below
            _flatten("", read_yaml(run.config.encode(), "config/resolved.yaml").value, found)
        return _CONFIG, found
    argv = launch.argv if launch is not None else run.identity.get("command")
    return "from the command line", typed(argv if isinstance(argv, (list, tuple)) else ())


def typed(argv: Sequence[Any]) -> dict[str, str]:
    """Options of a command line: `--lr 0.1` and `--lr=0.1` are `lr`, an option without a value is `true`."""
    found: dict[str, str] = {}
    words = [str(word) for word in argv[1:]]
    for at, word in enumerate(words):
        if not word.startswith("--") or not word[2:3].isalpha() or len(found) >= _MOST_FIELDS:
            continue
        name, mark, value = word[2:].partition("=")
        following = words[at + 1] if at + 1 < len(words) else "--"
        is_value = not following.startswith("-") or following[1:2].isdigit()
        if name not in _OURS:
            found[name.replace("-", "_")] = value if mark else following if is_value else "true"
    return found


def _flatten(prefix: str, value: Any, into: dict[str, str]) -> None:
    """Mappings by key, lists of named things by their names, all else as a value."""
    if (
        isinstance(value, (list, tuple))
        and value
        and all(isinstance(one, Mapping) and "name" in one for one in value)
    ):
        value = {str(one["name"]): {key: one[key] for key in one if key != "name"} for one in value}
    if isinstance(value, Mapping) and value:
        for name, inner in value.items():
            if len(into) < _MOST_FIELDS:
                _flatten(f"{prefix}.{name}" if prefix else str(name), inner, into)
    elif prefix:
        into[prefix] = value if isinstance(value, str) else json.dumps(value, default=str, ensure_ascii=False)


def changed_settings(run: RunFacts) -> list[str]:
    """What later attempts changed in `params=`, a sentence each."""
    found, before = [], None
    for launch in run.launches:
        now: dict[str, str] = {}
        _flatten("", launch.params or {}, now)
        if before is not None and launch.params is not None and now != before:
            names = [name for name in {**before, **now} if before.get(name) != now.get(name)]
            said = (
                f"{name} from {before.get(name, 'unset')} to {now.get(name, 'unset')}" for name in names[:8]
            )
            more = f" and {len(names) - 8} more" if len(names) > 8 else ""
            found.append(f"Attempt {launch.attempt} changed {', '.join(said)}{more}.")
        before = now if launch.params is not None else before
    return found


Row = tuple[str, list[str | None], bool]
"""A name, its value in each run, and whether the values differ."""


def rows_of(fields: Sequence[Mapping[str, str]]) -> list[Row]:
    """The values of several runs by name; those that differ come first."""
    names = dict.fromkeys(name for one in fields for name in one)
    rows = [(name, [one.get(name) for one in fields]) for name in names]
    return sorted(((name, said, len(set(said)) > 1) for name, said in rows), key=lambda row: not row[2])


def parameters(runs: Sequence[RunFacts]) -> PageSection | None:
    """Hyper-parameters of each run and how it was launched; None where nothing was recorded."""
    known = [settings_of(run) for run in runs]
    rows = rows_of([fields for _, fields in known])
    launches = rows_of([launch_of(run) for run in runs])
    if not rows and not launches:
        return None
    main = rows
    if any(source == _CONFIG for source, _ in known):
        main = [row for row in rows if row[2] or row[0].startswith(_MAIN)] or rows
        main.sort(key=lambda row: (not row[2], not row[0].startswith(_MAIN[0])))
    sources = ", ".join(dict.fromkeys(source for source, fields in known if fields))
    differ = sum(row[2] for row in rows)
    title = count(len(main), "hyper-parameter")
    if len(runs) > 1:
        title = f"{differ} of {title} differ" if differ else f"{title}, all equal"
    title = f"{title} ({sources})" if rows else "How the run was launched"
    content = {
        "names": [run.name for run in runs],
        "settings": main,
        "others": [row for row in rows if row not in main],
        "launches": launches,
        "changed": [text for run in runs for text in changed_settings(run)],
    }
    return PageSection("config", "Parameters", title, content)


def launch_of(run: RunFacts) -> dict[str, str]:
    """How the newest attempt was launched, by name."""
    launch = run.launches[-1] if run.launches else None
    command = launch.argv if launch is not None else run.identity.get("command")
    found = {"command": " ".join(map(str, command)) if isinstance(command, (list, tuple)) else ""}
    world, python = run.identity.get("world_size"), run.identity.get("python")
    found["ranks"] = str(world) if type(world) is int else ""
    found |= launch.facts if launch is not None else {"python": python if isinstance(python, str) else ""}
    return {name: value for name, value in found.items() if value}


# Comparison


def comparison(runs: Sequence[RunFacts]) -> PageSection | None:
    """Several runs side by side: final values, and hyper-parameters that differ; None for one run."""
    if len(runs) < 2:
        return None
    known = rows_of([settings_of(run)[1] for run in runs])
    settings = [(name, values, False) for name, values, differ in known if differ]
    title = (
        f"{count(len(settings), 'hyper-parameter')} differ" if settings else "All hyper-parameters are equal"
    )
    if len(settings) == 1:
        title = f"Only {settings[0][0]} differs"
    content = {
        "names": [run.name for run in runs],
        "settings": settings,
        "values": _final_values(runs),
        "difference": len(runs) == 2,
    }
    return PageSection("compare", "Compare", title, content)


def _final_values(runs: Sequence[RunFacts]) -> list[tuple[str, list[str], set[int], str]]:
    """Rows of a name, the text of each run, which of them are best, and the difference of two runs."""
    rows = []
    for best in sorted({run.best for run in runs if run.best_point and run.best}):
        points = [run.best_point if run.best == best else None for run in runs]
        rows.append(_row_of(f"best {best[0]}", [point and point[1] for point in points], best[1]))
    modes = dict(run.best for run in runs if run.best)
    for name in metric_names(runs):
        last = [[one.metrics[name] for one in run.course.points if name in one.metrics] for run in runs]
        rows.append(_row_of(f"final {name}", [one[-1] if one else None for one in last], modes.get(name)))
    rows.append(_row_of("epochs", [float(len(run.course.points)) for run in runs], None))
    if any(run.course.points and run.course.points[-1].step for run in runs):
        steps = [run.course.points[-1].step if run.course.points else None for run in runs]
        rows.append(_row_of("steps", [None if one is None else float(one) for one in steps], None))
    if any(run.attempts for run in runs):
        rows.append(_row_of("run time", [wall_secs(run) for run in runs], None, seconds))
        rows.append(_row_of("attempts", [float(len(run.attempts)) for run in runs], None))
    if any(run.sizes for run in runs):
        totals = [sum(one.total for one in run.sizes[-1].blobs) if run.sizes else None for run in runs]
        texts = ["" if one is None else human_bytes(one) for one in totals]
        rows.append(("newest checkpoint", texts, set[int](), ""))
    return rows


def _row_of(
    name: str, values: Sequence[float | None], mode: str | None, written: Callable[[float], str] = number
) -> tuple[str, list[str], set[int], str]:
    texts = ["" if one is None else written(one) for one in values]
    finite = [one for one in values if one is not None and math.isfinite(one)]
    best: set[int] = set()
    if mode and len(finite) > 1 and min(finite) != max(finite):
        wanted = (max if mode == "max" else min)(finite)
        best = {at for at, one in enumerate(values) if one == wanted}
    change = ""
    if len(values) == len(finite) == 2:
        difference = finite[1] - finite[0]
        sign = "+" if difference > 0 else "\N{MINUS SIGN}" if difference < 0 else ""
        change = f"{sign}{written(abs(difference))}"
    return name, texts, best, change


def report_page(runs: Sequence[RunFacts], *, live: str | None = None, back: str | None = None) -> str:
    """The page of some runs as HTML. A section without content is left out.

    Args:
        runs: Several runs are compared and laid over each other.
        live: The page's tag, where a server is asked for a newer page; other pages make no request.
        back: A path to return to.
    """
    found = (make(runs) for make in _SECTIONS)
    # Why a run has no section about its weights, where that may surprise.
    why = [(run.name, run.norms.left_out) for run in runs if not run.norms.rows and run.norms.left_out]
    left_out = [f"Weights of {name} are not shown: {text}." for name, text in why if text != NOT_ASKED]
    return whole_page(
        "report.html",
        headline(runs),
        live=live,
        runs=list(zip(runs, short_paths([run.path for run in runs]), strict=True)),
        many=len(runs) > 1,
        sections=[one for one in found if one is not None],
        back=back,
        left_out=left_out,
    )


_SECTIONS = (comparison, metrics, parameters, timeline, checkpoints, story, saves, sizes, weights)


def whole_page(template: str, title: str, *, live: str | None = None, **content: Any) -> str:
    """A page from a template: head, navigation, content, and the policy that forbids requests."""
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
            footer="live, updated every few seconds" if live else said,
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
    made.filters.update(
        number=number,
        moment=moment,
        bytes=human_bytes,
        short=short,
        brief=brief,
        hue=hue,
        breakable=breakable,
    )
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
