"""What is typed behind `serve` and `server`, and how much a client may ask for. Without torch."""

from __future__ import annotations

import argparse
from dataclasses import fields
from typing import Any

from torchrelay.errors import UsageError
from torchrelay.records import dataclass


@dataclass(frozen=True)
class Limits:
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
    head_secs: float = 10.0
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


@dataclass(frozen=True)
class ServeOptions:
    """The options; each is what it is called on the command line."""

    port: int = PORT
    host: str = "127.0.0.1"
    token_file: str | None = None
    watch: bool = False
    max_batch: int = Limits.max_batch
    max_delay_ms: float = Limits.max_delay_secs * 1000
    timeout: float = Limits.secs
    drain: float = Limits.drain_secs
    max_body: int = Limits.body_bytes
    max_json: int = Limits.json_bytes
    max_depth: int = Limits.depth
    max_elements: int = Limits.elements
    max_samples: int = Limits.samples
    max_queue: int = Limits.queue

    @classmethod
    def of(cls, chosen: argparse.Namespace) -> ServeOptions:
        """What argparse found."""
        return cls(**{one.name: getattr(chosen, one.name) for one in fields(cls)})

    def limits(self) -> Limits:
        """As the server wants them; raises UsageError for what does not go together."""
        return Limits(
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
            held_bytes=max(Limits.held_bytes, 4 * self.max_body),
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


_OPTIONS: tuple[tuple[str, Any, str, str], ...] = (
    (
        "max-batch",
        int,
        "N",
        "compute at most N samples at once; 1: every answer as `eval` gives it, bit for bit",
    ),
    ("max-delay-ms", float, "MS", "let a sample wait so long for others to share its batch"),
    ("timeout", float, "SECS", "give a request up after SECS: 503"),
    ("drain", float, "SECS", "after SIGTERM finish what is asked, for at most SECS"),
    ("max-body", int, "BYTES", "refuse longer bodies: 413"),
    ("max-json", int, "BYTES", "refuse longer bodies of JSON: 413"),
    ("max-depth", int, "N", "refuse JSON that is nested deeper: 400"),
    ("max-elements", int, "N", "refuse tensors with more elements: 413"),
    ("max-samples", int, "N", "refuse more samples in one request: 413"),
    ("max-queue", int, "N", "refuse requests when so many samples wait: 429"),
)


def add_serve_options(parser: argparse.ArgumentParser) -> None:
    """Define them."""
    known = {one.name: one.default for one in fields(ServeOptions)}
    parser.add_argument("--port", type=port, default=PORT, metavar="P", help=f"default: {PORT}; 0 takes any")
    parser.add_argument("--host", default="127.0.0.1", help="default: 127.0.0.1, this machine alone")
    parser.add_argument(
        "--token-file", metavar="FILE", help="who asks must send what is in it; needed with another --host"
    )
    parser.add_argument("--watch", action="store_true", help="serve newer epochs when they are committed")
    for name, kind, metavar, text in _OPTIONS:
        default = known[name.replace("-", "_")]
        parser.add_argument(
            f"--{name}", type=_positive(kind), default=default, metavar=metavar,
            help=f"{text} (default: {default:g})" if isinstance(default, float) else f"{text} ({default})",
        )  # fmt: skip


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
