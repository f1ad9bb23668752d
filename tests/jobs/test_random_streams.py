"""Random states: taken without a trace, put back bitwise, stored portably, derived apart."""

import json
import random
import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from torchrelay.errors import FormatError, UsageError
from torchrelay.jobs.random import RandomStreams, current_seed, seed

DERIVED_0_1 = (0.7426998693848087, 0.967198657029289, 0.11541747150667991)


@pytest.fixture(autouse=True)
def own_streams():
    """Leave the streams of the test process as they were."""
    before = RandomStreams.capture()
    yield
    before.restore()


def draw() -> tuple:
    """Move every stream, the cached second halves of normal pairs included."""
    return (
        random.random(),
        random.gauss(0, 1),
        np.random.rand(3).tolist(),
        float(np.random.standard_normal()),
        torch.rand(3).tolist(),
        torch.randn(1).tolist(),
    )


@settings(deadline=None, max_examples=20)
@given(st.integers(0, 5))
def test_restored_streams_continue_bitwise(draws):
    """Streams that were captured, encoded, decoded and restored continue with the same bits."""
    for _ in range(draws):
        draw()
    coded = RandomStreams.capture().encode()
    expected = [draw() for _ in range(3)]
    RandomStreams.decode(coded).restore()
    assert [draw() for _ in range(3)] == expected


def test_capture_moves_nothing():
    """Capturing leaves all streams where they are."""
    seed(5)
    expected = draw()
    seed(5)
    first, second = RandomStreams.capture(), RandomStreams.capture()
    assert first == second
    assert draw() == expected


def test_encoded_keys_and_canonical_json():
    """The stored form has the documented keys, and Python's and numpy's states are canonical JSON."""
    coded = RandomStreams.capture().encode()
    assert set(coded) - {key for key in coded if key.startswith("cuda.")} == {"python", "numpy", "torch"}
    for key in ("python", "numpy"):
        value = json.loads(coded[key])
        assert json.dumps(value, sort_keys=True, separators=(",", ":")).encode() == coded[key].rstrip(b" ")


def test_decode_refuses_what_it_does_not_know():
    """A missing stream, an unknown stream and bytes that are no state are told apart by name."""
    coded = RandomStreams.derive(0, 0).encode()
    with pytest.raises(FormatError, match="'torch'"):
        RandomStreams.decode({key: value for key, value in coded.items() if key != "torch"})
    with pytest.raises(FormatError, match="quantum"):
        RandomStreams.decode({**coded, "quantum": b""})
    with pytest.raises(FormatError, match="python"):
        RandomStreams.decode({**coded, "python": b"{}"})
    with pytest.raises(FormatError, match=r"cuda\.0"):
        RandomStreams.decode({"python": coded["python"], "torch": coded["torch"], "cuda.1": b"x"})


def test_another_numpy_generator_comes_back():
    """The global state of numpy survives also when another bit generator is behind it."""
    before = np.random.get_bit_generator()
    try:
        np.random.set_bit_generator(np.random.PCG64(7))
        np.random.rand()
        streams = RandomStreams.decode(RandomStreams.capture().encode())
        expected = np.random.rand(4).tolist()
        np.random.set_bit_generator(np.random.MT19937(1))
        streams.restore()
        assert np.random.rand(4).tolist() == expected
    finally:
        np.random.set_bit_generator(before)


def test_numpy_is_not_imported_by_capturing_and_is_by_restoring():
    """Without numpy loaded there is no numpy stream; restoring one loads numpy for it."""
    program = """
import sys
from torchrelay.jobs.random import RandomStreams, _numpy_state
before = sys.modules.pop("numpy", None)
assert _numpy_state() is None
assert "numpy" not in sys.modules
sys.modules.update({"numpy": before} if before else {})
streams = RandomStreams.derive(3, 1)
streams.restore()
import numpy
first = numpy.random.rand()
streams.restore()
assert numpy.random.rand() == first
print("ok")
"""
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert run.stdout == "ok\n", run.stderr


def test_derived_streams_are_pure_and_apart():
    """Deriving depends on nothing but (seed, rank, epoch), and differs for each of them and each library."""
    seen = set()
    for arguments in [(0, 0, 0), (0, 1, 0), (0, 0, 1), (1, 0, 0)]:
        streams = RandomStreams.derive(*arguments)
        random.random()
        torch.rand(1)
        assert RandomStreams.derive(*arguments) == streams
        streams.restore()
        assert RandomStreams.capture().python == streams.python
        seen |= {random.random(), float(np.random.random_sample()), torch.rand(1, dtype=torch.float64).item()}
    assert len(seen) == 12


def test_derived_streams_are_the_same_for_ever():
    """Golden values: what a new rank draws first must not change between versions."""
    RandomStreams.derive(0, 1).restore()
    assert (
        random.random(),
        float(np.random.rand()),
        torch.rand(1, dtype=torch.float64).item(),
    ) == DERIVED_0_1


def test_deriving_moves_nothing():
    """Deriving streams leaves the process's own where they are."""
    before = RandomStreams.capture()
    RandomStreams.derive(1, 2, 3)
    assert RandomStreams.capture() == before


def test_seed_makes_construction_alike():
    """After `seed(s)` all streams draw the same, as the libraries' own seeding does, and s is remembered."""
    seed(11)
    first = draw()
    seed(11)
    assert draw() == first
    seed(11)
    assert current_seed() == 11
    weights = torch.nn.Linear(3, 2).weight
    torch.manual_seed(11)
    assert torch.equal(weights, torch.nn.Linear(3, 2).weight)


@pytest.mark.parametrize("bad", [-1, 2**64, 1.0, True, "0", None])
def test_bad_seeds_are_refused(bad):
    """What cannot be a seed is refused with the range that can."""
    with pytest.raises(UsageError, match=r"0 to 2\*\*64"):
        seed(bad)


def test_every_state_is_as_long_as_any_other() -> None:
    """However many digits its words have: a save after other draws has leaves of the same shapes."""
    found = [RandomStreams.derive(seed, rank=0) for seed in range(200)]
    assert len({(len(one.python), len(one.numpy or b"")) for one in found}) == 1
    for one in found[:3]:
        assert RandomStreams.decode(one.encode()) == one
