"""The errors that torchrelay raises.

docs/errors.md is made of these docstrings: first line, `Cause`, `Message` and `Remedy`.

    RelayError                     exit code 1
    ├─ UsageError (ValueError)     2   an invalid argument, name, job or config
    │  ├─ BlobError (TypeError)    2   a blob that cannot be stored
    │  ├─ UnknownEpochError (LookupError)  2   a requested epoch that is not committed
    │  ├─ MissingMetricError (KeyError)    2   a metric that no epoch has logged yet
    │  └─ NotAllowedNowError       2   a call at the wrong moment of a job's life
    ├─ NoProvableEpochError        3   commits exist, none of them can be verified
    ├─ DirectoryInUseError         4   another running job writes here
    │  └─ FencedError              4   another job took the directory over
    ├─ StorageError (OSError)      5   reading or writing failed
    │  ├─ DamagedError             5   stored bytes are not the committed ones
    │  ├─ LostDirectoryError       5   the directory that was written to is gone
    │  ├─ FormatError              5   written by a version that this one cannot read
    │  └─ SaveFailedError          5   an epoch could not be saved
    │     └─ ChangedAfterAllError  5   internal: the save is repeated
    ├─ PartiallyLoadedError        5   a load failed after user objects had changed
    ├─ PeerError                   6   another process of the job is lost or disagrees
    │  └─ DeadlineError (TimeoutError)  6   a wait for other processes timed out
    ├─ TaskFailedError             1   a task or loop body of the user raised
    ├─ PreemptedError              75  stopped early as asked; run the same command again
    └─ NoProgressError             93  several launches in a row committed nothing

A message names the thing, the place and the remedy. This module imports no other of torchrelay, so that
every package and the command line may use it.
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from types import TracebackType


class RelayError(Exception):
    """Base of all errors of torchrelay.

    Attributes:
        exit_code: The exit code of a process that this error ends.
        of_rank: The rank that had the error, if another rank raises it too; else None.
        consequence: Whether the failure of another process looks like the cause, as for a broken connection.
    """

    exit_code = 1
    of_rank: int | None = None
    consequence = False


class UsageError(RelayError, ValueError):
    """An invalid argument, name, job or configuration, found before anything was changed.

    - Cause: A misspelt option, two blobs with one name, a value of the wrong type, or an unknown key in a
      YAML file.
    - Message: two blobs have the name ...: rename one of them
    - Remedy: Change what the message names; the files on disk are as before.
    """

    exit_code = 2


class BlobError(UsageError, TypeError):
    """A blob that cannot be stored; the message names it and the path inside the object.

    - Cause: An object without `state_dict`, such as a date, an open file or an instance of your own class.
    - Message: ..., which cannot be stored: use tensors, numbers, text, bytes or containers of these, or an
      object with state_dict
    - Remedy: Give its class `state_dict` and `load_state_dict`, or declare the blob with
      `scope="transient"`.
    """


class UnknownEpochError(UsageError, LookupError):
    """A requested epoch is not among the committed ones.

    - Cause: The number is wrong, retention has deleted the epoch, or the path holds another run.
    - Message: no committed epochs in ...
    - Remedy: List the epochs with `torchrelay ls RUN` and choose one.
    """


class MissingMetricError(UsageError, KeyError):
    """A metric that no epoch of the run has logged yet; `name` is the metric.

    - Cause: A stop condition, `best` or `run.metric` names a metric that is misspelt or logged later.
    - Message: no metric ... was reduced yet; there are: ...
    - Remedy: Use one of the listed names, or log the metric before it is read.
    """

    def __init__(self, message: str, name: str = "") -> None:
        super().__init__(message)
        self.name = name

    def __str__(self) -> str:
        return Exception.__str__(self)  # KeyError would quote the message


class NotAllowedNowError(UsageError):
    """A valid call at the wrong moment of the life of a job.

    - Cause: A task is added to a job that has run, or `Run` is used outside its `with` block.
    - Message: group ... has already run, so ... cannot be added: declare it before the job runs
    - Remedy: Move the call to the moment that the message names.
    """


class NoProvableEpochError(RelayError):
    """Commits exist, but none of them can be verified; a fresh start would hide that.

    - Cause: Files of the checkpoints were damaged, deleted or not mounted.
    - Message: no epoch in ... can be verified (...): restore the files from a copy
    - Remedy: Restore the files from a copy; `torchrelay ckpt why RUN` says what is wrong with each epoch.
    """

    exit_code = 3


class DirectoryInUseError(RelayError):
    """Another running job holds the directory; the message names it.

    - Cause: The same command was launched twice, or an earlier launch has not ended yet.
    - Message: ... is in use by ...
    - Remedy: Wait for the other job, or stop it.
    """

    exit_code = 4


class FencedError(DirectoryInUseError):
    """Another job took the directory over; this one stopped and committed nothing since.

    - Cause: This job was suspended or cut off from its storage for longer than `takeover_secs`.
    - Message: ... was taken over by ...
    - Remedy: None is needed for this process: the other job continues the run.
    """


class StorageError(RelayError, OSError):
    """Reading or writing failed; the message has the path and the reason of the system.

    - Cause: A full disk, missing permissions, or a network share or store that does not answer.
    - Message: cannot write ...: ...; fix the storage
    - Remedy: Fix the storage, then run the same command again; it resumes from the newest epoch.
    """

    exit_code = 5


class DamagedError(StorageError):
    """Stored bytes are not the bytes that were committed.

    - Cause: A faulty disk or copy, or a program that changed files of the run.
    - Message: ...: the header of ... is cut off
    - Remedy: Run `torchrelay ckpt repair RUN`; without `epoch=`, a resume takes the newest undamaged epoch.
    """


class MissingShardError(DamagedError):
    """A file of a committed epoch does not exist.

    - Cause: Files were deleted below `checkpoints/`, or copied the run in part.
    - Message: ... is missing
    - Remedy: Restore the file from a copy, or resume from another epoch.
    """


class FormatError(StorageError):
    """A file was written by a version, or with a feature, that this version does not read.

    - Cause: The run was written by a newer version of torchrelay.
    - Message: ...: a newer version of torchrelay wrote it
    - Remedy: Install the version that wrote the run, or a newer one.
    """


class LostDirectoryError(StorageError):
    """The directory that a job wrote to is gone or was replaced; nothing was written there.

    - Cause: The run directory was deleted, renamed or unmounted while the job ran.
    - Message: ... is gone...
    - Remedy: Bring the directory back and run the same command again.
    """


class SaveFailedError(StorageError):
    """An epoch could not be saved; the epochs before it are untouched.

    - Cause: A full disk, replicas that differ between ranks, or an object that changed while it was copied.
    - Message: ... is replicated, but it is ... on ... and ... on ...: make it equal on all ranks
    - Remedy: Fix what the message names; the next save tries again.
    """


class ChangedAfterAllError(SaveFailedError):
    """Tensors that were assumed unchanged have changed; the save is repeated with all compared."""


class PartiallyLoadedError(RelayError):
    """A load failed after some of the objects had changed; they must be loaded again.

    - Cause: A file became unreadable during the load, or an object's own `load_state_dict` raised.
    - Message: loading epoch ... failed after objects had changed: ...; load another epoch before you use
      them
    - Remedy: Load another epoch into the same objects before you use them.
    """

    exit_code = 5


class PeerError(RelayError):
    """Another process of the job is lost, late, or disagrees about what to do.

    - Cause: A rank was killed, or ranks run different code or options.
    - Message: the torchrun that started this rank is gone: restart the job
    - Remedy: Look for the first failure in the logs of the other ranks; then run the same command again.
    """

    exit_code = 6


class DeadlineError(PeerError, TimeoutError):
    """A wait for other processes timed out; the message names who is late.

    - Cause: A rank did not start, hangs, or cannot reach the port of rank 0.
    - Message: waited ... s for all ... ranks to start; missing: ...
    - Remedy: Check the ranks that the message names.
    """


class TaskFailedError(RelayError):
    """A task, or the body of a loop over epochs, raised; `__cause__` is the exception on its own rank.

    - Cause: An error in the program; the message has its text, the task and the rank.
    - Message: ... failed on ...: ...
    - Remedy: Fix the program, then run the same command again; it resumes from the newest epoch.

    `details` is the user's part of the traceback as text; empty where another process failed. What `train`
    raises is also of the class of that exception, with its attributes: `except ValueError` catches it.
    """

    details = ""

    def also_of_its_cause(self) -> TaskFailedError:
        """Return an error that is also an instance of its cause's class; itself if that is not possible."""
        cause = self.__cause__
        if not isinstance(cause, Exception) or isinstance(self, type(cause)):
            return self
        if isinstance(cause, (StopIteration, StopAsyncIteration)):  # these have a special meaning to callers
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
        except TypeError:  # the classes cannot be combined, or need other arguments
            return self
        both.args = self.args
        both.__dict__.update({**cause.__dict__, **self.__dict__})
        both.__cause__, both.__traceback__ = cause, self.__traceback__
        return both


class PreemptedError(RelayError):
    """The run stopped early as asked; the same command continues it.

    - Cause: SIGTERM, SIGUSR1, a time limit, or the end of a Slurm allocation.
    - Remedy: Run the same command again; under `torchrelay launch` on Slurm the job is queued again by
      itself.
    """

    exit_code = 75


class LeftByInterrupt(KeyboardInterrupt):
    """Ctrl-C stopped a run; the step was saved if the run can resume there.

    - Cause: Ctrl-C in the terminal of the run.
    - Remedy: Run the same command again; it resumes at the newest saved position.
    """

    exit_code = PreemptedError.exit_code


class NoProgressError(RelayError):
    """Several launches in a row committed nothing new; another one would not help.

    - Cause: The program fails at the same step each time, for example because memory is too small.
    - Remedy: Find the cause with `torchrelay show RUN`, fix it, and run with `--max-attempts 0` once.
    """

    exit_code = 93


def exit_code_of(error: BaseException) -> int:
    """Return the exit code of a process that ends with this error; 130 after Ctrl-C, as in a shell."""
    if isinstance(error, (RelayError, LeftByInterrupt)):
        return error.exit_code
    return 130 if isinstance(error, KeyboardInterrupt) else 1


_installed = False


def install_excepthook() -> None:
    """Let an uncaught error of torchrelay end a script with one sentence and the error's exit code; once.

    If the program had its own hook, that hook prints the error. Interactive interpreters do not exit.
    """
    global _installed
    if _installed:
        return
    _installed, previous = True, sys.excepthook
    is_usual = previous is sys.__excepthook__ or previous.__module__.startswith("torch")

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if not isinstance(error, (RelayError, LeftByInterrupt)) or hasattr(sys, "ps1") or sys.flags.inspect:
            previous(kind, error, trace)
            return
        code = error.exit_code
        if is_usual:
            code = import_module("torchrelay.runners.training.exit").report_uncaught(error)
        else:
            previous(kind, error, trace)
        raise SystemExit(code)  # Python exits with the code that its hook raises

    sys.excepthook = hook


PACKAGES: dict[str, tuple[str, ...]] = {
    "accelerate": ("accelerate>=1.15",),
    "azure": ("adlfs>=2026.8",),
    "gcs": ("gcsfs>=2026.9",),
    "inspect": ("numpy",),
    "lightning": ("lightning>=2.6",),
    "mlflow": ("mlflow-skinny", "sqlalchemy", "alembic"),
    "onnx": ("onnx", "onnxscript", "onnxruntime"),
    "postgresql": ("sqlalchemy>=2.0", "psycopg[binary]>=3.1"),
    "s3": ("s3fs>=2026.9",),
    "serve": ("starlette", "uvicorn", "prometheus-client"),
    "sftp": ("asyncssh>=2.24",),
    "sql": ("sqlalchemy>=2.0",),
    "tensorboard": ("tensorboard",),
    "torchx": ("torchx>=0.7",),
    "transformers": ("accelerate>=1.15", "transformers>=5.24"),
    "wandb": ("wandb",),
}
"""The optional packages of a feature, as pyproject.toml lists them.

torchrelay is not on a package index, so `pip install torchrelay[...]` would not find it. Messages name the
packages instead. That command is right however torchrelay was installed.
"""


def install_command(feature: str) -> str:
    """Return the command that installs what a feature of `PACKAGES` needs.

    Example:
        >>> install_command("s3")
        "pip install 's3fs>=2026.9'"
    """
    import shlex  # imported here: only a missing package needs it

    return f"pip install {shlex.join(PACKAGES[feature])}"
