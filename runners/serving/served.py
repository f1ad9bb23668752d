"""What is served: an epoch of a run, or a package, with what answers for it; and where it comes from."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import field
from typing import Any, Protocol

from torchrelay.jobs.runtime import Signature
from torchrelay.records import dataclass

Say = Callable[[str], None]


class ServingHandler(Protocol):
    """What stands around a model: from what clients send to samples, to results, to what they get.

    `--handler module:Class` names a class that is made with `(module, signature)`. `ValueError` and
    `TypeError` of `decode` and `predict` refuse the sample and are told to the client.
    """

    def decode(self, sent: Any) -> Any:
        """A sample of what a client sent: JSON, or a dict of tensors where the body was binary."""

    def alike(self, sample: Any) -> Hashable:
        """Samples of which this is equal may be predicted in one batch."""

    def predict(self, samples: Sequence[Any]) -> Sequence[Any]:
        """A result for each; called in the one thread that computes, in inference mode."""

    def encode(self, result: Any) -> Any:
        """What a client gets: tensors, numbers, texts, None, and lists and dicts of these."""


@dataclass(frozen=True)
class Served:
    """What answers requests now. `key` tells epochs apart; `signature` is None where none is known."""

    name: str
    handler: ServingHandler = field(repr=False)
    epoch: int | None = None
    branch: int | None = None
    code_id: str | None = None
    signature: Signature | None = None
    key: Hashable = None
    about: dict[str, Any] = field(default_factory=dict, hash=False)

    def to_json(self) -> dict[str, Any]:
        """What `/metadata` says."""
        told = {"run": self.name, "epoch": self.epoch, "branch": self.branch, "code_id": self.code_id}
        signature = self.signature.to_json() if self.signature is not None else None
        return {**told, "signature": signature, **self.about}


class Source(Protocol):
    """Where what is served comes from."""

    def first(self) -> Served:
        """Load it; raises the errors of opening and loading."""

    def newer(self, served: Served) -> Served | None:
        """What is to take its place, loaded; None where nothing is. Raises errors, also temporary ones."""


class Holder:
    """What is served now. Read by many threads, replaced by one; a reference is taken or replaced whole."""

    def __init__(self, served: Served) -> None:
        self.current = served
        self.draining = False
