"""A package as what is served: the answers of its model, held to its signature, without its code."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest
import torch
from served import serving

import torchrelay
from torchrelay.errors import UsageError
from torchrelay.jobs.runtime import Signature, TensorSpec
from torchrelay.tools.serving.program_server import PackageSource, batch_size_of


class Two(torch.nn.Module):
    """Two inputs and two outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 2)

    def forward(self, x: torch.Tensor, shift: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = self.layer(x) + shift[:, None]
        return y, y.argmax(1)


def test_a_package_is_served_and_held_to_its_signature(tmp_path: Path):
    """Named inputs and outputs, metadata and labels; what does not fit is a 422 that names the input."""
    torch.manual_seed(0)
    model = Two().eval()
    x, shift = torch.randn(6, 4), torch.arange(6.0)
    with torch.inference_mode():
        wanted = [one.tolist() for one in model(x[:1], shift[:1])]
        all_wanted = model(x, shift)[0]
    path = str(tmp_path / "two.zip")
    about = {"run": "runs/two", "epoch": 7, "code_id": "c0de"}
    torchrelay.save(path, model, (x[:2], shift[:2]), labels=["a", "b"], metadata=about)
    served = PackageSource(path, None, None).first()
    with serving(served) as here:
        told = here.client.get("/metadata").json()
        assert (told["run"], told["epoch"], told["code_id"]) == ("runs/two", 7, "c0de")
        assert told["labels"] == ["a", "b"]
        first, second = (one["name"] for one in told["signature"]["inputs"])
        names = [one["name"] for one in told["signature"]["outputs"]]

        def ask(sample: object) -> httpx.Response:
            return here.predict(sample)

        answer = ask({first: x[0].tolist(), second: 0}).json()
        assert answer["epoch"] == 7 and answer["result"] == dict(
            zip(names, [wanted[0][0], wanted[1][0]], strict=True)
        )
        samples = [{first: one.tolist(), second: float(two)} for one, two in zip(x, shift, strict=True)]
        several = here.client.post("/predict", json={"samples": samples}).json()["results"]
        assert torch.allclose(torch.tensor([one[names[0]] for one in several]), all_wanted, atol=1e-6)
        for sample in ([1, 2], {first: [1, 2], second: 0}, {first: [1, 2, 3, 4]}, {first: "a", second: 0}):
            refused = ask(sample)
            assert refused.status_code == 422 and (first in refused.text or second in refused.text)
    assert PackageSource(path, None, None).newer(served) is None
    with pytest.raises(UsageError, match="nothing"):
        PackageSource(str(tmp_path / "nothing.zip"), None, None).first()


def test_only_batches_of_any_size_or_of_one_are_served():
    """The first size of all inputs is the batch's: free, or 1."""

    def of(*shapes: tuple[int | str, ...]) -> Signature:
        return Signature(tuple(TensorSpec(f"x{at}", one, "float32") for at, one in enumerate(shapes)), ())

    assert batch_size_of(of(("batch", 3), ("batch",))) == "batch" and batch_size_of(of((1, 3))) == 1
    for shapes in (((4, 3),), (("batch", 3), (3,)), ((),), ()):
        with pytest.raises(UsageError, match="first size"):
            batch_size_of(of(*shapes))
