"""From the bytes of a request to samples, and from results to the bytes of an answer. Pure.

    {"sample": S}          one sample      {"result": R, "epoch": 3}
    {"samples": [S, ...]}  several         {"results": [R, ...], "epoch": 3}
    safetensors            tensors with a row per sample, by name; the answer likewise

S is a number, a list of S, a text, or an object of these by the names of a model's inputs: what becomes of it
is the handler's business.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from torchrelay.checkpoint.format import canonical_json
from torchrelay.errors import DamagedError
from torchrelay.records import dataclass
from torchrelay.runners.programs.serve_options import Limits
from torchrelay.runners.serving.refusal import FaultyAnswerError, wrong
from torchrelay.runners.serving.tensor_bodies import MEDIA_TYPE, body_of, tensors_of
from torchrelay.runners.serving.trees import json_bytes, plain

JSON = "application/json"
BINARY = (MEDIA_TYPE, "application/octet-stream")


@dataclass(frozen=True)
class Question:
    """What was asked: samples as they were sent; `single` where they were sent as one."""

    samples: tuple[Any, ...]
    single: bool = False


@dataclass(frozen=True)
class Form:
    """How a body is to be read, and its answer to be written."""

    binary: bool
    binary_answer: bool

    def limit(self, limits: Limits) -> int:
        """The most bytes that its body may have."""
        return limits.body_bytes if self.binary else limits.json_bytes


def form_of(headers: Mapping[str, str]) -> Form:
    """By Content-Type and Accept; raises RefusedError 415 or 406 for others than JSON and safetensors."""
    if headers.get("content-encoding", "identity").strip().lower() not in ("", "identity"):
        raise wrong("bodies are not unpacked here: send it without Content-Encoding", 415)
    kind, _, more = headers.get("content-type", "").partition(";")
    kind = kind.strip().lower()
    if kind != JSON and kind not in BINARY:
        raise wrong(f"Content-Type: send {JSON}, or tensors as {' or '.join(BINARY)}", 415)
    charset = more.strip().lower().removeprefix("charset=").strip('"')
    if kind == JSON and charset not in ("", "utf-8", "utf8", "us-ascii"):
        raise wrong("JSON is read as UTF-8: send no other charset", 415)
    return Form(kind in BINARY, _wants_binary(headers.get("accept", ""), kind in BINARY))


def _wants_binary(accept: str, binary: bool) -> bool:
    """The form that the client names first of those that there are; without one, that of the request."""
    for text in accept.split(","):
        kind = text.partition(";")[0].strip().lower()
        if kind == JSON or kind in BINARY:
            return kind in BINARY
        if kind in ("*/*", "application/*", ""):
            return binary
    raise wrong(f"Accept: there is {JSON} and {BINARY[0]}", 406)


def read_question(body: bytearray, form: Form, limits: Limits) -> Question:
    """Understand a body; raises RefusedError."""
    found = _of_tensors(body, limits) if form.binary else _of_json(body, limits)
    if len(found.samples) > limits.samples:
        raise wrong(f"{len(found.samples)} samples at once: send at most {limits.samples}", 413)
    return found


def _of_tensors(body: bytearray, limits: Limits) -> Question:
    tensors = tensors_of(body, limits.elements)
    counts = {tensor.shape[0] if tensor.ndim else -1 for tensor in tensors.values()}
    if len(counts) != 1 or min(counts) < 1:
        raise wrong("tensors have a row per sample, all of them equally many, at least one")
    count = counts.pop()
    if count > limits.samples:
        raise wrong(f"{count} samples at once: send at most {limits.samples}", 413)
    return Question(tuple({name: one[at] for name, one in tensors.items()} for at in range(count)))


def _of_json(body: bytearray, limits: Limits) -> Question:
    _check_size(body, limits)
    try:
        value = canonical_json.loads(
            bytes(body), what="the body", limit_bytes=limits.json_bytes, depth=limits.depth
        )
    except DamagedError as error:
        raise wrong(f"{str(error)[:300]}") from None
    match value:
        case {"sample": sample} if len(value) == 1:
            return Question((sample,), single=True)
        case {"samples": [*samples]} if len(value) == 1 and samples:
            return Question(tuple(samples))
    raise wrong('the body is neither {"sample": ...} nor {"samples": [..., ...]}')


def _check_size(body: bytearray, limits: Limits) -> None:
    """Before anything is made of it: at least so many values as there are commas, and brackets to close."""
    if body.count(b",") > limits.elements:
        raise wrong(f"the body has more than {limits.elements} elements", 413)


def write_answer(results: Sequence[Any], question: Question, form: Form, about: Mapping[str, Any]) -> bytes:
    """The body of an answer; raises FaultyAnswerError for results that cannot be written in this form."""
    if form.binary_answer:
        metadata = {name: str(value) for name, value in about.items() if value is not None}
        return body_of(_stacked(results), metadata)
    try:
        told = [plain(one) for one in results]
        content = {"result": told[0]} if question.single else {"results": told}
        return json_bytes({**content, **about})
    except TypeError as error:
        raise FaultyAnswerError(f"{error}: write encode() of the handler so that it is") from None


def _stacked(results: Sequence[Any]) -> dict[str, torch.Tensor]:
    """Results as tensors with a row for each, by name; one without a name is `result`."""
    named = [one if isinstance(one, Mapping) else {"result": one} for one in results]
    try:
        return {
            str(name): torch.stack([torch.as_tensor(one[name]).detach().cpu() for one in named])
            for name in named[0]
        }
    except (ValueError, TypeError, RuntimeError, KeyError):
        raise wrong("the results are no tensors of one shape: ask for application/json", 406) from None
