"""Every error that torchrelay raises, as one family.

    RelayError                     exit code 1
    ├─ UsageError (ValueError)     2   an argument, a name, a job or a config that cannot be
    │  ├─ BlobError (TypeError)    2   a blob that cannot be stored, named with the path inside it
    │  ├─ UnknownEpochError (LookupError)  2   an epoch that was asked for by number and is not there
    │  ├─ MissingMetricError (KeyError)    2   a metric that no epoch has logged yet
    │  └─ NotAllowedNowError       2   a call at the wrong moment of a job's life
    ├─ NoProvableEpochError        3   commits exist, none of them can be proved
    ├─ DirectoryInUseError         4   another living job writes here
    │  └─ FencedError              4   another job took over from us: we stopped without acknowledging
    ├─ StorageError (OSError)      5   reading or writing failed
    │  ├─ DamagedError             5   bytes are not what was committed
    │  ├─ LostDirectoryError       5   the directory that was written to is gone, or another lies there
    │  ├─ FormatError              5   written by a version that this one cannot read
    │  └─ SaveFailedError          5   an epoch could not be saved
    │     └─ ChangedAfterAllError  5   inside of a save, which then goes on otherwise; no user meets it
    ├─ PartiallyLoadedError        5   a load failed after user objects had changed
    ├─ PeerError                   6   another process of the job is gone, late or disagrees
    │  └─ DeadlineError (TimeoutError)  6   a wait ended without the others
    ├─ TaskFailedError             1   a step of the user raised
    ├─ PreemptedError              75  stopped early as asked; run the same command again
    └─ NoProgressError             93  several attempts in a row committed nothing

A message names the thing, the place and the remedy. This module imports nothing, so that every
room and the command line may use it.
"""

from __future__ import annotations


class RelayError(Exception):
    """Base of all errors of torchrelay; `exit_code` is what a process should end with.

    `of_rank` is the rank that had the error where another rank raises it too, else None.
    `consequence` says that another process's failure looks like the cause (a broken connection, say).
    """

    exit_code = 1
    of_rank: int | None = None
    consequence = False


class UsageError(RelayError, ValueError):
    """An argument, name, job or configuration that cannot be; found before anything was changed."""

    exit_code = 2


class BlobError(UsageError, TypeError):
    """A blob that cannot be stored; the message has its name and the path inside the object."""


class UnknownEpochError(UsageError, LookupError):
    """An epoch was asked for explicitly and is not among the committed ones."""


class MissingMetricError(UsageError, KeyError):
    """A metric that no epoch of the run has logged yet; `name` is what it was asked for by."""

    def __init__(self, message: str, name: str = "") -> None:
        super().__init__(message)
        self.name = name

    def __str__(self) -> str:
        return Exception.__str__(self)  # KeyError shows a text in quotes


class NotAllowedNowError(UsageError):
    """A call that is right in itself came at the wrong moment of the job's life."""


class NoProvableEpochError(RelayError):
    """Commits exist and none of them can be proved; a fresh start would hide that."""

    exit_code = 3


class DirectoryInUseError(RelayError):
    """Another living job holds the directory; the message names it."""

    exit_code = 4


class FencedError(DirectoryInUseError):
    """Another job took the directory over; this one stopped and acknowledged nothing since."""


class StorageError(RelayError, OSError):
    """Reading or writing failed; the message has the path and the reason of the system."""

    exit_code = 5


class DamagedError(StorageError):
    """Stored bytes are not the bytes that were committed."""


class MissingShardError(DamagedError):
    """A file of a committed epoch is not there."""


class FormatError(StorageError):
    """A file was written by a version, or with a feature, that this version does not read."""


class LostDirectoryError(StorageError):
    """The directory that a job wrote to is gone, or another lies in its place; nothing was written there."""


class SaveFailedError(StorageError):
    """An epoch could not be saved; the epochs before it are untouched."""


class ChangedAfterAllError(SaveFailedError):
    """Leaves that were presumed unchanged are not; the same save is made again, with all looked at before."""


class PartiallyLoadedError(RelayError):
    """A load failed after some of the user's objects had changed; they must be loaded again."""

    exit_code = 5


class PeerError(RelayError):
    """Another process of the job is lost, late, or disagrees about what to do."""

    exit_code = 6


class DeadlineError(PeerError, TimeoutError):
    """A wait for other processes ended without them; the message names who is late."""


class TaskFailedError(RelayError):
    """A step of the user raised; `__cause__` is the user's exception where it is ours.

    `details` is the user's part of the traceback as text; empty where another process failed. What `train`
    raises is also of the class of that exception, with its attributes: `except ValueError` catches it.
    """

    details = ""

    def also_of_its_cause(self) -> TaskFailedError:
        """Return an error that is also caught by the class of its cause; itself where that cannot be."""
        cause = self.__cause__
        if not isinstance(cause, Exception) or isinstance(self, type(cause)):
            return self
        if isinstance(cause, (StopIteration, StopAsyncIteration)):  # to callers they mean something else
            return self
        native = next(kind for kind in type(cause).__mro__ if kind.__module__ == "builtins")
        names = {
            "__module__": TaskFailedError.__module__,
            "__init__": lambda self, *args: None,
            "__str__": lambda self: str(self.args[0]),
            "__reduce__": lambda self: (TaskFailedError, self.args),
        }
        try:
            kind = type("TaskFailedError", (TaskFailedError, type(cause)), names)
            both: TaskFailedError = native.__new__(kind, *self.args)
        except TypeError:  # a class that cannot be combined, or that is made of more than a text
            return self
        both.args = self.args
        both.__dict__.update({**cause.__dict__, **self.__dict__})
        both.__cause__, both.__traceback__ = cause, self.__traceback__
        return both


class PreemptedError(RelayError):
    """The run stopped early as asked; the same command continues it."""

    exit_code = 75


class LeftByInterrupt(KeyboardInterrupt):
    """Ctrl-C, of a run that has saved its place at a step and left; run the same command again."""

    exit_code = PreemptedError.exit_code


class NoProgressError(RelayError):
    """Several attempts in a row committed nothing new; starting again would not help."""

    exit_code = 93


def exit_code_of(error: BaseException) -> int:
    """What a process that this error ends should end with; 130 after Ctrl-C, as in a shell."""
    if isinstance(error, (RelayError, LeftByInterrupt)):
        return error.exit_code
    return 130 if isinstance(error, KeyboardInterrupt) else 1
