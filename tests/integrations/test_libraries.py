"""Objects of real libraries: saved, resumed by the same program to equal bits, opened elsewhere.

They need the extra `test-integrations`; what is missing is skipped, with its reason.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import torchrelay
from torchrelay import Job, JobRunner, export_checkpoint, max_epochs, open_checkpoint
from torchrelay.checkpoint.state.flatten import leaves_of
from torchrelay.checkpoint.state.leaf import Value

pytestmark = [
    pytest.mark.timeout(300),  # importing some of these takes many seconds
    pytest.mark.filterwarnings("default"),  # theirs are not ours to mend
]

EPOCHS = 3
Build = Callable[[], dict[str, Any]]
Train = Callable[[dict[str, Any], Any], None]


def run(where: Path, epochs: int, build: Build, train: Train) -> dict[str, Any]:
    """Run a program of this library to an epoch, from objects of its own, or resume it."""
    torchrelay.seed(0)
    blobs = build()
    job = Job("integration", blobs=blobs)
    job.epoch(lambda ctx: train(blobs, ctx))
    job.stop_when(max_epochs(epochs))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        JobRunner(job, where, best=None).train()
    return blobs


def check_resumes(tmp_path: Path, build: Build, train: Train) -> Path:
    """Whether a run that was resumed after each epoch ends like one that never was; returns its directory."""
    whole = run(tmp_path / "whole", EPOCHS, build, train)
    for epochs in range(1, EPOCHS + 1):
        resumed = run(tmp_path / "resumed", epochs, build, train)
    expected, found = state_of(whole), state_of(resumed)
    assert expected.keys() == found.keys()
    for name, content in expected.items():
        other = found[name]
        same = torch.equal(content, other) if isinstance(content, torch.Tensor) else content == other
        assert same, name
    return tmp_path / "resumed"


def state_of(blobs: dict[str, Any]) -> dict[str, Any]:
    """The content of every leaf, tensors as they are and values as JSON."""
    return {
        leaf.name: leaf.content.json if isinstance(leaf.content, Value) else leaf.content
        for leaf in leaves_of(blobs)
    }


def regression(blobs: dict[str, Any], _: Any) -> None:
    """Two steps on data of the random streams."""
    for _step in range(2):
        blobs["optimizer"].zero_grad()
        blobs["model"](torch.randn(4, 64)).square().mean().backward()
        blobs["optimizer"].step()


def test_torchao_eight_bit_adamw_resumes_to_equal_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """AdamW8bit keeps its moments in tensor subclasses, of which a new start has no live tensor."""
    optim = pytest.importorskip("torchao.optim")

    def build() -> dict[str, Any]:
        model = nn.Sequential(
            nn.Linear(64, 128), nn.Linear(128, 64)
        )  # 8,192 elements: large enough to quantise
        return {"model": model, "optimizer": optim.AdamW8bit(model.parameters(), lr=1e-2)}

    # Its step is compiled; the graph is run as it is, because the C++ backend takes half a minute here.
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    check_resumes(tmp_path, build, regression)


def test_torchao_quantised_module_is_saved_and_loaded(tmp_path: Path) -> None:
    """A module of which quantize_ made int8 weights comes back with the same codes, scales and answers."""
    quantization = pytest.importorskip("torchao.quantization")

    def build() -> nn.Module:
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
        quantization.quantize_(model, quantization.Int8WeightOnlyConfig())
        return model

    saved = build()
    torchrelay.save_blobs(tmp_path / "model.safetensors", {"model": saved})
    other = build()
    with torch.no_grad():
        for part in other:
            part.bias.fill_(7.0)
    torchrelay.load_into(tmp_path / "model.safetensors", {"model": other})
    x = torch.randn(3, 64)
    assert torch.equal(saved(x), other(x))


def test_peft_lora_resumes_with_the_base_frozen(tmp_path: Path) -> None:
    """A LoRA model trains its adapters alone, resumes to equal bits, and its base stays frozen."""
    peft = pytest.importorskip("peft")

    def build() -> dict[str, Any]:
        base = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 4))
        model = peft.get_peft_model(base, peft.LoraConfig(r=4, target_modules=["0"]))
        trained = [one for one in model.parameters() if one.requires_grad]
        return {"model": model, "optimizer": torch.optim.AdamW(trained, lr=1e-2)}

    run_dir = check_resumes(tmp_path, build, regression)
    adapters = open_checkpoint(run_dir).load_tensors("model.*lora_*")
    assert len(adapters) == 2
    assert any(bool(one.any()) for name, one in adapters.items() if "lora_B" in name)


def test_transformers_with_tied_weights_resumes_and_loads_with_from_pretrained(tmp_path: Path) -> None:
    """A tiny GPT-2 whose head is its embedding: equal bits, and transformers loads its export."""
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(vocab_size=50, n_positions=16, n_embd=16, n_layer=1, n_head=2)

    def build() -> dict[str, Any]:
        model = transformers.GPT2LMHeadModel(config)
        return {"model": model, "optimizer": torch.optim.AdamW(model.parameters(), lr=1e-2)}

    def train(blobs: dict[str, Any], _: Any) -> None:
        tokens = torch.randint(50, (2, 8))
        blobs["optimizer"].zero_grad()
        blobs["model"](input_ids=tokens, labels=tokens).loss.backward()
        blobs["optimizer"].step()

    run_dir = check_resumes(tmp_path, build, train)
    export_checkpoint(run_dir, tmp_path / "hf", to="hf", blobs="model", prefix="model.")
    config.save_pretrained(tmp_path / "hf")
    loaded = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "hf")
    plain = transformers.GPT2LMHeadModel(config)
    open_checkpoint(run_dir).load({"model": plain})
    assert plain.lm_head.weight is plain.transformer.wte.weight
    tokens = torch.arange(8)[None]
    with torch.no_grad():
        assert torch.equal(loaded.eval()(tokens).logits, plain.eval()(tokens).logits)


class Numbers(torch.utils.data.Dataset[float]):
    """Forty numbers, each with a random part of its own."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> float:
        return index + 0.5 * torch.rand(()).item()


@pytest.mark.parametrize("workers", [0, 2])
def test_torchdata_stateful_loader_gives_each_epoch_the_same_samples(tmp_path: Path, workers: int) -> None:
    """Shuffled orders and random augmentation go on, at the end of epochs, as in an undisturbed run."""
    stateful = pytest.importorskip("torchdata.stateful_dataloader")
    seen: list[list[float]] = []

    def build() -> dict[str, Any]:
        loader = stateful.StatefulDataLoader(Numbers(), batch_size=8, shuffle=True, num_workers=workers)
        return {"loader": loader, "total": torch.zeros(())}

    def train(blobs: dict[str, Any], ctx: Any) -> None:
        seen.append([one.item() for batch in ctx.steps(blobs["loader"]) for one in batch])
        blobs["total"].add_(sum(seen[-1]))

    run(tmp_path / "whole", EPOCHS, build, train)
    undisturbed = list(seen)
    seen.clear()
    for epochs in range(1, EPOCHS + 1):
        run(tmp_path / "resumed", epochs, build, train)
    assert seen == undisturbed
    assert len({tuple(map(int, order)) for order in seen}) == EPOCHS


def test_torchmetrics_that_persist_resume_their_counts(tmp_path: Path) -> None:
    """A metric that gathers over epochs, made persistent, goes on counting where the last start ended."""
    torchmetrics = pytest.importorskip("torchmetrics")

    def build() -> dict[str, Any]:
        metrics = torchmetrics.MetricCollection(
            {
                "mean": torchmetrics.MeanMetric(),
                "accuracy": torchmetrics.classification.MulticlassAccuracy(num_classes=3),
            }
        )
        metrics.persistent(True)
        return {"metrics": metrics}

    def train(blobs: dict[str, Any], _: Any) -> None:
        metrics = blobs["metrics"]
        metrics["mean"].update(torch.randn(5))
        metrics["accuracy"].update(torch.randint(3, (5,)), torch.randint(3, (5,)))

    check_resumes(tmp_path, build, train)


def test_transformers_resnet_with_batch_norm_resumes_to_equal_bits(tmp_path: Path) -> None:
    """Running statistics of a real network with BatchNorm are those of an undisturbed run."""
    transformers = pytest.importorskip("transformers")
    config = transformers.ResNetConfig(
        num_channels=1,
        embedding_size=8,
        hidden_sizes=[8, 16],
        depths=[1, 1],
        layer_type="basic",
        num_labels=3,
    )

    def build() -> dict[str, Any]:
        model = transformers.ResNetForImageClassification(config)
        return {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)}

    def train(blobs: dict[str, Any], _: Any) -> None:
        blobs["optimizer"].zero_grad()
        blobs["model"](torch.randn(4, 1, 32, 32)).logits.square().mean().backward()
        blobs["optimizer"].step()

    check_resumes(tmp_path, build, train)


@pytest.mark.parametrize("library", ["torchvision", "timm"])
def test_image_networks_resume_to_equal_bits(tmp_path: Path, library: str) -> None:
    """The same of torchvision's and timm's own ResNets, where these can be imported."""
    try:
        module = pytest.importorskip(f"{library}.models" if library == "torchvision" else library)
    except RuntimeError as error:  # its compiled operators are for another build of torch
        pytest.skip(f"{library} cannot be imported with this build of torch: {error}")

    def build() -> dict[str, Any]:
        model = (
            module.resnet18(num_classes=3) if library == "torchvision" else module.create_model("resnet10t")
        )
        return {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)}

    def train(blobs: dict[str, Any], _: Any) -> None:
        blobs["optimizer"].zero_grad()
        blobs["model"](torch.randn(2, 3, 64, 64)).square().mean().backward()
        blobs["optimizer"].step()

    check_resumes(tmp_path, build, train)
