"""Read state archives of SINGA 3, a zip of an npz file and a JSON index, for migration.

`tensor_dict.npz` has the arrays by name; `states_attr.json` marks each as a model state (`state_type` 0) or
an aux state (1). Names and shapes are SINGA's: `conv1.W` is torch's `conv1.weight`, and weights of linear
layers are transposed, so the user must convert them to a state dict.
"""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from torchrelay.checkpoint.files.publish import Where, as_written, fetched
from torchrelay.errors import DamagedError, FormatError, RelayError
from torchrelay.jobs.runtime import check_file

ARRAYS, INDEX = "tensor_dict.npz", "states_attr.json"
LIMIT = 16 << 30
"""Limit on the unpacked size of members, which are compressed."""
_NUMBERS = "biufc"
_WANTED = "an archive of SINGA"


def read_singa_states(path: Where) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Read the model states and aux states, by SINGA's names. Needs numpy and unpickles nothing.

    Raises UsageError if the file does not exist, FormatError for another kind of file, DamagedError,
    StorageError.
    """
    with fetched(as_written(path, _WANTED), _WANTED) as place:
        check_file(place, _WANTED)
        try:
            arrays, kinds = _read(place, str(place))
        except RelayError:
            raise
        except (zipfile.BadZipFile, OSError, ValueError, KeyError, EOFError, NotImplementedError) as error:
            raise DamagedError(f"{place} is not a readable archive of SINGA: {error}") from error
    if arrays.keys() != kinds.keys():
        odd = sorted(arrays.keys() ^ kinds.keys())[0]
        raise DamagedError(f"{path}: {odd!r} is only in one of {ARRAYS} and {INDEX}")
    model, aux = ({name: one for name, one in arrays.items() if kinds[name] == kind} for kind in (0, 1))
    return model, aux


def _read(place: Path, shown: str) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    with zipfile.ZipFile(place) as archive:
        if not {ARRAYS, INDEX} <= set(archive.namelist()):
            raise FormatError(f"{shown} is not an archive of SINGA: it has no {ARRAYS} and {INDEX}")
        if sum(info.file_size for info in archive.infolist()) > LIMIT:
            raise FormatError(f"{shown} would unpack to more than {LIMIT} bytes")
        index = json.loads(archive.read(INDEX))
        data = archive.read(ARRAYS)
        try:
            import numpy
        except ImportError as error:
            raise FormatError("archives of SINGA contain numpy arrays: install numpy") from error
        arrays: dict[str, torch.Tensor] = {}
        with numpy.load(io.BytesIO(data), allow_pickle=False) as members:
            for name in members.files:
                array = members[name]
                if array.dtype.kind not in _NUMBERS:
                    raise ValueError(f"{name!r} does not contain numbers")
                arrays[name] = torch.from_numpy(numpy.ascontiguousarray(array).reshape(array.shape))
    kinds: dict[str, Any] = {
        name: said.get("state_type") for name, said in index.items() if isinstance(said, Mapping)
    }
    if odd := [name for name in index if kinds.get(name) not in (0, 1)]:
        raise ValueError(f"{odd[0]!r} is neither a model state nor an aux state")
    return arrays, kinds
