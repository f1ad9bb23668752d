"""One built-in run for all chaos tests: its processes take seconds to become warm."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from torchrelay.chaos.builtin import BuiltIn, Wish, built_in

SEED = 4


@pytest.fixture(scope="session")
def target() -> Iterator[BuiltIn]:
    """The built-in run, its processes warm when they are first needed."""
    with built_in(Wish(seed=SEED)) as made:
        yield made
