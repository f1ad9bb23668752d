"""A program as a server: for one sample what `eval` does, for several at once the same steps on a batch."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from os import PathLike
from typing import Any

from torchrelay.runners.programs.program import Samples
from torchrelay.runners.serving.refusal import FaultyAnswerError
from torchrelay.runners.serving.trees import joined, rows, shape_of


class ProgramHandler:
    """Batches are made where `prepare_sample` and `eval` are torchrelay's own, or `batches_samples` says so.

    Of any other nobody knows which dimension is the batch's. `own_mode`: an `eval` of the user's chooses for
    itself whether gradients are wanted.
    """

    def __init__(self, program: Samples) -> None:
        self._program = program
        kind = type(program)
        self.own_mode = kind.eval is not Samples.eval
        own_batch = kind.prepare_sample is Samples.prepare_sample
        asked = program.batches_samples
        self._batches = not self.own_mode and (own_batch if asked is None else asked)
        program.model.eval()

    def decode(self, sent: Any) -> Any:
        """What the program makes of it."""
        return self._program.decode_sample(sent)

    def alike(self, sample: Any) -> Hashable:
        """Shapes and types; each sample for itself where no batches are made."""
        return shape_of(sample) if self._batches else object()

    def predict(self, samples: Sequence[Any]) -> Sequence[Any]:
        """Results, one after the other or as one batch."""
        if len(samples) > 1:
            return self._batch(samples)
        if isinstance(samples[0], (str, PathLike)) and self.own_mode:
            raise ValueError("a text is no sample here: eval would take it for the name of a file")
        return [self._program.eval(samples[0]) if self.own_mode else self._program.result_of(samples[0])]

    def encode(self, result: Any) -> Any:
        """What the program says that clients get."""
        return self._program.encode_result(result)

    def _batch(self, samples: Sequence[Any]) -> list[Any]:
        program = self._program
        with program.evaluating():
            output = program.forward(joined([program.prepare_sample(one) for one in samples]))
            try:
                parts = rows(output, len(samples))
            except ValueError as error:
                raise FaultyAnswerError(f"{error}; say batches_samples = False in the program") from None
            return [program.postprocess(part) for part in parts]
