"""Signatures of models."""

from __future__ import annotations

import json

import pytest

from torchrelay.errors import UsageError
from torchrelay.jobs.runtime import Signature, TensorSpec

SIGNATURE = Signature(
    (TensorSpec("image", ("batch", 3, 32, 32), "float32"),),
    (TensorSpec("logits", ("batch", 10), "bfloat16"),),
)


def test_a_signature_comes_back_from_json():
    """What was written as JSON is read as the same signature."""
    assert Signature.from_json(json.loads(json.dumps(SIGNATURE.to_json()))) == SIGNATURE


@pytest.mark.parametrize(
    "found",
    [
        None, [], {}, {"inputs": [], "outputs": {}}, {"inputs": [1], "outputs": []},
        {"inputs": [{"name": "x", "shape": [-1], "dtype": "int8"}], "outputs": []},
        {"inputs": [{"name": "x", "shape": [True], "dtype": "int8"}], "outputs": []},
    ],
)  # fmt: skip
def test_what_is_no_signature_is_refused(found):
    """Anything else is refused in one sentence."""
    with pytest.raises(UsageError, match="invalid description of"):
        Signature.from_json(found)
