"""SNG-12: the official node cases of the onnx wheel."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from fnmatch import fnmatchcase
from typing import Any

import node_case_exclusions as exclusions
import pytest
import torch

onnx = pytest.importorskip("onnx")

import numpy as np  # noqa: E402
from onnx import numpy_helper  # noqa: E402
from onnx.backend.test.loader import load_model_tests  # noqa: E402

from torchrelay import from_onnx  # noqa: E402
from torchrelay.models.onnx.importer.tensors import stored_tensor  # noqa: E402

PASSED_AT_LEAST = 1836
SINGA_CASES = 609


def tensors(value: Any) -> Any:
    """An input or output of a case as torch has it; sequences are lists."""
    if value is None or isinstance(value, list):
        return None if value is None else [tensors(one) for one in value]
    if isinstance(value, onnx.TensorProto):
        return stored_tensor(value)
    array = np.asarray(value)
    if array.dtype.kind in "OUS":
        return array  # texts
    return stored_tensor(numpy_helper.from_array(np.ascontiguousarray(array) if array.ndim else array))


def same(found: Any, wanted: Any, rtol: float, atol: float) -> bool:
    """Types and shapes equal, values within the tolerance; 16-bit floats within two steps of theirs."""
    if not isinstance(wanted, torch.Tensor):
        several = isinstance(wanted, list) and isinstance(found, list) and len(found) == len(wanted)
        return found is wanted or (
            several and all(same(*pair, rtol, atol) for pair in zip(found, wanted, strict=True))
        )
    if not isinstance(found, torch.Tensor) or (found.shape, found.dtype) != (wanted.shape, wanted.dtype):
        return False
    if wanted.is_complex():
        return torch.allclose(found, wanted, rtol, atol, equal_nan=True)
    if not wanted.is_floating_point():
        return torch.equal(found.long(), wanted.long())
    rtol = max(rtol, 2 * torch.finfo(wanted.dtype).eps) if wanted.itemsize == 2 else rtol
    atol = max(atol, torch.finfo(wanted.dtype).eps) if wanted.itemsize == 2 else atol
    pair = (found.float().double(), wanted.float().double()) if wanted.itemsize < 8 else (found, wanted)
    return torch.allclose(*pair, rtol, atol, equal_nan=True)


@contextmanager
def drawn(name: str) -> Iterator[None]:
    """Where a case expects numpy's numbers, these stand for torch's while it runs."""
    if name not in exclusions.NUMPY_DRAWS:
        yield
        return
    shapes = list[tuple[int, ...]]()

    def rand_like(x: torch.Tensor) -> torch.Tensor:
        shapes.append(tuple(x.shape))
        return torch.from_numpy(np.random.RandomState(0).uniform(0, 1, shapes[-1]))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "rand_like", rand_like)
        yield
    assert len(shapes) == 1, f"{name} has drawn {len(shapes)} times"


def problem(case: Any) -> str | None:
    """What is wrong with the answer to a case, or None."""
    module = from_onnx(case.model)
    for inputs, outputs in case.data_sets:
        found = module(*map(tensors, inputs))
        found = found if isinstance(found, tuple) else (found,)
        wanted = tuple(map(tensors, outputs))
        if len(found) != len(wanted):
            return f"{len(found)} outputs in place of {len(wanted)}"
        for one, other in zip(found, wanted, strict=True):
            if not same(one, other, case.rtol, exclusions.absolute(case.name, case.atol)):
                return "another answer"
    return None


def test_sng_12_official_node_cases(tell: Callable[[str], None]) -> None:
    """Every case that is not excluded with a reason passes, all of the ancestor's 81 operators among them."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # numpy, as the cases compute what they expect
        cases = load_model_tests(kind="node")
    failed: dict[str, str] = {}
    skipped: Counter[str] = Counter()
    ours: Counter[str] = Counter()
    for case in cases:
        of_singa = {node.op_type for node in case.model.graph.node} <= exclusions.SINGA
        ours["cases"] += of_singa
        why = exclusions.reason(case.name)
        if why is not None:
            skipped[why] += 1
            ours["excluded"] += of_singa
            continue
        try:
            with drawn(case.name):
                wrong = problem(case)
        except Exception as error:
            wrong = f"{type(error).__name__}: {error}"
        if wrong:
            failed[case.name] = wrong
    passed = len(cases) - len(failed) - sum(skipped.values())
    tell(
        f"ONNX node cases: {passed} of {len(cases)} pass, {sum(skipped.values())} excluded; of the "
        f"{ours['cases']}"
        f" with only SINGA's 81 operators {ours['cases'] - ours['excluded']} pass"
    )
    assert not failed
    assert not [one for one in exclusions.EXCLUDED if not any(fnmatchcase(case.name, one) for case in cases)]
    assert passed >= PASSED_AT_LEAST
    assert len(exclusions.SINGA) == 81
    assert ours["cases"] == SINGA_CASES
    assert ours["excluded"] == 0
