"""The process from which trials are forked: everything is imported once, a trial then costs milliseconds.

It runs under the preloaded library and starts no threads. Orders come as lines of JSON on stdin; for each it
says `{"started": pid}` and, when that child has ended, how. A child follows its plan from the moment it calls
the order's function, and never sees what was imported before it strike.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import importlib.util
import inspect
import json
import os
import select
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from torchrelay.errors import UsageError
from torchrelay.metadata.code.capture import surroundings
from torchrelay.records import make_initializers

_known: dict[str, Callable[..., Any]] = {}


def function_of(text: str) -> Callable[..., Any]:
    """The function of a name; kept, so that a file is run once in a process."""
    if text not in _known:
        where, _, name = text.rpartition(":")
        _known[text] = getattr(_module(where), name)
    return _known[text]


def name_of(function: Callable[..., Any]) -> str:
    """The name by which a fresh process finds a function; UsageError for one inside of another."""
    file = inspect.getsourcefile(function)
    name = getattr(function, "__qualname__", "")
    if file is None or not name.isidentifier():
        raise UsageError(f"{function!r:.80} must stand at the top of a file: a fresh process calls it")
    return f"{Path(file).resolve()}:{name}"


def on_path(function: str, root: str) -> object:
    """Call a function with a directory."""
    return function_of(function)(Path(root))


def _module(where: str) -> Any:
    if not where.endswith(".py"):
        return importlib.import_module(where)
    name = f"_chaos_{Path(where).stem}"
    spec = importlib.util.spec_from_file_location(name, where)
    if spec is None or spec.loader is None:
        raise UsageError(f"{where} is not a program")
    sys.path.insert(0, str(Path(where).parent))
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def main() -> None:
    """Serve until stdin ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what tested code prints is no answer
    for line in sys.stdin:
        order = json.loads(line)
        try:
            function = function_of(order["function"])
            for name in order.get("ahead", ()):
                function_of(name)
            for name in order.get("modules", ()):
                with suppress(Exception):  # some are made by others and cannot be imported by name
                    importlib.import_module(name)
        except Exception as error:
            _answer(answers, raised=type(error).__name__, text=str(error), trace=traceback.format_exc())
            continue
        if order.get("modules"):
            make_initializers()
            surroundings()  # it remembers what it found, and so do the children
            gc.collect()
            gc.freeze()  # what was imported is never looked through again, so its pages stay shared
        _carry_out(order, function, answers)


def _carry_out(order: dict[str, Any], function: Callable[..., Any], answers: Any) -> None:
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reading)
        answers.close()
        _be_child(order, function, writing)
    os.close(writing)
    _answer(answers, started=pid)
    said, late = _hear(reading, time.monotonic() + order["limit"])
    os.close(reading)
    if late:
        os.kill(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    _answer(answers, code=os.waitstatus_to_exitcode(status), late=late, **_parsed(said))


def _hear(descriptor: int, until: float) -> tuple[bytes, bool]:
    """What the child says until it closes the pipe, and whether it took too long."""
    said = b""
    while (left := until - time.monotonic()) > 0:
        if select.select([descriptor], [], [], left)[0]:
            data = os.read(descriptor, 1 << 16)
            if not data:
                return said, False
            said += data
    return said, True


def _parsed(said: bytes) -> dict[str, Any]:
    try:
        found = json.loads(said)
    except ValueError:  # killed before or while it spoke
        return {}
    return found if isinstance(found, dict) else {}


def _be_child(order: dict[str, Any], function: Callable[..., Any], writing: int) -> None:
    code = 1
    try:
        if order.get("quiet", True):
            nothing = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nothing, 1)
            os.dup2(nothing, 2)
            os.close(nothing)
        os.environ.update(order.get("environment", {}))
        said = _call(function, order)
        data = json.dumps(said, default=str).encode()
        while data:
            data = data[os.write(writing, data) :]
        code = 0
    finally:
        os._exit(code)


def _call(function: Callable[..., Any], order: dict[str, Any]) -> dict[str, Any]:
    follow(order.get("plan"))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            value = function(**order.get("arguments", {}))
    except BaseException as error:
        follow(None)
        return {"raised": type(error).__name__, "text": str(error), "trace": traceback.format_exc()}
    follow(None)
    return {"value": value, "modules": sorted(sys.modules) if order.get("tell_modules") else []}


def follow(plan: str | None) -> None:
    """Follow a plan from now on, or none."""
    if os.environ.get("LD_PRELOAD"):
        failed = ctypes.CDLL(None).torchrelay_chaos_plan((plan or "").encode())
        if failed:
            raise OSError(failed, f"the plan {plan} cannot be followed: {os.strerror(failed)}")


def _answer(answers: Any, **said: Any) -> None:
    answers.write(json.dumps(said) + "\n")
    answers.flush()


if __name__ == "__main__":
    main()
