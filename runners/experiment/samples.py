"""What a program does with a sample of a user's: from a file to a result in a file."""

from __future__ import annotations

import json
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from torchrelay.errors import UsageError
from torchrelay.runners.experiment.steps import Steps, moved


class Samples(Steps):
    """Evaluation of samples: `load_sample`, `prepare_sample`, `forward`, `postprocess`, `store_result`."""

    result_suffix: str = ".json"
    """What is added to the names of inputs where a directory of results is written."""
    batches_samples: bool | None = None
    """Whether the server may join prepared samples along their first dimension, and compute several at once.
    None: only where `prepare_sample` is torchrelay's own, of which it is known."""

    def load_sample(self, path: Path) -> Any:
        """The sample in a file: numbers as text, or JSON. Raises UsageError for anything else.

        A single row of text is a vector, as `[1, 2]` of JSON; several are a matrix.
        """
        try:
            text = path.read_text(encoding="utf-8")
            if path.suffix == ".json":
                return self._as_inputs(torch.tensor(json.loads(text)))
            rows = [[float(word) for word in line.replace(",", " ").split()] for line in text.splitlines()]
            rows = [row for row in rows if row]
            return torch.tensor(rows[0] if len(rows) == 1 else rows)
        except (ValueError, TypeError, RecursionError) as error:
            raise UsageError(
                f"{path} holds no numbers as text or JSON ({error}): write load_sample(self, path) for it"
            ) from None

    def prepare_sample(self, sample: Any) -> Any:
        """Inputs of a sample: on the device, as a batch of one."""
        return moved(sample.unsqueeze(0) if isinstance(sample, torch.Tensor) else sample, self.device)

    def postprocess(self, output: Any) -> Any:
        """What a user wants of the output of a batch of one: its only row."""
        return output[0]

    def store_result(self, result: Any, path: Path) -> None:
        """Write a result to a file, as JSON; tensors as lists. The file takes its place when it is whole."""
        path.write_text(json.dumps(_plain(result), indent=1) + "\n", encoding="utf-8")

    def example_inputs(self) -> Any:
        """What the model is called with, for `to_onnx`: the inputs of the first batch of a dataset."""
        name = next((one for one in ("test", "val", "train") if one in self.data), "train")
        batch = next(iter(self.make_loader(self.dataset(name), training=False)))
        return (self.prepare(batch)[0],)

    def eval(self, sample: Any) -> Any:
        """The result for a sample, or for the file of a path: evaluation mode, no gradients."""
        if isinstance(sample, (str, Path)):
            sample = self.load_sample(Path(sample))
        return self.result_of(sample)

    def result_of(self, sample: Any) -> Any:
        """The same for what is a sample already, whatever it is; no text is taken for the name of a file."""
        with self.evaluating():
            return self.postprocess(self.forward(self.prepare_sample(sample)))

    # For clients of the server

    def decode_sample(self, sent: Any) -> Any:
        """A sample of what a client sent: numbers as in a file of JSON, tensors as they are.

        `sent` is JSON, or a dict of tensors by name; of one tensor the name does not matter. Raises
        ValueError or TypeError for anything else.
        """
        if isinstance(sent, dict):
            named = {name: self.decode_sample(one) for name, one in sent.items()}
            return next(iter(named.values())) if len(named) == 1 else named
        if isinstance(sent, torch.Tensor):
            return sent
        try:
            return self._as_inputs(torch.tensor(sent))
        except (RuntimeError, OverflowError) as error:
            raise ValueError(f"no numbers: {error}") from None

    def _as_inputs(self, sample: torch.Tensor) -> torch.Tensor:
        """Whole numbers as the inputs of the datasets are: of a model that takes fractions, fractions."""
        whole = not sample.is_floating_point() and not sample.is_complex() and sample.dtype is not torch.bool
        return sample.to(torch.get_default_dtype()) if whole and self._takes_fractions else sample

    @cached_property
    def _takes_fractions(self) -> bool:
        try:
            inputs = self.example_inputs()[0]
        except Exception:  # no dataset that could say
            return False
        return isinstance(inputs, torch.Tensor) and inputs.is_floating_point()

    def encode_result(self, result: Any) -> Any:
        """What a client gets of a result: tensors, numbers, texts, lists and dicts of these. As it is."""
        return result


def _plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if isinstance(value, dict):
        return {str(name): _plain(one) for name, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(one) for one in value]
    return value
