"""Readers of unproved bytes are fed with mutants for 4 s each; the fuzzer itself finds what is planted."""

from __future__ import annotations

import json
import multiprocessing
import time
from collections.abc import Callable

import fuzz_mutation
import fuzzing
import pytest
from fuzz_targets import Target, targets
from samples import sample

from torchrelay.errors import DamagedError

SEED = 20261121
SECS = sample(4.0, 20.0)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_only_typed_errors_come_out(tell: Callable[[str], None]) -> None:
    """Of config, log, manifest, shard header and archive: thousands of mutants, and no finding."""
    reports = fuzzing.run(list(targets()), SECS, SEED)
    tell(
        f"fuzzing, seed {SEED}, inputs in {SECS:g} s: "
        + ", ".join(f"{one.name} {one.inputs}" for one in reports)
    )
    assert {one.name for one in reports} == {"config", "log", "manifest", "header", "archive"}
    assert not [finding for one in reports for finding in one.findings]
    for one in reports:
        assert one.accepted > sample(4, 20) and one.refused > sample(200, 1000), one


def _index(data: bytes) -> None:
    """Forgets that a key may be missing."""
    try:
        value = json.loads(data)
    except ValueError as error:
        raise DamagedError(str(error)) from None
    value["a"]["b"]


def _hang(data: bytes) -> None:
    while b"[" in data:
        time.sleep(0.01)


def _swell(data: bytes) -> None:
    """Believes a length."""
    bytearray(int.from_bytes(data[:8], "little") & (1 << 40) - 1)


@pytest.mark.parametrize(
    ("read", "name"), [(_index, "Error"), (_hang, "took more than"), (_swell, "MemoryError")]
)
def test_planted_faults_are_found(read: Callable[[bytes], None], name: str) -> None:
    """A crash, an endless loop and a length that is believed."""
    target = Target("planted", [b'{"a": {"b": 1}}'], read, fuzz_mutation.of_bytes)
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        report = pool.apply(_fuzz, (target,))
    assert report.findings and name in report.findings[0][1]


def _fuzz(target: Target) -> fuzzing.Report:
    return fuzzing.fuzz(target, 3, SEED)
