"""What can be asked, as an OpenAPI document: of this model, with its signature and its limits. Pure."""

from __future__ import annotations

from typing import Any

import torchrelay
from torchrelay.jobs.runtime import Signature, TensorSpec
from torchrelay.runners.programs.serve_options import Limits
from torchrelay.runners.serving.served import Served
from torchrelay.runners.serving.tensor_bodies import MEDIA_TYPE

Json = dict[str, Any]
_TEXT: Json = {"type": "string"}
_ANY: Json = {"description": "a number, a text, a list, or an object by the names of the inputs"}
_BINARY: Json = {"type": "string", "format": "binary", "description": "a safetensors file, a row per sample"}


def description(served: Served, limits: Limits, *, token: bool) -> Json:
    """The document; `token` says whether requests must carry one."""
    content: Json = {
        "openapi": "3.1.0",
        "info": {
            "title": f"{served.name}, served by torchrelay",
            "version": torchrelay.__version__,
            "description": _limits_told(limits),
        },
        "paths": {**_looking(), "/predict": {"post": _predict(served.signature)}},
    }
    if token:
        scheme = {"type": "http", "scheme": "bearer"}
        content |= {"components": {"securitySchemes": {"token": scheme}}, "security": [{"token": []}]}
    return content


def _limits_told(limits: Limits) -> str:
    return (
        f"At most {limits.samples} samples in a request; JSON up to {limits.json_bytes} bytes and "
        f"{limits.depth} levels, tensors up to {limits.body_bytes} bytes and {limits.elements} elements. "
        f"A request is given up after {limits.secs:g} s. Up to {limits.max_batch} samples are computed at "
        f"once, for which one may wait {limits.max_delay_secs * 1000:g} ms."
    )


def _looking() -> Json:
    json_page = {"application/json": {"schema": {"type": "object"}}}
    told = {
        "/health": "503 where the process had better be started again",
        "/ready": "503 where requests had better go elsewhere: it leaves, or is stuck",
        "/metadata": "Run, epoch, branch, code id and signature of what is served now",
    }
    paths = {
        path: {"get": {"summary": text, "responses": {"200": _answer("as it is now", json_page)}}}
        for path, text in told.items()
    }
    text_page = {"text/plain": {"schema": _TEXT}}
    paths["/metrics"] = {
        "get": {"summary": "For Prometheus", "responses": {"200": _answer("counters", text_page)}}
    }
    return paths


def _predict(signature: Signature | None) -> Json:
    sample = _sample(signature)
    question = {
        "oneOf": [
            _object({"sample": sample}),
            _object({"samples": {"type": "array", "items": sample, "minItems": 1}}),
        ]
    }
    epoch = {"type": ["integer", "null"]}
    answer = {
        "oneOf": [
            _object({"result": _ANY, "epoch": epoch}),
            _object({"results": {"type": "array", "items": _ANY}, "epoch": epoch}),
        ]
    }
    refusals = {
        "400": "the body cannot be understood",
        "413": "it is too much",
        "415": "it is neither JSON nor safetensors",
        "422": "the sample does not fit the model",
        "429": "too much is asked at once: see Retry-After",
        "503": "no answer in time, or the server leaves: see Retry-After",
    }
    error = {"application/json": {"schema": _object({"error": _TEXT})}}
    return {
        "summary": "Results for samples",
        "requestBody": {"required": True, "content": _bodies(question)},
        "responses": {
            "200": _answer("a result for each sample", _bodies(answer)),
            **{code: _answer(text, error) for code, text in refusals.items()},
        },
    }


def _sample(signature: Signature | None) -> Json:
    if signature is None:
        return _ANY
    if len(signature.inputs) == 1:
        return {"description": _spec_told(signature.inputs[0])}
    return _object({spec.name: {"description": _spec_told(spec)} for spec in signature.inputs})


def _spec_told(spec: TensorSpec) -> str:
    return f"{spec.name}: {spec.dtype} of shape ({', '.join(map(str, spec.shape[1:]))}), as nested lists"


def _object(properties: Json) -> Json:
    return {"type": "object", "properties": properties, "required": list(properties)}


def _bodies(schema: Json) -> Json:
    return {"application/json": {"schema": schema}, MEDIA_TYPE: {"schema": _BINARY}}


def _answer(text: str, content: Json) -> Json:
    return {"description": text, "content": content}
