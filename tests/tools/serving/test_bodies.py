"""What is read of a request and written to an answer: JSON, and tensors as safetensors has them."""

from __future__ import annotations

import json
import struct
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load, save

from torchrelay.jobs.runtime import Signature, TensorSpec
from torchrelay.runners.programs.request import RequestLimits
from torchrelay.tools.serving.handlers import (
    TensorHandler,
    body_of,
    joined,
    json_bytes,
    rows,
    shape_of,
    tensors_of,
)
from torchrelay.tools.serving.requests import ContentFormat, form_of, read_question, write_answer
from torchrelay.tools.serving.serve import FaultyAnswerError, RefusedError

LIMITS = RequestLimits(elements=1000, samples=10, depth=4)
AS_JSON, AS_TENSORS = ContentFormat(False, False), ContentFormat(True, True)
ENTRY = {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]}


def file_of(header: Any, data: bytes = bytes(16), length: int | None = None) -> bytearray:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return bytearray(struct.pack("<Q", len(text) if length is None else length) + text + data)


def status_of(body: bytes, form: ContentFormat = AS_JSON) -> int:
    with pytest.raises(RefusedError) as refused:
        read_question(bytearray(body), form, LIMITS)
    assert refused.value.text
    return refused.value.status


def test_safetensors_reads_what_is_written_and_the_other_way_round():
    """The same bits in both directions, of every type that both know."""
    types = [
        torch.float32,
        torch.float64,
        torch.bfloat16,
        torch.float16,
        torch.int64,
        torch.int8,
        torch.uint8,
    ]
    tensors = {f"t{at}": torch.arange(6).reshape(2, 3).to(one) for at, one in enumerate(types)}
    tensors |= {"bool": torch.tensor([[True], [False]]), "empty": torch.empty(2, 0)}
    ours, theirs = load(body_of(tensors, {})), tensors_of(bytearray(save(tensors)), 1000)
    for name, tensor in tensors.items():
        for found in (ours[name], theirs[name]):
            assert found.dtype == tensor.dtype and torch.equal(found, tensor), name


@pytest.mark.parametrize(
    "body",
    [
        b"", b"\0" * 8, b"\x80\x04\x95.", b"\x93NUMPY" + bytes(200), file_of({}), file_of([]), file_of(b"{"),
        file_of({"x": ENTRY}, length=2**64 - 1), file_of({"x": ENTRY}, length=3),
        file_of({"x": ENTRY}, bytes(15)),
        file_of({"x": ENTRY}, bytes(17)), file_of({"x": ENTRY, "y": ENTRY}), file_of({"x": {}}),
        file_of({"x": 1}),
        file_of({"x": {**ENTRY, "dtype": "F99"}}), file_of({"x": {**ENTRY, "dtype": []}}),
        file_of({"x": {**ENTRY, "shape": [-2, -2]}}), file_of({"x": {**ENTRY, "shape": [2.0, 2]}}),
        file_of({"x": {**ENTRY, "shape": [2**62, 2**62]}}), file_of({"x": {**ENTRY, "shape": [0, 2**60]}}),
        file_of({"x": {**ENTRY, "shape": [1] * 40}}), file_of({"x": {**ENTRY, "data_offsets": [4, 20]}}),
        file_of({"x": {**ENTRY, "data_offsets": [0, 2**70]}}), file_of(b'{"x": 1, "x": 2}'),
        file_of(b'{"x": ' + b"[" * 5000),
        file_of({"x": {"dtype": "F32", "shape": [], "data_offsets": [0, 4]}}, bytes(4)),
        file_of({"x": {"dtype": "F32", "shape": [0, 2], "data_offsets": [0, 0]}}, b""),
    ],
)  # fmt: skip
def test_what_is_no_safetensors_body_is_refused(body: bytes):
    """A header that is not exactly right is a 400, whatever it promises."""
    assert status_of(bytes(body), AS_TENSORS) == 400


def test_more_than_is_allowed_is_refused_before_it_is_made():
    """Elements and samples beyond the limits are a 413."""
    assert status_of(save({"x": torch.zeros(2, 501)}), AS_TENSORS) == 413
    assert status_of(save({"x": torch.zeros(11, 1)}), AS_TENSORS) == 413
    assert status_of(b'{"samples": [' + b"1," * 10 + b"1]}") == 413
    assert status_of(b'{"sample": [' + b"1," * 1001 + b"1]}") == 413


@pytest.mark.parametrize(
    "body",
    [
        b"", b"{", b"null", b"1", b"[1]", b"{}", b'{"sample": 1, "more": 1}', b'{"samples": []}',
        b'{"samples": 1}',
        b'{"sample": 1, "sample": 2}', b'{"sample": NaN}', b'{"sample": 1e999}', b'{"sample": [[[[1]]]]}',
        b'{"sample": ' + b"[" * 100_000, b'{"sample": 9007199254740993}', b'{"sample": "\\ud800"}', b"\xff",
        b'{"sample": ' + b"9" * 5000 + b"}",
    ],
)  # fmt: skip
def test_what_is_no_question_is_refused(body: bytes):
    """JSON of another form, too deep, or with numbers that no tensor has, is a 400."""
    assert status_of(body) == 400


@given(st.binary(max_size=300), st.booleans())
@settings(max_examples=200, deadline=None)
def test_any_bytes_are_understood_or_refused(body: bytes, binary: bool):
    """Nothing but a refusal comes out."""
    try:
        read_question(bytearray(body), ContentFormat(binary, binary), LIMITS)
    except RefusedError as error:
        assert error.status in (400, 413)


def test_answers_keep_their_bits_and_say_what_is_no_number():
    """A float32 comes back from JSON as it was; NaN and infinities are texts."""
    question = read_question(bytearray(b'{"samples": [1, 2]}'), AS_JSON, LIMITS)
    value = torch.tensor([1 / 3, 1e-45, 3.4e38])
    told = json.loads(write_answer([value, {"a": (value, 7, None)}], question, AS_JSON, {"epoch": 3}))
    assert torch.equal(torch.tensor(told["results"][0]), value) and told["epoch"] == 3
    assert told["results"][1]["a"][1:] == [7, None]
    assert json_bytes([float("nan"), float("-inf")]) == b'["nan","-inf"]'
    with pytest.raises(FaultyAnswerError, match="object"):
        write_answer([object()], question, AS_JSON, {})
    with pytest.raises(RefusedError) as refused:
        write_answer(["a text"], question, AS_TENSORS, {})
    assert refused.value.status == 406


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 415), ({"content-type": "text/plain"}, 415),
        ({"content-type": "application/x-python-pickle"}, 415),
        ({"content-type": "application/json; charset=utf-16"}, 415),
        ({"content-type": "application/json", "content-encoding": "gzip"}, 415),
        ({"content-type": "application/json", "accept": "text/html"}, 406),
    ],
)  # fmt: skip
def test_other_forms_are_refused(headers: dict[str, str], status: int):
    """Only JSON and safetensors are read and written; nothing is unpacked."""
    with pytest.raises(RefusedError) as refused:
        form_of(headers)
    assert refused.value.status == status


def test_the_form_of_the_answer_is_the_requests_or_what_is_accepted():
    """Accept decides, else the request's own form."""
    json_type = {"content-type": "application/json; charset=UTF-8"}
    assert form_of(json_type) == AS_JSON
    assert form_of({**json_type, "accept": "application/vnd.safetensors"}) == ContentFormat(False, True)
    assert form_of({"content-type": "application/octet-stream", "accept": "*/*"}) == AS_TENSORS
    assert form_of(
        {"content-type": "application/octet-stream", "accept": "application/json"}
    ) == ContentFormat(True, False)


SIGNATURE = Signature(
    (TensorSpec("image", ("batch", 2, "width"), "float32"), TensorSpec("count", ("batch",), "int32")),
    (TensorSpec("out", ("batch",), "float32"),),
)


def test_samples_are_held_to_the_signature():
    """Sizes, types and names; a number changes by rounding alone."""
    handler = TensorHandler(torch.nn.Identity(), SIGNATURE)
    made = handler.decode({"image": [[1, 2, 3], [4, 5, 6]], "count": 7})
    assert made["image"].dtype == torch.float32 and made["count"].dtype == torch.int32
    for image, count in (([[1], [2], [3]], 1), ([1, 2], 1), ([[1], [2]], 1.5), ([[1], [2]], 2**40), ("a", 1)):
        with pytest.raises(ValueError):
            handler.decode({"image": image, "count": count})
    for sent in (3, {"image": [[1], [2]]}, {"image": [[1], [2]], "count": 1, "more": 1}):
        with pytest.raises(ValueError, match="image, count"):
            handler.decode(sent)


def test_trees_are_joined_and_shared_out():
    """Rows of a batch of trees are the trees."""
    trees = [{"a": torch.full((1, 2), float(n)), "b": [torch.full((1,), n)]} for n in range(3)]
    assert len({shape_of(tree) for tree in trees}) == 1
    back = rows(joined(trees), 3)
    assert all(torch.equal(one["a"], tree["a"]) and torch.equal(one["b"][0], tree["b"][0])
               for one, tree in zip(back, trees, strict=True))  # fmt: skip
    for output in (torch.tensor(1.0), torch.zeros(2), "text"):
        with pytest.raises(ValueError):
            rows(output, 3)
