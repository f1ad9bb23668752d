"""Profiles of one process leave each other alone: what one changed outside of its run is put back."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def apart() -> Iterator[None]:
    """Put environment, working directory, `sys.path`, random streams, torch's defaults back in the end."""
    import torch

    from torchrelay.jobs.random import RandomStreams

    environ, folder, streams = dict(os.environ), Path.cwd(), RandomStreams.capture()
    paths = list(sys.path)
    dtype, gradients, exact = (
        torch.get_default_dtype(),
        torch.is_grad_enabled(),
        torch.are_deterministic_algorithms_enabled(),
    )
    try:
        yield
    finally:
        _put_back_environment(environ)
        os.chdir(folder)
        sys.path[:] = paths
        torch.set_default_dtype(dtype)
        torch.set_grad_enabled(gradients)
        torch.use_deterministic_algorithms(exact)
        streams.restore()


def _put_back_environment(before: dict[str, str]) -> None:
    for name in set(os.environ) - set(before):
        del os.environ[name]
    for name, value in before.items():
        if os.environ.get(name) != value:
            os.environ[name] = value
