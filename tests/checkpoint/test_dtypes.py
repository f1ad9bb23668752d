"""Element types and the bytes of tensors."""

from __future__ import annotations

import gc

import pytest
import torch

from torchrelay.checkpoint.format import dtypes
from torchrelay.errors import BlobError, FormatError

TORCH_DTYPES = sorted(
    {str(v).removeprefix("torch.") for v in vars(torch).values() if isinstance(v, torch.dtype)}
)


@pytest.mark.parametrize("name", TORCH_DTYPES)
def test_every_torch_dtype_is_known_or_refused_by_name(name):
    """A dtype has its code and torch's item size, or a BlobError names the leaf; none is overlooked."""
    dtype = getattr(torch, name)
    if name.startswith(("qint", "quint")):
        with pytest.raises(BlobError, match=r"leaf: tensors of torch\.q"):
            dtypes.logical_dtype(dtype, "leaf")
    else:
        kind = dtypes.logical_dtype(dtype, "leaf")
        assert kind.itemsize == dtype.itemsize
        assert dtypes.torch_dtype(kind) == dtype
        assert kind.raw or dtypes.by_code(kind.code) == kind


def test_unknown_names_and_codes_are_a_format_error():
    """What a newer version wrote is refused with the remedy."""
    for read in (dtypes.by_name, dtypes.by_code):
        with pytest.raises(FormatError, match="newer"):
            read("F12")


def test_bytes_of_a_contiguous_cpu_tensor_are_its_own_memory():
    """No copy is made, and the view keeps the memory alive."""
    tensor = torch.arange(6, dtype=torch.int16).reshape(2, 3)
    view = dtypes.stored_bytes(tensor, "x")
    tensor[0, 0] = 0x0102
    assert bytes(view[:2]) == b"\x02\x01"
    del tensor
    gc.collect()
    torch.full((6,), -1, dtype=torch.int16)
    assert bytes(view[2:4]) == b"\x01\x00"
    assert (view.format, view.ndim, len(view)) == ("B", 1, 12)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(12.0).reshape(3, 4).t(),
        torch.arange(12.0)[1:9:3],
        torch.tensor([1 + 2j, 3 - 1j]).conj(),
        torch.tensor(7),
        torch.empty(0, 3),
        torch.nn.Parameter(torch.ones(2, 2)),
        torch.ones(3).expand(4, 3),
    ],
    ids=["transposed", "strided", "conjugate", "0-d", "empty", "parameter", "expanded"],
)
def test_bytes_are_row_major_elements(tensor):
    """Views of any kind are stored as a fresh tensor of the same values would be."""
    view = dtypes.stored_bytes(tensor, "x")
    fresh = torch.empty(tensor.shape, dtype=tensor.dtype)
    dtypes.memory_of(fresh)[:] = view
    assert torch.equal(fresh, tensor.detach().resolve_conj())


def _nested():
    return torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])


def _quantised():
    return torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (torch.eye(2).to_sparse, "layout torch.sparse_coo"),
        (lambda: torch.empty(2, device="meta"), "meta tensor"),
        (_quantised, "quantised"),
        (_nested, "nested"),
    ],
)
@pytest.mark.filterwarnings("ignore::UserWarning")  # torch calls both kinds prototypes or deprecated
def test_tensors_that_are_not_one_dense_block_are_refused_by_name(make, words):
    """The message names the leaf and what it is."""
    with pytest.raises(BlobError, match=rf"model\.odd (is|has) .*{words}"):
        dtypes.stored_bytes(make(), "model.odd")


def test_tensor_subclasses_that_dispatch_are_refused():
    """A wrapper's own memory is not its content."""

    class Wrapper(torch.Tensor):
        @classmethod
        def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
            return NotImplemented

    odd = torch.Tensor._make_wrapper_subclass(Wrapper, (2,))
    with pytest.raises(BlobError, match="x is a Wrapper"):
        dtypes.stored_bytes(odd, "x")
