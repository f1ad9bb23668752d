"""Outputs of tasks on their way to the other processes: small ones travel, big ones stay."""

from __future__ import annotations

import base64
import ctypes
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torchrelay.checkpoint.format.values import decode, encode
from torchrelay.errors import BlobError
from torchrelay.jobs.session import Json
from torchrelay.jobs.task import NotHere, Task, TaskOutput

if TYPE_CHECKING:
    from torch import Tensor

LIMIT_BYTES = 1 << 20
"""What one output may weigh as JSON in order to be told to all processes."""

ByNode = dict[str, dict[TaskOutput, Any]]


def outputs_of(tasks: Sequence[Task]) -> Iterator[TaskOutput]:
    """All outputs of a group's tasks, in the same order in every process."""
    for task in tasks:
        yield task.result
        yield from task.outputs


def told(tasks: Sequence[Task], own: ByNode) -> Json:
    """What a process tells of the outputs of its nodes: JSON by node and by number of the output."""
    numbers = {output: str(number) for number, output in enumerate(outputs_of(tasks))}
    return {
        node: {numbers[output]: encode_output(output, value, node) for output, value in values.items()}
        for node, values in own.items()
    }


def heard(tasks: Sequence[Task], all_told: Sequence[Json]) -> ByNode:
    """The outputs of all nodes from what all processes told, in rank order."""
    outputs = list(outputs_of(tasks))
    return {
        node: {outputs[int(number)]: decode_output(json) for number, json in values.items()}
        for process in all_told
        for node, values in process.items()
    }


def bind(tasks: Sequence[Task], by_node: Mapping[str, Mapping[TaskOutput, Any]]) -> None:
    """Give every output of the tasks its values as of the end of this run."""
    for output in outputs_of(tasks):
        output.bind({node: values[output] for node, values in by_node.items() if output in values})


def encode_output(output: TaskOutput, value: Any, node: str) -> Json:
    """A value, a tensor, or why it stays on its node."""
    try:
        content = encode(value, str(output), tensor=_tensor_json)
    except BlobError as error:
        return {"stays": f"{output} stays on {node}: {error}"}
    if len(json.dumps(content)) > LIMIT_BYTES:
        return {"stays": f"{output} stays on {node}: outputs above {LIMIT_BYTES} bytes are not sent"}
    return {"value": content}


def decode_output(told: Json) -> Any:
    """The value, or NotHere with the reason."""
    return NotHere(told["stays"]) if "stays" in told else decode(told["value"], tensor=_tensor_of)


def _tensor_json(path: str, tensor: Tensor) -> Json:
    import torch

    if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.layout is not torch.strided:
        raise BlobError(f"{path} is a {type(tensor).__name__}: only plain dense tensors are sent")
    if tensor.nbytes > LIMIT_BYTES:
        raise BlobError(f"{path} has {tensor.nbytes} bytes: outputs above {LIMIT_BYTES} bytes are not sent")
    plain = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    data = ctypes.string_at(plain.data_ptr(), plain.nbytes) if plain.nbytes else b""
    dtype = str(plain.dtype).removeprefix("torch.")
    return {"dtype": dtype, "shape": list(plain.shape), "data": base64.b64encode(data).decode()}


def _tensor_of(told: Json) -> Tensor:
    import torch

    dtype, data = getattr(torch, told["dtype"]), bytearray(base64.b64decode(told["data"]))
    flat = torch.frombuffer(data, dtype=dtype) if data else torch.empty(0, dtype=dtype)
    return flat.reshape(told["shape"])
