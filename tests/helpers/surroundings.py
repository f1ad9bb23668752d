"""What clients of a store find in the environment, for a while, in this process too."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import pytest
from fsspec import config


@contextmanager
def surroundings(environment: Mapping[str, str]) -> Iterator[None]:
    """The environment as given, also for fsspec, which reads its part only when it is imported."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment.items():
            patch.setenv(name, value)
        told = {name: dict(options) for name, options in config.conf.items()}
        config.set_conf_env(told, {k: v for k, v in environment.items() if k.startswith("FSSPEC_")})
        patch.setattr(config, "conf", told)
        yield
