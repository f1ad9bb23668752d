"""Lives of a job in a store behind a proxy that strikes, against a dictionary of what was acknowledged.

A world is drawn from its seed: calls in a row (train, rewind, load, verify, tag, prune, a stranger that takes
the log and dies), each with faults among its requests. After each call a client without faults looks at the
log, and in the end a fresh one at everything:

- every acknowledged epoch that was not deleted loads the saved bits;
- no epoch is a mixture: all blobs of one bear the stamp of one step of training;
- a call ends within a bound, as acknowledged or with an error of the family;
- nothing that is whole was called damaged.
"""

from __future__ import annotations

import contextlib
import io
import random
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from store_proxy import Proxy
from store_schedules import Striking, drawn, told

from torchrelay import Job, JobRunner, LocalSession, MultiNodeCheckpointManager, max_epochs, open_checkpoint
from torchrelay.checkpoint.log import writer as log_writer
from torchrelay.checkpoint.log.chain import open_log
from torchrelay.checkpoint.log.lease import WriterIdentity
from torchrelay.checkpoint.log.record import JOB_PATH as JOB_FILE
from torchrelay.checkpoint.log.view import LogView
from torchrelay.checkpoint.log.writer import LogWriter
from torchrelay.checkpoint.storage import object_store
from torchrelay.checkpoint.storage.base import RetryTimeouts
from torchrelay.checkpoint.storage.open import storage_of
from torchrelay.errors import FencedError, RelayError
from torchrelay.tools.cli.main import main

CALLS = 6
"""Calls of a world, where nothing else is said."""
MOST = 10
"""Faults of a call, but for those that have the store away."""
BOUND_SECS = 240.0
"""No call may take longer, patience and faults included, on a machine with other work."""
CLIENT = {"FSSPEC_S3": '{"config_kwargs": {"read_timeout": 1.5, "connect_timeout": 5}}'}
"""For the environment: a client that gives an answer up soon; by default it waits for 15 s."""
OFTEN = {"train": 8, "rewind": 2, "load": 4, "verify": 1, "tag": 1, "prune": 1, "stranger": 2, "comeback": 1}
_PATIENCE = partial(RetryTimeouts, 4.0, 0.02, 0.1)
_WATCH_SECS = 0.3
_SMALL, _LARGE = 40_000, 1_500_000


class BrokenError(AssertionError):
    """A promise was not kept."""


class _MixedError(Exception):
    """What the job holds is not of one epoch; found in the middle of a run."""


class _Manager(MultiNodeCheckpointManager):
    """Record what was acknowledged; a handler would decide where a run resumes."""

    acknowledged: Callable[[int], None]

    def write_checkpoint_metadata(self, epoch: int) -> None:
        self.acknowledged(epoch)


@dataclass
class Known:
    """The dictionary: `ran` has the stamps with which epochs ever ended, `saved` those that must be there."""

    ran: dict[int, list[int]] = field(default_factory=lambda: {0: [0]})
    saved: dict[int, int] = field(default_factory=dict)
    tagged: set[int] = field(default_factory=set)
    stamp: int = 0
    acknowledged: int = 0

    def acknowledge(self, epoch: int) -> None:
        """The epoch is saved, as it ran last."""
        self.saved[epoch] = self.ran[epoch][-1]
        self.acknowledged += 1

    def let_go(self, keep: int, reached: int) -> None:
        """Retention may have taken all but the last `keep` up to an epoch, and what is tagged."""
        kept = {e: s for e, s in self.saved.items() if e > reached - keep or e in self.tagged}
        self.saved = kept

    def leave(self, base: int) -> None:
        """What came after a base is abandoned."""
        self.saved = {epoch: stamp for epoch, stamp in self.saved.items() if epoch <= base}
        self.tagged = {epoch for epoch in self.tagged if epoch <= base}


@dataclass
class World:
    """One place in a store, with what is known of it. `story` is what happened, for people."""

    seed: str
    url: str
    proxy: Proxy
    calls: int = CALLS
    dice: random.Random = field(init=False)
    known: Known = field(default_factory=Known)
    striking: Striking = field(default_factory=Striking)
    story: list[str] = field(default_factory=list)
    ended: Counter[str] = field(default_factory=Counter)
    stranger: LogWriter | None = None
    longest_secs: float = 0.0

    def __post_init__(self) -> None:
        self.dice = random.Random(self.seed)
        self.eye = _patient(self.url)
        self.floats = _LARGE if self.dice.random() < 0.2 else _SMALL

    def play(self) -> None:
        """All calls. Raises BrokenError with the story."""
        self.proxy.schedule = self.striking
        fired = self.proxy.fired.total()
        try:
            for number in range(self.calls):
                self._call(number)
            self._look_at_everything()
            if (struck := self.proxy.fired.total() - fired) < self.striking.dealt:
                raise BrokenError(f"{self.striking.dealt} faults were dealt, {struck} fired")
        except BrokenError as error:
            raise BrokenError("\n".join([f"world {self.seed}: {error}", *self.story])) from error
        finally:
            self.striking.begin({})
            if self.stranger is not None:
                self.stranger.close()

    def _call(self, number: int) -> None:
        name = self.dice.choices(list(OFTEN), list(OFTEN.values()))[0] if number else "train"
        call = getattr(self, f"_{name}")(number)
        faults = drawn(self.dice, MOST)
        self.story.append(f"  {number} {call[0]}; faults {told(faults)}")
        before, begun = self._view(), time.monotonic()
        self.striking.begin(faults)
        printed = io.StringIO()
        try:
            with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
                end = call[1]() or "done"
        except RelayError as error:
            end = f"{type(error).__name__}: {error}"
            if _mixed(error):
                raise BrokenError(f"a run held a mixture: {end}") from error
        except BrokenError:
            raise
        except Exception as error:
            raise BrokenError(f"an error of no family: {error!r}") from error
        finally:
            self.striking.begin({})
        took = time.monotonic() - begun
        self.longest_secs = max(self.longest_secs, took)
        self.ended[end.partition(":")[0]] += 1
        self.story[-1] += f" -> {end} ({took:.1f} s)"
        if took > BOUND_SECS:
            raise BrokenError(f"the call took {took:.0f} s")
        self._look(before)

    # Calls: what they are in words, and what does it

    def _train(self, number: int, base: int | None = None) -> tuple[str, Callable[[], str | None]]:
        epochs = max([base or 0, *self.known.saved]) if base is None else base
        until = epochs + self.dice.randint(1, 3)
        options: dict[str, Any] = {
            "asynchronous": self.dice.random() < 0.3,
            "reuse": self.dice.choice((True, False, None)),
            "keep_last": self.dice.choice((None, None, None, 2, 3)),
        }
        words = f"train to {until}" + (f" from {base}" if base is not None else "")
        said = ", ".join(f"{name}={value}" for name, value in options.items() if value is not None)
        return f"{words} ({said})", lambda: self._trained(until, base, options)

    def _rewind(self, number: int) -> tuple[str, Callable[[], str | None]]:
        return self._train(number, self.dice.choice(sorted(self.known.saved) or [None]))

    def _trained(self, until: int, base: int | None, options: dict[str, Any]) -> str | None:
        manager = _Manager(self.url, takeover_secs=_WATCH_SECS, **options)
        manager.acknowledged = self.known.acknowledge
        reached = max([0, *self.known.saved])
        try:
            runner = JobRunner(_job(self.known, until, self.floats), manager, resume=self._resume())
            with LocalSession() as session, warnings.catch_warnings():
                warnings.simplefilter("ignore")
                run = runner.train(session, base)
        finally:
            if options["keep_last"] is not None:
                self.known.let_go(options["keep_last"], max(reached, until))
        return f"reached {int(run)}"

    def _resume(self) -> Any:
        """Return `resume`: a bare manager starts over unless it is asked to resume what was saved."""
        return "must" if self.known.saved else "auto"

    def _load(self, number: int) -> tuple[str, Callable[[], str | None]]:
        epoch = self.dice.choice([None, *sorted(self.known.saved)])
        return f"load {'the newest' if epoch is None else epoch}", lambda: str(self._loaded(epoch))

    def _loaded(self, epoch: int | None) -> str:
        opened = open_checkpoint(self.url) if epoch is None else open_checkpoint(self.url, epoch)
        if opened.epoch < max([0, *self.known.saved] if epoch is None else [epoch]):
            raise BrokenError(f"{opened.epoch} was opened for {epoch or 'the newest'}, of {self.known.saved}")
        return f"found {self._stamp_of(opened)}"

    def _verify(self, number: int) -> tuple[str, Callable[[], str | None]]:
        return "verify", lambda: self._typed("verify", self.url, "--level", "full")

    def _tag(self, number: int) -> tuple[str, Callable[[], str | None]]:
        epoch = max([0, *self.known.saved])

        def tag() -> str:
            said = self._typed("ckpt", "tag", f"{self.url}@{epoch}", f"name{number}")
            if said == "exit 0":
                self.known.tagged.add(epoch)
            return said

        return f"tag {epoch}", tag

    def _prune(self, number: int) -> tuple[str, Callable[[], str | None]]:
        if self.stranger is not None:  # who is watched for 15 s there
            return self._load(number)
        keep = self.dice.randint(1, 3)

        def prune() -> str:
            self.known.let_go(keep, max([0, *self.known.saved]))
            return self._typed("ckpt", "prune", self.url, "--keep-last", str(keep))

        return f"prune to {keep}", prune

    def _typed(self, *words: str) -> str:
        """A command of people; its exit code is one of the family's, and it calls nothing damaged."""
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
            code = main(list(words))
        if code not in (0, 2, 3, 4, 5) or "Traceback" in printed.getvalue():
            raise BrokenError(f"{words[0]} ended with {code}: {printed.getvalue()}")
        if "  damaged" in printed.getvalue():
            raise BrokenError(f"{words[0]} calls damaged what is whole: {printed.getvalue()}")
        return f"exit {code}"

    def _stranger(self, number: int) -> tuple[str, Callable[[], str | None]]:
        return "a stranger takes the log over and is frozen", self._taken_by_a_stranger

    def _taken_by_a_stranger(self) -> None:
        """A process of another host: no process can see whether it is gone, and its counter stands still."""
        here = WriterIdentity.here("trial")
        there = replace(here, host="elsewhere", boot_id="elsewhere", pid_start=f"{self.dice.random()}")
        writer = LogWriter.take(
            storage_of(self.url, "the place"), "trial", there, patience_secs=_WATCH_SECS, period_secs=9999.0
        )
        log_writer._LIVE.pop(writer.nonce, None)  # it is no writer of this process
        if self.stranger is not None:
            self.stranger.close()
        self.stranger = writer

    def _comeback(self, number: int) -> tuple[str, Callable[[], str | None]]:
        if self.stranger is None:
            return self._load(number)
        return "the stranger wakes up and lets the log go", self._stranger_back

    def _stranger_back(self) -> str:
        stranger, self.stranger = self.stranger, None
        assert stranger is not None
        view = self._view()
        overtaken = view is not None and view.generation > stranger.generation
        try:
            stranger.release()
        except FencedError:
            if not overtaken:
                raise BrokenError("a writer that was not overtaken got FencedError") from None
            return "fenced"
        if overtaken:
            raise BrokenError("a writer that was overtaken wrote a record")
        return "released"

    @contextlib.contextmanager
    def _unstruck(self) -> Iterator[None]:
        """Nothing happens to requests within."""
        self.proxy.schedule = lambda asked: ""
        try:
            yield
        finally:
            self.proxy.schedule = self.striking

    def _view(self) -> LogView | None:
        """The log as it is; None where nothing was begun."""
        with self._unstruck():
            return open_log(self.eye) if self.eye.stat(JOB_FILE) is not None else None

    def _look(self, before: LogView | None) -> None:
        """Judge what the log says after a call."""
        view = self._view()
        if view is None:
            if self.known.saved:
                raise BrokenError("the log is gone")
            return
        if view.notices or any(not entry.healthy for entry in view.entries):
            raise BrokenError(f"something whole was called damaged: {view.notices}, {view.entries}")
        if before is not None and view.current.id != before.current.id:
            base = view.current.base
            self.known.leave(-1 if base is None else base.epoch)
        if missing := set(self.known.saved) - set(view.epochs()):
            raise BrokenError(f"acknowledged epochs {sorted(missing)} are gone; there are {view.epochs()}")

    def _look_at_everything(self) -> None:
        """Load all epochs with a client that met no fault."""
        view = self._view()
        with self._unstruck():
            fresh = _patient(self.url)
            for epoch in view.epochs() if view is not None else ():
                try:
                    self._stamp_of(open_checkpoint(fresh, epoch))
                except RelayError as error:
                    raise BrokenError(f"epoch {epoch} does not load: {error}") from error

    def _stamp_of(self, opened: Any) -> int:
        """The one stamp that all blobs of an epoch bear, which must be one that it may have."""
        found = opened.load_tensors(("w", "model.weight", "frozen"))
        stamp = int(opened.value("n"))
        whole = (
            torch.equal(found["w"], _filled(self.floats, stamp))
            and torch.equal(found["model.weight"], torch.full((4, 4), float(stamp)))
            and torch.equal(found["frozen"], torch.arange(20_000.0))
        )
        if not whole:
            raise BrokenError(f"epoch {opened.epoch} is a mixture: {stamp}, {found}")
        saved = self.known.saved.get(opened.epoch)
        may = self.known.ran.get(opened.epoch, []) if saved is None else [saved]
        if stamp not in may:
            raise BrokenError(f"epoch {opened.epoch} bears {stamp}, saved was one of {may}")
        return stamp


def _patient(url: str) -> Any:
    """The storage of who looks on: that waits for a busy machine as long as users do."""
    found = storage_of(url, "the place")
    found.patience = RetryTimeouts()
    return found


def _filled(floats: int, stamp: int) -> torch.Tensor:
    return torch.arange(float(floats)) + stamp


def _mixed(error: BaseException | None) -> bool:
    return error is not None and (
        isinstance(error, _MixedError) or _mixed(error.__cause__ or error.__context__)
    )


def _job(known: Known, until: int, floats: int) -> Job:
    """Each epoch checks that all its values are those of the previous epoch, and gives them a new stamp."""
    w, model = _filled(floats, 0), torch.nn.Linear(4, 4)
    torch.nn.init.zeros_(model.weight)
    job = Job("trial", blobs={"w": w, "model": model, "frozen": torch.arange(20_000.0), "n": 0})

    @job.epoch
    def train(ctx: Any) -> None:
        before, may = int(ctx["n"]), known.ran[ctx.epoch - 1]
        saved = known.saved.get(ctx.epoch - 1)
        may = may if saved is None else [saved, may[-1]]
        if (
            before not in may
            or w[0] != before
            or w[-1] != floats - 1 + before
            or model.weight[0, 0] != before
        ):
            raise _MixedError(f"epoch {ctx.epoch - 1}: {before} of {may}, {w[0]}, {model.weight[0, 0]}")
        known.stamp += 1
        known.ran.setdefault(ctx.epoch, []).append(known.stamp)
        ctx["n"] = known.stamp
        ctx.before_mutation()
        with torch.no_grad():
            w.copy_(_filled(floats, known.stamp))
            model.weight.fill_(float(known.stamp))

    job.stop_when(max_epochs(until))
    return job


@contextlib.contextmanager
def impatient() -> Iterator[None]:
    """Calls into stores time out after seconds, and files of a megabyte are uploaded in parts."""
    with (
        patch.object(object_store, "RetryTimeouts", _PATIENCE),
        patch.object(object_store, "PUT_IN_ONE_BYTES", 1 << 20),
        patch.object(object_store, "PART_BYTES", 5 << 20),
    ):
        yield
