"""Random states of a process, reproducible seeds, and stable permutations.

- SplitMix64 (`finalise`, `mix`) derives seeds and data orders. It does not depend on library versions, so old
  runs keep their sample order. Constants: Steele, Lea and Flood, "Fast splittable pseudorandom number
  generators" (2014), with David Stafford's finaliser variant 13. `finalise` is a bijection on 64 bits, so
  different inputs never collide. Golden values in the tests pin the results: a change here is a format
  change.
- `RandomStreams` captures Python's `random`, numpy's global state, torch's CPU generator and the CUDA
  generators without moving them. Stored forms are portable and carry no code: canonical JSON for Python and
  numpy, torch's own state bytes for torch.
- Permutations are stateless: any process computes the same order and can start in the middle of it.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import random
import struct
import sys
from collections.abc import Mapping
from types import ModuleType
from typing import TYPE_CHECKING, Any

from torchrelay.errors import FormatError, UsageError
from torchrelay.records import dataclass

if TYPE_CHECKING:
    from torch import Tensor


MASK = 2**64 - 1
GOLDEN = 0x9E3779B97F4A7C15
MULTIPLY_1 = 0xBF58476D1CE4E5B9
MULTIPLY_2 = 0x94D049BB133111EB


def finalise(word: int) -> int:
    """Scramble the 64 bits of `word`."""
    word &= MASK
    word = ((word ^ (word >> 30)) * MULTIPLY_1) & MASK
    word = ((word ^ (word >> 27)) * MULTIPLY_2) & MASK
    return word ^ (word >> 31)


def mix(*words: int) -> int:
    """Fold any number of words (taken modulo 2**64) into one 64-bit word; their order matters.

    state = 0; for each word: state = finalise(state + GOLDEN + word), all modulo 2**64.
    """
    state = 0
    for word in words:
        state = finalise(state + GOLDEN + word)
    return state


_PYTHON, _NUMPY, _TORCH, _CUDA = 1, 2, 3, 4  # the stream that a derived seed is for
_NUMPY_GENERATORS = frozenset({"MT19937", "PCG64", "PCG64DXSM", "Philox", "SFC64"})
_EXACT = 2**53  # JSON readers elsewhere keep integers exactly only below this
_WORDS = 624  # Mersenne Twister
_TWISTER = {"bit_generator": "MT19937", "has_gauss": 0, "gauss": 0.0}
_PADDED = 1024  # the words of a Mersenne Twister take 6.1 to 7 KiB in decimal


@dataclass(frozen=True)
class RandomStreams:
    """The random states of one process (or of one emulated node) at one moment.

    `numpy` is None if numpy was not loaded. `cuda` starts at the process's current device, so that a rank
    keeps its stream if its local rank changes; it is empty while CUDA is not initialised.
    """

    python: bytes
    numpy: bytes | None
    torch: bytes
    cuda: tuple[bytes, ...] = ()

    @classmethod
    def capture(cls) -> RandomStreams:
        """Capture all streams without moving, initialising or importing anything."""
        import torch

        state, cuda = torch.get_rng_state(), torch.cuda.is_initialized()
        return cls(
            _python_bytes(random.getstate()),
            _numpy_state(),
            ctypes.string_at(state.data_ptr(), state.nbytes),
            tuple(bytes(torch.cuda.get_rng_state(one).tolist()) for one in _cuda_order()) if cuda else (),
        )

    @classmethod
    def derive(cls, seed: int, rank: int, epoch: int = 0) -> RandomStreams:
        """Return the initial streams of a rank, each from mix(seed, epoch, rank, number of the stream)."""
        import torch

        words = random.Random(mix(seed, epoch, rank, _NUMPY)).getstate()[1][:_WORDS]  # noqa: S311
        key = {"dtype": "uint32", "values": list(words)}
        return cls(
            _python_bytes(random.Random(mix(seed, epoch, rank, _PYTHON)).getstate()),  # noqa: S311
            _canonical({**_TWISTER, "state": {"key": key, "pos": _WORDS}}),
            bytes(torch.Generator().manual_seed(mix(seed, epoch, rank, _TORCH)).get_state().tolist()),
            # a CUDA state is the seed and the offset of a Philox generator
            tuple(
                struct.pack("<Qq", mix(seed, epoch, rank, _CUDA, device), 0)
                for device in range(_cuda_devices())
            ),
        )

    def restore(self) -> None:
        """Continue from these states; those of missing devices are ignored."""
        import torch

        random.setstate(_python_from(self.python))
        if self.numpy is not None and (numpy := numpy_module(load=True)) is not None:
            state = _unplain(_parsed(self.numpy, "numpy"), numpy)
            name = state.get("bit_generator")
            if name not in _NUMPY_GENERATORS:
                raise FormatError(f"the random state of numpy has the unknown generator {name!r}")
            if numpy.random.get_state(legacy=False)["bit_generator"] != name:
                numpy.random.set_bit_generator(getattr(numpy.random, name)())
            numpy.random.set_state(state)
        torch.set_rng_state(torch.frombuffer(bytearray(self.torch), dtype=torch.uint8))
        # before CUDA is initialised torch keeps the state for later
        for device, state in zip(_cuda_order() if self.cuda else (), self.cuda, strict=False):
            torch.cuda.set_rng_state(torch.frombuffer(bytearray(state), dtype=torch.uint8), device)

    def encode(self) -> dict[str, bytes]:
        """Return the stored form: keys `python`, `numpy`, `torch`, `cuda.<i>`, as far as present."""
        coded = {"python": self.python, "torch": self.torch}
        if self.numpy is not None:
            coded["numpy"] = self.numpy
        return coded | {f"cuda.{device}": state for device, state in enumerate(self.cuda)}

    @classmethod
    def decode(cls, coded: Mapping[str, bytes]) -> RandomStreams:
        """Decode the result of `encode`; raises FormatError for a missing or unknown stream."""
        cuda = [f"cuda.{device}" for device in range(sum(key.startswith("cuda.") for key in coded))]
        for key in {"python", "torch", *cuda} - set(coded):
            raise FormatError(f"the random state {key!r} is missing among {sorted(coded)}")
        for key in set(coded) - {"python", "numpy", "torch", *cuda}:
            raise FormatError(f"unknown random state {key!r}: a newer version of torchrelay wrote it")
        _python_from(coded["python"])
        return cls(coded["python"], coded.get("numpy"), coded["torch"], tuple(coded[key] for key in cuda))


def numpy_module(*, load: bool) -> ModuleType | None:
    """Return numpy if it is loaded, or with `load`, if it can be imported; else None."""
    if not load:
        return sys.modules.get("numpy")
    try:
        return importlib.import_module("numpy")
    except ImportError:
        return None


def _canonical(value: Any) -> bytes:
    """Encode as canonical JSON, padded with spaces to equal length, so that saves keep their plan."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()
    return text.ljust(-(-len(text) // _PADDED) * _PADDED)


def _parsed(data: bytes, stream: str) -> dict[str, Any]:
    try:
        value = json.loads(data)
    except ValueError as error:
        raise FormatError(f"the random state of {stream} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise FormatError(f"the random state of {stream} is {type(value).__name__}, not an object")
    return value


def _python_bytes(state: Any) -> bytes:
    version, words, gauss = state
    return _canonical({"version": version, "words": words, "gauss": gauss})


def _python_from(data: bytes) -> Any:
    value = _parsed(data, "python")
    try:
        return value["version"], tuple(value["words"]), value["gauss"]
    except (KeyError, TypeError) as error:
        raise FormatError(f"the random state of python lacks {error}") from error


def _numpy_state() -> bytes | None:
    numpy = numpy_module(load=False)
    # a half-imported numpy has no random yet
    if numpy is None or not hasattr(numpy, "random"):
        return None
    return _canonical(_plain(numpy.random.get_state(legacy=False)))


def _plain(value: Any) -> Any:
    """Convert numpy's state to JSON: arrays with their dtype, large integers as hexadecimal text."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if hasattr(value, "dtype"):
        if not value.shape:
            return _plain(value.item())
        items = value.tolist()
        small = value.dtype.kind == "u" and value.dtype.itemsize <= 4  # the 624 words of a Mersenne Twister
        return {"dtype": str(value.dtype), "values": items if small else [_plain(item) for item in items]}
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) >= _EXACT:
        return {"int": hex(value)}
    return value


def _unplain(value: Any, numpy: ModuleType) -> Any:
    if not isinstance(value, dict):
        return value
    if set(value) == {"int"}:
        return int(value["int"], 16)
    if set(value) == {"dtype", "values"}:
        return numpy.array([_unplain(item, numpy) for item in value["values"]], dtype=value["dtype"])
    return {key: _unplain(item, numpy) for key, item in value.items()}


def _cuda_devices() -> int:
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def _cuda_order() -> list[int]:
    """Return the CUDA devices, starting at the current one, without initialising CUDA."""
    import torch

    count = _cuda_devices()
    current = torch.cuda.current_device() if torch.cuda.is_initialized() else 0
    return [(current + offset) % count for offset in range(count)]


_seed: int | None = None


def seed(s: int) -> None:
    """Seed Python's, numpy's and torch's global generators (including CUDA) identically on all ranks.

    Calls `torch.manual_seed(s)`, `random.seed(s)` and `numpy.random.seed(s % 2**32)`, and remembers `s`. When
    a new run starts its first epoch task, the streams of every rank are derived from (s, rank). Raises
    UsageError unless `s` is an integer from 0 to 2**64 - 1.
    """
    global _seed  # noqa: PLW0603 - the process has one set of global streams, and this is what they started from
    import torch

    checked = check_seed(s)
    random.seed(checked)
    torch.manual_seed(checked)
    numpy = numpy_module(load=True)
    if numpy is not None:
        numpy.random.seed(checked % 2**32)
    _seed = checked


def current_seed() -> int | None:
    """Return the seed of the last call of `seed` in this process; None before any call."""
    return _seed


def check_seed(s: int) -> int:
    """Return `s` if it is a valid seed; raises UsageError otherwise."""
    if isinstance(s, bool) or not isinstance(s, int) or not 0 <= s < 2**64:
        raise UsageError(f"invalid seed: expected an integer from 0 to 2**64 - 1, not {s!r}")
    return s


_ORDER = 0x6F72646572  # "order": separates the keys of the order from the samples' seeds
_SAMPLE = 0x73616D706C65  # "sample"
_SIGN = -(2**63)


def permutation(seed: int, epoch: int, n: int) -> Tensor:
    """Return the order of `n` samples in `epoch` as an int64 tensor of indices.

    It is the argsort of key(i) = finalise(mix(seed, epoch, "order") + (i + 1) * GOLDEN), compared as
    unsigned 64-bit numbers. Keys never tie, because `finalise` is a bijection. Ten million samples
    take seconds and 16 bytes each.
    """
    import torch

    index = torch.arange(1, n + 1, dtype=torch.int64)
    # Apply `finalise` in place to int64 words, whose multiplication wraps like unsigned.
    words = index.mul_(_signed(GOLDEN)).add_(_signed(mix(seed, epoch, _ORDER)))
    words.bitwise_xor_(_shifted(words, 30)).mul_(_signed(MULTIPLY_1))
    words.bitwise_xor_(_shifted(words, 27)).mul_(_signed(MULTIPLY_2))
    keys = words.bitwise_xor_(_shifted(words, 31))
    # flip the sign bit, so that signed comparison gives the unsigned order
    return torch.argsort(keys.bitwise_xor_(_SIGN), stable=True)


def sample_seed(seed: int, epoch: int, index: int) -> int:
    """Return the 64-bit seed of one sample in one epoch, for its random augmentation."""
    return mix(seed, epoch, _SAMPLE, index)


def _signed(word: int) -> int:
    return word - 2**64 if word >= 2**63 else word


def _shifted(words: Tensor, bits: int) -> Tensor:
    """Logical (unsigned) right shift."""
    return (words >> bits).bitwise_and_((1 << (64 - bits)) - 1)
