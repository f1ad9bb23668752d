"""What admission takes comes back equal, of the same types; what it does not is refused before a write."""

from __future__ import annotations

import enum
import math
import struct
import tempfile
import threading
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from pathlib import Path
from unittest import mock

import numpy
import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import nn

import torchrelay
from torchrelay import Job, JobRunner, max_epochs, open_checkpoint
from torchrelay.errors import BlobError, RelayError, SaveFailedError

pytestmark = pytest.mark.filterwarnings("ignore:.* encountered in cast:RuntimeWarning")
"""Of numpy, where keys of wide floats are compared with others."""

Pair = namedtuple("Pair", "a b")
Colour = enum.IntEnum("Colour", "RED")


class Number(int):
    """A subclass of a type that is stored."""


class Half(numpy.float16):
    """The same of numpy."""


class Registered:
    """An object whose state is a value."""

    def __init__(self, state=None):
        self.state = state

    def state_dict(self):
        return self.state

    def load_state_dict(self, state):
        self.state = state


NUMPY_TYPES = [numpy.dtype(code) for code in "?bBhHiIlLqQefdgFDG"]
NUMPY_TYPES += [numpy.dtype(text) for text in (">i4", ">f8", "U3", "S3", "M8[ns]", "M8[25us]", "m8[D]")]
TORCH_TYPES = [
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex128, torch.complex64),
    *(torch.complex32, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.uint16),
    *(torch.uint32, torch.uint64, torch.bool, torch.float8_e4m3fn, torch.float8_e5m2),
    *(torch.float8_e8m0fnu, torch.float4_e2m1fn_x2, torch.uint4, torch.int2, torch.bits8, torch.bits16),
]


@st.composite
def arrays(draw):
    """Arrays of every type, of no elements and of no dimension, and views of others."""
    dtype = draw(st.sampled_from(NUMPY_TYPES))
    shape = tuple(draw(st.lists(st.integers(0, 3), max_size=3)))
    data = draw(st.binary(min_size=0, max_size=8)) or b"\0"
    size = math.prod(shape) * dtype.itemsize
    if dtype.kind in "U?":
        found = numpy.resize(numpy.array(["a", "", "\u00e9b"] if dtype.kind == "U" else [True, False]), shape)
        found = found.astype(dtype)
    else:
        found = numpy.ndarray(shape, dtype, bytearray((data * (size // len(data) + 1))[:size]))
    form = draw(st.sampled_from(["as it is", "turned", "read-only"]))
    if form == "read-only":
        found.flags.writeable = False
    return found.T if form == "turned" else found


@st.composite
def tensors(draw):
    """Tensors of every element type and form of memory that are admitted."""
    dtype = draw(st.sampled_from(TORCH_TYPES))
    shape = draw(st.lists(st.integers(0, 3), max_size=3))
    data = draw(st.binary(min_size=1, max_size=8))
    size = math.prod(shape) * dtype.itemsize
    raw = torch.frombuffer(bytearray((data * (size // len(data) + 1))[: size or 1]), dtype=torch.uint8)
    if dtype is torch.bool:
        raw = raw & 1
    found = raw[:size].clone().view(dtype).reshape(shape)
    form = draw(st.sampled_from(["as it is", "turned", "parameter", "conjugate"]))
    if form == "turned" and shape:
        return found.transpose(0, -1)
    if form == "parameter" and (dtype.is_floating_point or dtype.is_complex) and dtype.itemsize > 1:
        return found.requires_grad_()
    return found.conj() if form == "conjugate" and dtype in (torch.complex64, torch.complex128) else found


FLOATS = st.floats() | st.builds(lambda bits: struct.unpack(">d", bits)[0], st.binary(min_size=8, max_size=8))
TEXTS = st.text(st.characters(), max_size=4)
NUMPY_SCALARS = st.builds(lambda array: array.reshape(-1)[0], arrays().filter(lambda array: array.size))
NUMPY_SCALARS |= TEXTS.map(numpy.str_) | st.binary(max_size=3).map(numpy.bytes_)
SCALARS = (
    *(st.none(), st.booleans(), st.integers(), st.integers(2**53 - 2, 2**53 + 2), FLOATS, TEXTS),
    *(st.binary(max_size=4), st.builds(complex, FLOATS, FLOATS)),
)
HASHABLE = st.one_of(
    *SCALARS,
    NUMPY_SCALARS.filter(lambda number: len(repr(number)) < 1000),  # else no name below it can be stored
    st.tuples(TEXTS, FLOATS),
    st.frozensets(st.integers(), max_size=2),
)
LEAVES = st.one_of(
    *SCALARS,
    NUMPY_SCALARS,
    arrays(),
    tensors(),
    st.binary(max_size=4).map(bytearray),
    st.sampled_from([torch.bfloat16, torch.device("cuda:1"), torch.Size([2, 0])]),
    st.lists(st.integers(-(2**63), 2**63 - 1), min_size=9, max_size=12),
    st.lists(FLOATS, min_size=9, max_size=12).map(tuple),
    st.lists(st.integers(), max_size=12),
)


def inside(inner):
    mappings = st.dictionaries(HASHABLE | st.sampled_from(["$", "v", "a.b", "a", "a.0"]), inner, max_size=4)
    return st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.sets(HASHABLE, max_size=4),
        st.frozensets(HASHABLE, max_size=4),
        mappings,
        mappings.map(OrderedDict),
        mappings.map(Counter),
        mappings.map(lambda found: defaultdict(list, found)),
        st.lists(inner, max_size=3).map(lambda found: deque(found, maxlen=7)),
    )


VALUES = st.recursive(LEAVES, inside, max_leaves=8)
REFUSED = st.sampled_from(
    [
        lambda: object(),
        lambda: Pair(1, 2),
        lambda: Colour.RED,
        lambda: Number(3),
        lambda: Half(3),
        lambda: len,
        lambda: threading.Lock(),
        lambda: numpy.array([None]),
        lambda: numpy.zeros(2, [("a", "f4")]),
        lambda: numpy.zeros(2, [("a", "f4")])[0],
        lambda: numpy.ma.array([1.0]),
        lambda: torch.empty(2, device="meta"),
        lambda: torch.eye(2).to_sparse(),
        lambda: {torch.ones(2): 1},
        lambda: {torch.ones(2)},
        lambda: [defaultdict(lambda: 0, a=1)],
        lambda: (yield),
    ]
)


def exactly(value):
    """Something that only an equal value of the same type, with the same bits, is equal to."""
    kind = type(value).__qualname__
    if isinstance(value, torch.Tensor):
        plain = value.detach().resolve_conj()
        if value.dtype.itemsize <= 2:  # torch brings some of these into order only as integers
            plain = plain.view({1: torch.uint8, 2: torch.int16}[value.dtype.itemsize])
        data = bytes(plain.contiguous().reshape(-1).view(torch.uint8).tolist())
        return kind, str(value.dtype), tuple(value.shape), data
    if isinstance(value, numpy.generic | numpy.ndarray):
        text = value if isinstance(value, str | bytes) else ""
        return kind, value.dtype.str, value.dtype.char, value.shape, value.tobytes(), f"{text!s:}", len(text)
    if isinstance(value, float):
        return kind, struct.pack(">d", value)
    if isinstance(value, complex):
        return kind, exactly(value.real), exactly(value.imag)
    if isinstance(value, dict):
        factory = getattr(value, "default_factory", None)
        return kind, factory, tuple((exactly(key), exactly(item)) for key, item in value.items())
    if isinstance(value, set | frozenset):
        return kind, sorted(map(repr, map(exactly, value)))
    if isinstance(value, list | tuple | deque):
        return kind, getattr(value, "maxlen", None), tuple(map(exactly, value))
    return kind, repr(value)


@pytest.fixture(autouse=True)
def small_limit():
    """Arrays and lists of more than 64 bytes are large."""
    with mock.patch("torchrelay.checkpoint.format.values.ARRAY_LIMIT", 64):
        yield


often = settings(deadline=None, suppress_health_check=list(HealthCheck), print_blob=True)


@settings(often, max_examples=60)
@given(st.lists(VALUES, min_size=1, max_size=6))
def test_what_a_file_takes_comes_back_equal(found):
    """Values, and the states of objects, through `save_blobs`, `load_blobs` and `load_into`."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "v.safetensors"
        blobs = {f"v{number}": value for number, value in enumerate(found)}
        torchrelay.save_blobs(path, {**blobs, **{f"o{name}": Registered(one) for name, one in blobs.items()}})
        loaded = torchrelay.load_blobs(path, [*blobs])
        objects = {f"o{name}": Registered() for name in blobs}
        torchrelay.load_into(path, objects)
    for name, value in blobs.items():
        assert exactly(loaded[name]) == exactly(value)
        assert exactly(objects[f"o{name}"].state) == exactly(value)


def empty_like(tensor):
    """A tensor of the same form in memory of its own, all zeros."""
    size = tensor.numel() * tensor.element_size()
    return torch.zeros(size, dtype=torch.uint8).view(tensor.dtype).reshape(tensor.shape)


def run(where, epochs, values, buffers, seen):
    """A job with values of `init`, objects with state, a container of all of them, and a module."""
    objects = {f"o{name}": Registered() for name in values}
    held = dict.fromkeys(values)
    module = nn.Module()
    for number, tensor in enumerate(buffers):
        module.register_buffer(f"b{number}", tensor)
    job = Job("law", blobs={**objects, "held": held, "module": module})

    @job.init
    def begin(ctx):
        for name, value in values.items():
            ctx[name] = objects[f"o{name}"].state = held[name] = value

    @job.epoch
    def look(ctx):
        seen.append([(ctx[name], objects[f"o{name}"].state, held[name]) for name in values])

    job.stop_when(max_epochs(epochs))
    JobRunner(job, where, best=None, code=False).train()


def tensors_in(value, fixed=False):
    """Whether a tensor is where a registered container cannot follow it."""
    if isinstance(value, torch.Tensor):
        return fixed
    items = value.values() if isinstance(value, dict) else value
    if not isinstance(value, dict | list | tuple | deque):
        return False
    return any(tensors_in(item, fixed or isinstance(value, tuple)) for item in items)


@settings(often, max_examples=4, phases=(Phase.reuse, Phase.generate))  # to shrink takes minutes
@given(
    st.lists(VALUES.filter(lambda value: not tensors_in(value)), min_size=6, max_size=12),
    st.lists(tensors(), min_size=6, max_size=12),
)
def test_what_an_epoch_takes_is_resumed_equal(found, buffers):
    """Through an epoch, a resume and `open_checkpoint`; in values, objects, a container and a module."""
    values = {f"v{number}": value for number, value in enumerate(found)}
    with tempfile.TemporaryDirectory() as directory:
        run(directory, 1, values, [one.detach() for one in buffers], [])
        seen = []
        fresh = [*map(empty_like, buffers)]
        run(directory, 2, values, fresh, seen)
        assert [*map(exactly, fresh)] == [exactly(one.detach()) for one in buffers]
        epoch = open_checkpoint(directory)
        objects = {f"o{name}": Registered() for name in values}
        epoch.load(objects)
        wanted = [exactly(value) for value in values.values()]
        for place in range(3):
            assert [exactly(row[place]) for row in seen[0]] == wanted
        assert [exactly(objects[f"o{name}"].state) for name in values] == wanted
        for name, value in values.items():
            if not isinstance(value, torch.Tensor):
                assert exactly(epoch.load_values(name)[name]) == exactly(value)
            else:
                assert exactly(epoch.load_tensors(name)[name]) == exactly(value.detach())


@settings(often, max_examples=60)
@given(
    st.recursive(
        REFUSED.map(lambda make: make()), lambda one: st.lists(one, min_size=1, max_size=1), max_leaves=2
    )
)
def test_what_is_not_admitted_is_refused_before_anything_is_written(value):
    """A file, an object and a run: the error is ours, and no byte of state is on the disk."""
    with tempfile.TemporaryDirectory() as directory:
        for blobs in ({"v": value}, {"o": Registered(value)}, {"good": 1, "v": {"a": [value]}}):
            with pytest.raises(BlobError):
                torchrelay.save_blobs(Path(directory) / "v.safetensors", blobs)
            assert not list(Path(directory).iterdir())


@pytest.mark.parametrize("dtype", [torch.int2, torch.uint4])
def test_integers_of_less_than_a_byte_are_resumed_in_any_order_of_memory(tmp_path, dtype):
    """Torch copies none of them; their bytes are saved, and loaded, all the same."""
    found = torch.arange(6, dtype=torch.uint8).view(dtype).reshape(2, 3).t()
    run(tmp_path, 1, {}, [found], [])
    fresh = torch.zeros(6, dtype=torch.uint8).view(dtype).reshape(2, 3).t()
    run(tmp_path, 2, {}, [fresh], [])
    assert fresh.view(torch.uint8).tolist() == found.view(torch.uint8).tolist()


def test_a_run_with_a_state_that_is_not_admitted_writes_no_epoch(tmp_path):
    """The epoch that begins the run is refused, and there is none."""
    for number, value in enumerate((numpy.array([None]), Number(3), torch.eye(2).to_sparse())):
        where = tmp_path / str(number)
        with pytest.raises(RelayError, match=r"o.* (is a|has layout) "):
            job = Job("law", blobs={"o": Registered([value]), "model": nn.Linear(2, 2)})
            job.epoch(lambda ctx: None)
            job.stop_when(max_epochs(1))
            JobRunner(job, where, best=None, code=False).train()
        assert not list(where.rglob("*.safetensors"))


@pytest.mark.parametrize("size", [1, 100])
@pytest.mark.parametrize("code", ["l", "q", "L", "Q"])
def test_arrays_of_any_length_keep_which_integer_of_c_they_have(tmp_path, code, size):
    """Two types of C may be equal to numpy, and have codes of their own; long arrays are tensors on disk."""
    found = numpy.arange(size).astype(code)
    run(tmp_path, 1, {"v": [found]}, [], [])
    assert exactly(open_checkpoint(tmp_path).load_values("v")["v"]) == exactly([found])


@pytest.mark.parametrize(
    "held",
    [
        lambda: nn.ParameterDict({"k" * 5000: nn.Parameter(torch.zeros(1))}),
        lambda: {"k" * 5000: torch.zeros(1)},
        lambda: {b"\0" * 2000: numpy.arange(100)},
        lambda: Registered({"k" * 5000: [1.5] * 100}),
    ],
    ids=["module", "text", "bytes", "state"],
)
def test_what_would_have_a_longer_name_than_can_be_stored_is_refused_by_it(tmp_path, held):
    """Before anything is written: loads look for a leaf by its whole name, so none is cut."""
    job = Job("long", blobs={"m": held()})
    job.epoch(lambda ctx: None)
    job.stop_when(max_epochs(1))
    with pytest.raises(BlobError, match=r"^m.* would have a name of [0-9]{4} characters, and 4096 can be"):
        JobRunner(job, tmp_path / "run", code=False).train()
    assert not [*(tmp_path / "run").rglob("*.safetensors")]


def test_a_leaf_whose_name_grows_too_long_with_its_gradient_is_refused_by_it(tmp_path):
    """A window of gradients that is open at the end of an epoch is saved under longer names."""
    module = nn.ParameterDict({"k" * 4090: nn.Parameter(torch.zeros(1))})
    job = Job("long", blobs={"m": module})

    @job.epoch
    def backward(ctx):
        (module["k" * 4090] * 2).sum().backward()

    job.stop_when(max_epochs(1))
    with pytest.raises(SaveFailedError, match=r"@grad\.m\.k.* would have a name of 4098 characters"):
        JobRunner(job, tmp_path / "run", code=False, max_failed_saves=1).train()
