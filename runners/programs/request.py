"""What is typed behind verbs of a program and `serve`; how much a client may ask for. Without torch."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import field, fields
from typing import Any

from torchrelay.errors import UsageError
from torchrelay.records import dataclass
from torchrelay.runners.monitoring.console import Parser
from torchrelay.runners.session.stop_requests import seconds_typed


@dataclass(frozen=True)
class RequestLimits:
    """Bytes, counts and seconds. Beyond them a request is refused, and nothing is allocated for it.

    `json_bytes` is less than `body_bytes` because a number takes ten times its text while JSON is read;
    `held_bytes` bounds the bodies of all requests together. `queue` counts samples that wait.
    """

    body_bytes: int = 16 << 20
    json_bytes: int = 2 << 20
    depth: int = 16
    elements: int = 4 << 20
    samples: int = 256
    secs: float = 30.0
    drain_secs: float = 30.0
    queue: int = 2048
    requests: int = 4096
    connections: int = 8192
    held_bytes: int = 64 << 20
    max_batch: int = 16
    max_delay_secs: float = 0.002

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value < 0 or (value == 0 and name != "max_delay_secs"):
                raise UsageError(f"the limit {name} is {value}: give more than 0")
        if self.max_delay_secs >= self.secs:
            raise UsageError(
                f"a batch may wait {self.max_delay_secs:g} s for more samples, and a request is given up "
                f"after {self.secs:g} s: let it wait less"
            )


class Budget:
    """Bytes of bodies that are held now; used by one thread."""

    def __init__(self, most: int) -> None:
        self.most, self.held = most, 0

    def take(self, nbytes: int) -> bool:
        """Whether there is room for so many more, which are then held."""
        if self.held + nbytes > self.most:
            return False
        self.held += nbytes
        return True

    def give_back(self, nbytes: int) -> None:
        """They are not held any more."""
        self.held -= nbytes


PORT = 8331


def _option(default: Any, metavar: str, text: str) -> Any:
    """A field, and how it is shown where it is typed."""
    return field(default=default, metadata={"metavar": metavar, "help": text})


@dataclass(frozen=True)
class ServeOptions:
    """The options; each is what it is called on the command line."""

    port: int = PORT
    host: str = "127.0.0.1"
    token: str | None = None
    token_file: str | None = None
    watch: bool = False
    max_batch: int = _option(
        RequestLimits.max_batch,
        "N",
        "compute at most N samples at once; 1: every answer as `eval` gives it, bit for bit",
    )
    max_delay_ms: float = _option(
        RequestLimits.max_delay_secs * 1000, "MS", "let a sample wait so long for others to share its batch"
    )
    timeout: float = _option(RequestLimits.secs, "SECS", "give a request up after SECS: 503")
    drain: float = _option(
        RequestLimits.drain_secs, "SECS", "after SIGTERM finish what is asked, for at most SECS"
    )
    max_body: int = _option(RequestLimits.body_bytes, "BYTES", "refuse longer bodies: 413")
    max_json: int = _option(RequestLimits.json_bytes, "BYTES", "refuse longer bodies of JSON: 413")
    max_depth: int = _option(RequestLimits.depth, "N", "refuse JSON that is nested deeper: 400")
    max_elements: int = _option(RequestLimits.elements, "N", "refuse tensors with more elements: 413")
    max_samples: int = _option(RequestLimits.samples, "N", "refuse more samples in one request: 413")
    max_queue: int = _option(RequestLimits.queue, "N", "refuse requests when so many samples wait: 429")

    @classmethod
    def of(cls, chosen: argparse.Namespace) -> ServeOptions:
        """What argparse found."""
        return cls(**{one.name: getattr(chosen, one.name) for one in fields(cls)})

    def limits(self) -> RequestLimits:
        """As the server wants them; raises UsageError for what does not go together."""
        return RequestLimits(
            body_bytes=self.max_body,
            json_bytes=min(self.max_json, self.max_body),
            depth=self.max_depth,
            elements=self.max_elements,
            samples=self.max_samples,
            secs=self.timeout,
            drain_secs=self.drain,
            queue=self.max_queue,
            max_batch=self.max_batch,
            max_delay_secs=self.max_delay_ms / 1000,
            held_bytes=max(RequestLimits.held_bytes, 4 * self.max_body),
        )

    def words(self) -> list[str]:
        """How they are typed; those that are as they would be anyway are left out."""
        found: list[str] = []
        for one in fields(self):
            value = getattr(self, one.name)
            if value != one.default:
                option = f"--{one.name.replace('_', '-')}"
                found += [option] if value is True else [option, str(value)]
        return found


def add_serve_options(parser: argparse.ArgumentParser) -> None:
    """Define them."""
    parser.add_argument("--port", type=port, default=PORT, metavar="P", help=f"default: {PORT}; 0 takes any")
    parser.add_argument("--host", default="127.0.0.1", help="default: 127.0.0.1, this machine alone")
    add_token_options(parser)
    parser.add_argument("--watch", action="store_true", help="serve newer epochs when they are committed")
    for one in fields(ServeOptions):
        if one.metadata:
            told, default = one.metadata, one.default
            parser.add_argument(
                f"--{one.name.replace('_', '-')}", type=_positive(type(default)), default=default,
                metavar=told["metavar"],
                help=f"{told['help']} (default: {default:g})" if isinstance(default, float)
                else f"{told['help']} ({default})",
            )  # fmt: skip


def add_token_options(parser: argparse.ArgumentParser, default: str | None = None) -> None:
    """Define the two ways to give a token; `default` is one that the environment gives."""
    ways = parser.add_mutually_exclusive_group()
    ways.add_argument(
        "--token-file", metavar="FILE", help="who asks must send what is in it; needed with another --host"
    )
    ways.add_argument(
        "--token", default=default, metavar="TEXT", help="the same, seen by all who may list processes"
    )


def port(text: str) -> int:
    """A number of a port, as the type of an option."""
    if not (text.isascii() and text.isdecimal()) or int(text[:6]) > 65535:
        raise argparse.ArgumentTypeError(f"{text!r:.20} is no port: 0 to 65535")
    return int(text)


def _positive(kind: Any) -> Any:
    def read(text: str) -> Any:
        try:
            value = kind(text)
        except (ValueError, OverflowError):
            value = -1
        if not 0 <= value < 10**12 or (kind is int and value < 1):
            raise argparse.ArgumentTypeError(
                f"{text!r:.40} is no {'whole ' if kind is int else ''}number above 0"
            )
        return value

    return read


VERBS = {
    "train": "train; goes on where a run of the same code and configuration was left",
    "test": "measure the dataset `test` with the newest saved epoch",
    "eval": "evaluate files: IN... OUT",
    "server": "answer over HTTP with the newest saved epoch, until it is told to leave",
    "status": "say what changed since the last run, and how it stands; writes nothing",
    "package": "write the model of an epoch into one file that runs without this code: --out FILE",
    "amend": "record the changed code with the last run",
}
_CODES = (
    "exit codes: 0 done, 1 an error in the program, or `status --check` found a change, 2 usage, also: "
    "trained already, or changed since the run, 3 no provable epoch, 4 in use, 5 storage, 6 a rank was lost, "
    "75 preempted"
)


@dataclass(frozen=True)
class VerbRequest:
    """A verb and its options; those of other verbs have their defaults."""

    verb: str
    force: bool = False
    retrain: bool = False
    ignore: bool = False
    retest: bool = False
    run_id: str | None = None
    epoch: str | None = None
    message: str = ""
    check: bool = False
    paths: tuple[str, ...] = ()
    config: str | None = None
    overrides: tuple[str, ...] = ()
    runs: str | None = None
    max_epochs: int | None = None
    time_limit: float | None = None
    json: bool = False
    strict_config: bool = False
    out: str | None = None
    overwrite: bool = False
    serve: ServeOptions | None = None

    @classmethod
    def of(cls, chosen: argparse.Namespace, verb: str) -> VerbRequest:
        """What argparse found; raises UsageError for what does not go together."""
        known = {one.name: getattr(chosen, one.name) for one in fields(cls) if hasattr(chosen, one.name)}
        known |= {name: tuple(known[name]) for name in ("paths", "overrides") if name in known}
        if verb == "server":
            known["serve"] = ServeOptions.of(chosen)
        found = cls(**{**known, "verb": verb})
        if found.overrides and found.config is None:
            raise UsageError("-o changes a configuration: name its file with -m")
        if found.strict_config and found.config is None:
            raise UsageError("--strict-config is for a configuration: name its file with -m")
        if verb == "train" and found.force and found.run_id:
            raise UsageError("--force makes a new run, and --run names one that there is: leave one out")
        if verb == "eval" and len(found.paths) < 2:
            raise UsageError("eval takes files to read and, last, the file or directory to write: IN... OUT")
        return found


def rewind_of(request: VerbRequest) -> int | None:
    """The epoch that `train --epoch` goes back to; raises UsageError for what cannot be meant."""
    text = request.epoch
    if text is None:
        return None
    if request.force or request.retrain:
        raise UsageError("--epoch goes back in a run that there is: leave --force and --retrain out")
    if not (text.isascii() and text.isdigit() and len(text) < 9):
        raise UsageError(f"train --epoch {text:.40}: give the number of an epoch to go back to")
    return int(text)


def read_request(argv: Sequence[str] | None = None) -> VerbRequest:
    """Read a script's command line; raises UsageError. After --help argparse itself leaves, with 0."""
    parser = Parser(epilog=_CODES, allow_abbrev=False)
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", required=True)
    for verb, text in VERBS.items():
        description = f"{text[0].upper()}{text[1:]}."
        one = verbs.add_parser(verb, help=text, description=description, epilog=_CODES, allow_abbrev=False)
        one.add_argument("--json", action="store_true", help="one JSON object instead of lines")
        add_options(one, verb)
        one.set_defaults(parser=one)
    chosen, left = parser.parse_known_args(sys.argv[1:] if argv is None else list(argv))
    if left:
        chosen.parser.refuse(left)
    return VerbRequest.of(chosen, chosen.verb)


def add_options(parser: argparse.ArgumentParser, verb: str) -> None:
    """Define what a verb takes."""
    if verb == "server":
        add_serve_options(parser)
    for either in (*_OPTIONS[verb], *_OF_ALL):
        group = parser.add_mutually_exclusive_group() if len(either) > 1 else parser
        for name, how in either.items():
            group.add_argument(name, **how)


def _count(text: str) -> int:
    if not (text.isascii() and text.isdigit() and int(text[:9]) > 0 and len(text) < 9):
        raise argparse.ArgumentTypeError(f"{text!r:.40} is no whole number from 1")
    return int(text)


_FLAG = {"action": "store_true"}
_RUN = {"dest": "run_id", "metavar": "ID"}
_NEWEST = {"--run": {**_RUN, "help": "this run (default: the newest)"}}
_MESSAGE = {"--message": {"metavar": "TEXT", "default": "", "help": "a comment, kept with the run"}}
_USING = (
    {
        "--ignore": {**_FLAG, "help": "use the changed code with the last weights"},
        "--run": {**_RUN, "help": "this run, by its archived code"},
    },
    {"--epoch": {"metavar": "E", "help": "a number, last or best (default: last)"}},
)
_Options = tuple[dict[str, dict[str, Any]], ...]
_OPTIONS: dict[str, _Options] = {
    "train": (
        {
            "--force": {**_FLAG, "help": "make a new run, though nothing changed"},
            "--retrain": {**_FLAG, "help": "train the same run again from the beginning"},
        },
        {"--run": {**_RUN, "help": "this run of the same code (default: the newest)"}},
        {"--epoch": {"metavar": "N", "help": "go back to epoch N of the run of this very code"}},
        {"--max-epochs": {"metavar": "N", "type": _count, "help": "train until so many epochs are done"}},
        {
            "--time-limit": {
                "metavar": "T",
                "type": seconds_typed,
                "help": "leave before T; the same command goes on",
            }
        },
        _MESSAGE,
    ),
    "test": (*_USING, {"--retest": {**_FLAG, "help": "measure again and replace the result"}}),
    "eval": (
        {"paths": {"metavar": "PATH", "nargs": "+", "help": "IN... OUT; a directory is all its files"}},
        *_USING,
    ),
    "server": _USING,
    "status": (_NEWEST, {"--check": {**_FLAG, "help": "end with 1 where train would train"}}),
    "package": (
        {"--out": {"metavar": "FILE", "required": True, "help": "the package"}},
        {"--overwrite": {**_FLAG, "help": "replace the file if it is there"}},
        *_USING,
    ),
    "amend": (_NEWEST, _MESSAGE),
}
"""Of each verb; of several in one mapping only one may be given."""
_OF_ALL: _Options = (
    {"-m": {"dest": "config", "metavar": "CONFIG", "help": "a configuration file, YAML"}},
    {
        "-o": {
            "dest": "overrides",
            "metavar": "KEY=VALUE",
            "action": "append",
            "default": [],
            "help": "change a value of it",
        }
    },
    {"--strict-config": {**_FLAG, "help": "end with 2 where a key of it is never read"}},
    {"--runs": {"metavar": "DIR", "help": "where the runs of experiments lie (or TORCHRELAY_RUNS)"}},
)
