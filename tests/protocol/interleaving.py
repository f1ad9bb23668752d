"""All orders in which the real log code of several processes may do its operations, up to a bound.

A process is a programme over a storage, and what it does next follows from the answers that it got so far.
So it is run again from its beginning with these answers until it asks something new, and that step is
remembered: exploring takes a step of any process in any state, and states that are alike are visited once.
An answer that no other process can change any more is given at once, which leaves out no outcome.
"""

from __future__ import annotations

import itertools
import random
import secrets
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from unittest.mock import patch

from stories import still

from torchrelay.checkpoint.log import writer
from torchrelay.checkpoint.log.chain import HINT
from torchrelay.errors import RelayError, StorageError

Output = tuple[Any, ...]
FAR = 200
"""Slots from here on are never filled in these small worlds."""


class AskError(BaseException):
    """The programme asks the storage something that has no answer yet."""

    def __init__(self, verb: str, *arguments: Any) -> None:
        super().__init__(verb, *arguments)
        self.verb, self.arguments = verb, arguments


@dataclass
class Asking:
    """The seam for a programme: gives the answers that it got before, then asks."""

    answers: tuple[Any, ...]
    outputs: list[Output] = field(default_factory=list)
    url: str = "memory://runs/job"
    holder_lives: bool = False
    """Whether the counter of whoever holds the log moves."""
    deaf: bool = False
    """The next sync of a directory does nothing: for a rule that is taken out."""
    _next: int = 0
    _beats: Iterator[bytes] = field(default_factory=lambda: (b"%d" % count for count in itertools.count()))

    def tell(self, *output: Any) -> None:
        """Something that the programme acknowledges."""
        self.outputs.append(output)

    def _ask(self, verb: str, *arguments: Any) -> Any:
        if self._next >= len(self.answers):
            raise AskError(verb, *arguments)
        answer = self.answers[self._next]
        self._next += 1
        if isinstance(answer, type):
            raise answer(arguments[0])
        return answer

    def link_exclusive(self, path: str, data: bytes) -> None:
        self._ask("link", path, data)

    def sync_dir(self, path: str) -> None:
        deaf, self.deaf = self.deaf, False
        if path == "log" and not deaf:
            self._ask("sync", path)

    def delete(self, path: str) -> None:
        self._ask("delete", path)

    def stat(self, path: str) -> int | None:
        return self._ask("stat", path)

    def read_range(self, path: str, offset: int, length: int) -> bytes:
        if path == "writer.json" and self.holder_lives:
            return next(self._beats)
        if path in (HINT, "writer.json"):
            raise FileNotFoundError(path)
        return self._ask("read", path)[offset : offset + length]

    def replace(self, path: str, data: bytes) -> None:
        """Hints and counters prove nothing."""

    def mkdir(self, path: str) -> None:
        """It is there."""

    def list(self, path: str) -> list[str]:
        return []


Programme = Callable[[Asking], None]


class World(NamedTuple):
    """Files as processes see them, the names that a power cut cannot take, and where each process is."""

    seen: frozenset[tuple[str, bytes]]
    safe: frozenset[str]
    places: tuple[int, ...]
    losses: int


@dataclass(frozen=True)
class Step:
    """What a process has told, and what it asks next (None: it has ended)."""

    outputs: tuple[Output, ...]
    ask: AskError | None


class Processes:
    """Programmes, and every history of answers that they met."""

    def __init__(self, programmes: tuple[Programme, ...]) -> None:
        self._programmes = programmes
        self._histories: list[tuple[int, tuple[Any, ...]]] = [(one, ()) for one in range(len(programmes))]
        self._numbers: dict[tuple[int, Any], int] = {}
        self._steps: dict[int, Step] = {}

    @property
    def histories(self) -> int:
        return len(self._histories)

    def step(self, place: int) -> Step:
        if place not in self._steps:
            self._steps[place] = self._run(*self._histories[place])
        return self._steps[place]

    def after(self, place: int, answer: Any) -> int:
        """Where a process is when it got one more answer."""
        if (place, answer) not in self._numbers:
            process, answers = self._histories[place]
            self._numbers[place, answer] = len(self._histories)
            self._histories.append((process, (*answers, answer)))
        return self._numbers[place, answer]

    def _run(self, process: int, answers: tuple[Any, ...]) -> Step:
        asking = Asking(answers)
        nonces = itertools.count((process + 1) << 32)
        with (
            patch.object(secrets, "token_hex", lambda size=16: f"{next(nonces):0{2 * size}x}"),
            patch.object(writer, "_LIVE", weakref.WeakValueDictionary()),
        ):
            try:
                self._programmes[process](asking)
            except AskError as ask:
                return Step(tuple(asking.outputs), ask)
            except RelayError as error:
                asking.tell("error", type(error).__name__)
        return Step(tuple(asking.outputs), None)


@dataclass
class Explorer:
    """Visits states in any order, at most `limit`; `check` says what is wrong with one."""

    processes: Processes
    check: Callable[[World, tuple[Output, ...]], str]
    losses: int = 0
    """How many answers of creations may be lost."""
    thins: bool = False
    """Whether slots may be deleted, so that no answer is certain."""
    exclusive: bool = True
    limit: int = 1_000_000
    visited: int = 0
    wrong: list[str] = field(default_factory=list)
    errors: set[str] = field(default_factory=set)
    """By which errors processes have ended in the states that were visited."""

    def explore(self, files: Mapping[str, bytes], programmes: int, *, held: bool = False) -> None:
        """From a log with these files; `held`: the first process has stopped before its first creation."""
        start = World(frozenset(files.items()), frozenset(files), tuple(range(programmes)), self.losses)
        while held and self.processes.step(start.places[0]).ask.verb != "link":
            ask = self.processes.step(start.places[0]).ask
            start = next(self._answered(start, dict(start.seen), 0, ask))
        rng = random.Random(1)
        found, todo = {start}, [start]
        while todo and len(found) < self.limit and not self.wrong:
            some = rng.choice((-1, rng.randrange(len(todo))))
            todo[some], todo[-1] = todo[-1], todo[some]
            world = todo.pop()
            self.visited += 1
            outputs = tuple(one for place in world.places for one in self.processes.step(place).outputs)
            if problem := self.check(world, outputs):
                slots = sorted(path[21:24] for path, _ in world.seen if path.startswith("log/0"))
                self.wrong.append(f"{problem} (told: {outputs}; slots {' '.join(slots)})")
            self.errors |= {one[1] for one in outputs if one[0] == "error"}
            for other in self._following(world):
                if other not in found:
                    found.add(other)
                    todo.append(other)

    def _following(self, world: World) -> Iterator[World]:
        files = dict(world.seen)
        moves = [(index, self.processes.step(place).ask) for index, place in enumerate(world.places)]
        certain = [one for one in moves if one[1] is not None and _is_certain(one[1], files)]
        for index, ask in certain[:1] if certain and not self.thins else moves:
            if ask is not None:
                yield from self._answered(world, files, index, ask)

    def _answered(self, world: World, files: dict[str, bytes], index: int, ask: AskError) -> Iterator[World]:
        path = ask.arguments[0]
        if ask.verb == "link" and not (self.exclusive and path in files):
            after = frozenset({**files, path: ask.arguments[1]}.items())
            yield self._moved(world, index, None, seen=after, safe=world.safe - {path})
            if world.losses:
                lost = self._moved(world, index, StorageError, seen=after, safe=world.safe - {path})
                yield lost._replace(losses=world.losses - 1)
        elif ask.verb == "link":
            yield self._moved(world, index, FileExistsError)
        elif ask.verb == "sync":
            yield self._moved(world, index, None, safe=frozenset(files))
        elif ask.verb == "delete":
            files.pop(path, None)
            yield self._moved(world, index, None, seen=frozenset(files.items()), safe=world.safe - {path})
        elif ask.verb == "stat":
            yield self._moved(world, index, len(files[path]) if path in files else None)
        else:
            yield self._moved(world, index, files.get(path, FileNotFoundError))

    def _moved(self, world: World, index: int, answer: Any, **changed: Any) -> World:
        places = list(world.places)
        places[index] = self.processes.after(places[index], answer)
        return world._replace(places=tuple(places), **changed)


def _is_certain(ask: AskError, files: Mapping[str, bytes]) -> bool:
    """Whether nothing that others do can change the answer: a slot, once filled, stays as it is."""
    path = ask.arguments[0]
    if ask.verb not in ("stat", "read"):
        return False
    return path in files or (path.startswith("log/0") and int(path[4:24]) >= FAR)


@contextmanager
def exploring() -> Iterator[None]:
    """Everything but the order stands still."""
    with still():
        yield
