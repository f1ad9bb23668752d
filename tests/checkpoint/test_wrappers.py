"""Wrappers of torch do not show in names: each wrapping saves, and each other one resumes to equal bits."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._composable import replicate
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper, offload_wrapper
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel

from torchrelay import Job, JobRunner, LocalSession, export_checkpoint, max_epochs, open_checkpoint
from torchrelay.checkpoint.state.flatten import leaves_of
from torchrelay.checkpoint.state.leaf import Value
from torchrelay.checkpoint.state.names import submodule
from torchrelay.models.archive.api import get_params
from torchrelay.runners.session.context import full_state_dict

FROZEN = Path(__file__).resolve().parent.parent / "golden/epochs_wrapped"

pytestmark = pytest.mark.filterwarnings("ignore")  # torch warns of sharding compiled modules


@pytest.fixture(scope="module", autouse=True)
def gloo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """One process group of one rank: DDP, `replicate` and FSDP2 need one."""
    store = tmp_path_factory.mktemp("gloo") / "store"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))


def compiled(module: nn.Module) -> Any:
    return torch.compile(module, backend="eager")


def compiled_in_place(module: nn.Module) -> nn.Module:
    module.compile(backend="eager")
    return module


def inside(wrap: Callable[[nn.Module], nn.Module]) -> nn.Module:
    """The net with both its layers wrapped."""
    module: Any = net()
    module[0], module[1] = wrap(module[0]), wrap(module[1])
    return module


def shard(module: nn.Module) -> nn.Module:
    fully_shard(module)
    return module


class Stripping(nn.Module):
    """A user's wrapper: hooks take its child out of state dict keys, and put it back."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.inside = module
        self._register_state_dict_hook(self._strip)
        self.register_load_state_dict_pre_hook(self._restore)

    @staticmethod
    def _strip(_: nn.Module, state: dict[str, Any], prefix: str, __: Any) -> None:
        for key in [key for key in state if key.startswith(f"{prefix}inside.")]:
            state[prefix + key[len(prefix) + len("inside.") :]] = state.pop(key)

    @staticmethod
    def _restore(_: nn.Module, state: dict[str, Any], prefix: str, *__: Any) -> None:
        for key in [key for key in state if key.startswith(prefix)]:
            state[f"{prefix}inside.{key[len(prefix) :]}"] = state.pop(key)


WRAPPINGS: dict[str, Callable[[], nn.Module]] = {
    "bare": net,
    "ddp": lambda: DistributedDataParallel(net()),
    "data parallel": lambda: nn.DataParallel(net()),
    "compile(ddp)": lambda: compiled(DistributedDataParallel(net())),
    "compile in place": lambda: compiled_in_place(net()),
    "layers compiled": lambda: inside(compiled),
    "layers checkpointed": lambda: inside(checkpoint_wrapper),
    "layers offloaded": lambda: inside(offload_wrapper),
    "layers ddp": lambda: inside(DistributedDataParallel),
    "compile(checkpointed)": lambda: compiled(checkpoint_wrapper(net())),
    "checkpointed(compile)": lambda: checkpoint_wrapper(compiled(net())),
    "checkpointed(ddp(layers checkpointed(compile)))": lambda: checkpoint_wrapper(
        DistributedDataParallel(inside(lambda one: checkpoint_wrapper(compiled(one))))
    ),
    "replicate(compile)": lambda: replicate(compiled(net())),
    "fsdp(layers fsdp)": lambda: shard(inside(shard)),
    "fsdp(layers fsdp(compile))": lambda: shard(inside(lambda one: shard(compiled(one)))),
    "fsdp(layers fsdp(checkpointed))": lambda: shard(inside(lambda one: shard(checkpoint_wrapper(one)))),
    "fsdp(compile)": lambda: shard(compiled(net())),
    "compile(fsdp)": lambda: compiled(shard(net())),
    "stripping(compile)": lambda: Stripping(compiled(net())),
    "compile(stripping(checkpointed))": lambda: compiled(Stripping(checkpoint_wrapper(net()))),
}


NAMES = list(WRAPPINGS)


def built(number: int, wrapping: str, *, trained: bool = False) -> dict[str, Any]:
    """A module wrapped so, and its optimizer, as blobs with a number."""
    module = WRAPPINGS[wrapping]()
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)
    if trained:
        for place, parameter in enumerate(module.parameters()):
            parameter.grad = torch.full_like(parameter, place + 1.0)
        optimizer.step()
        for buffer in module.buffers():
            buffer.add_(1)
    return {f"net{number}": module, f"opt{number}": optimizer}


def content(number: int, objects: Mapping[str, Any]) -> dict[str, Any]:
    """Every leaf by its name, in a form to compare, of the blobs with a number as if it were none."""
    found = {}
    for leaf in leaves_of({name: objects[name] for name in (f"net{number}", f"opt{number}")}):
        value: Any = leaf.content
        if isinstance(value, Value):
            form = json.loads(json.dumps(value.json).replace(f"net{number}.", "net."))
        else:
            form = getattr(value, "full_tensor", lambda value=value: value)().tolist()
        found[leaf.name.replace(f"net{number}.", "net.").replace(f"opt{number}.", "opt.")] = form
    return found


def train(objects: Mapping[str, Any], where: Path, epochs: int) -> None:
    """Epochs in which nothing changes."""
    job = Job("wrapped", blobs=dict(objects))
    job.epoch(lambda ctx: None)
    job.stop_when(max_epochs(epochs))
    with LocalSession(["trainer_0"]) as session:
        JobRunner(job, where, best=None).train(session)


def program(shift: int, *, trained: bool = False) -> dict[str, Any]:
    """Blobs by number; with a shift each of them is wrapped in another way."""
    found: dict[str, Any] = {}
    for number in range(len(NAMES)):
        found.update(built(number, NAMES[(number + shift) % len(NAMES)], trained=trained))
    return found


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, gloo: None) -> Path:
    """A run whose blobs are wrapped in every way."""
    where = tmp_path_factory.mktemp("wrapped")
    train(program(0, trained=True), where, 1)
    return where


def test_each_wrapping_saves_and_each_other_loads(run: Path) -> None:
    """What any wrapping saved, any other loads to equal bits: parameters, buffers and optimizer state."""
    expected = content(0, built(0, "bare", trained=True))
    checkpoint = open_checkpoint(run, epoch=1)
    for number, saving in enumerate(NAMES):
        for loading in NAMES:
            objects = built(number, loading)
            checkpoint.load(objects)
            assert content(number, objects) == expected, f"{saving} to {loading}"


def test_a_run_is_resumed_with_other_wrappings(run: Path) -> None:
    """Every wrapping of a run changes from one start to the next, and its state stays what it was."""
    expected = content(0, built(0, "bare", trained=True))
    for epochs, shift in ((2, 1), (3, 6), (4, 13)):
        objects = program(shift)
        train(objects, run, epochs)
        for number, saving in enumerate(NAMES):
            assert content(number, objects) == expected, f"{saving} shifted by {shift}"


@pytest.mark.parametrize("loading", ["bare", "compile(checkpointed)", "fsdp(layers fsdp(compile))"])
@pytest.mark.parametrize("blob", ["inner", "both", "ranks"])
def test_names_with_wrappers_in_old_epochs_still_load(blob: str, loading: str) -> None:
    """An epoch of an older version, whose names hold what wrappers inserted, loads into any wrapping."""
    module = WRAPPINGS[loading]()
    groups = [{"params": [one]} for one in module.parameters()]
    optimizer = torch.optim.AdamW(groups, lr=torch.tensor(0.1), foreach=False)
    result = open_checkpoint(FROZEN).load({blob: module, f"{blob}_opt": optimizer})
    assert not result.missing and not result.unexpected
    for parameter in module.parameters():
        moved = optimizer.state[parameter]["exp_avg"]
        moved = getattr(moved, "full_tensor", lambda moved=moved: moved)()
        assert torch.allclose(moved, torch.full_like(moved, 0.1))
    assert {group["lr"].item() for group in optimizer.param_groups} == {0.5}
    start = dict(net().named_parameters())
    for name, parameter in get_params(module).items():
        whole = getattr(parameter, "full_tensor", lambda parameter=parameter: parameter)()
        assert torch.allclose(whole, start[name] * (1 - 0.5 * 0.01) - 0.5, atol=1e-5), name


def test_a_wrapped_copy_has_the_names_of_a_bare_copy() -> None:
    """What AveragedModel makes of a compiled model is called as what it makes of a bare one."""
    names = [
        [leaf.name for leaf in leaves_of({"ema": AveragedModel(WRAPPINGS[one]())})]
        for one in ("bare", "layers compiled", "checkpointed(compile)")
    ]
    assert names[0][:2] == ["ema.n_averaged", "ema.module.0.weight"]
    assert all(set(one) == set(names[0]) for one in names)


@pytest.mark.parametrize("wrapping", WRAPPINGS)
def test_all_ways_out_have_the_same_names(wrapping: str, tmp_path: Path) -> None:
    """`get_params`, `full_state_dict` and parts of a module are called as in the bare module."""
    bare = net()
    module = WRAPPINGS[wrapping]()
    assert list(get_params(module)) == [name for name, _ in bare.named_parameters()]
    assert set(full_state_dict(module)) == set(bare.state_dict())
    if "stripping" not in wrapping:
        part = submodule(module, "1")
        assert part is not None and hasattr(part, "running_mean")


def test_an_old_epoch_is_exported_under_the_names_of_today(tmp_path: Path) -> None:
    """A file for others has no trace of the wrappers that an older version left in names."""
    from safetensors import safe_open

    for blob in ("both", "ranks"):
        where = tmp_path / f"{blob}.safetensors"
        export_checkpoint(FROZEN, where, blobs=blob, prefix=f"{blob}.")
        with safe_open(where, "pt") as file:
            names = set(file.keys())
        assert blob == "ranks" or names == set(net().state_dict())


def test_a_child_of_a_user_that_is_called_module_keeps_its_name() -> None:
    """Only what torch inserted is left out."""
    module = nn.ModuleDict(
        {"module": compiled(nn.Linear(1, 1)), "other": nn.ModuleDict({"module": nn.Linear(1, 1)})}
    )
    names = [leaf.name for leaf in leaves_of({"m": DistributedDataParallel(checkpoint_wrapper(module))})]
    assert names == ["m.module.weight", "m.module.bias", "m.other.module.weight", "m.other.module.bias"]
