"""DTensors of real modules and optimizers, on a mesh of one rank, as leaves and back."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.overrides import TorchFunctionMode

import torchrelay
from torchrelay import Job, JobRunner, LocalSession, max_epochs, open_checkpoint
from torchrelay.checkpoint.files.blob_files import load_blobs, save_blobs
from torchrelay.checkpoint.files.blob_reader import open_blob_file
from torchrelay.checkpoint.files.load_into import FileSource
from torchrelay.checkpoint.format.mesh import Mesh
from torchrelay.checkpoint.format.mesh_geometry import Replicated, Sharded
from torchrelay.checkpoint.save.staging import Copier
from torchrelay.checkpoint.state.flatten import leaves_of
from torchrelay.checkpoint.state.leaf import empty_like, spec_of, target_of
from torchrelay.errors import BlobError


@pytest.fixture(autouse=True)
def gloo(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def fsdp():
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    fully_shard(model[0])
    fully_shard(model)
    return model


def test_a_module_that_was_just_evaluated_shows_its_shards():
    """After a forward pass without backward FSDP2 still holds gathered parameters; leaves are the shards."""
    model = fsdp()
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    expected = [leaf.name for leaf in leaves_of({"model": model, "optimizer": optimizer})]
    with torch.no_grad():
        model(torch.ones(2, 3))
    leaves = leaves_of({"model": model, "optimizer": optimizer})
    assert [leaf.name for leaf in leaves] == expected
    sharded = [leaf.name for leaf in leaves if isinstance(leaf.content, DTensor)]
    assert len(sharded) == 4 * 3
    assert not [name for name in sharded if ".param." in name]
    assert not [leaf.name for leaf in leaves if leaf.name.endswith(".step") and leaf.name in sharded]


def test_leaves_on_equal_device_meshes_have_one_mesh():
    """However many device meshes FSDP makes for its modules: of thousands of ranks a mesh is long."""
    model = fsdp()
    assert model[0].weight.device_mesh is not model[1].weight.device_mesh
    specs = [spec_of(leaf) for leaf in leaves_of({"model": model}) if isinstance(leaf.content, DTensor)]
    assert len(specs) == 4 and len({id(spec.sharding) for spec in specs}) == 1
    other = distribute_tensor(torch.ones(4, 4), model[0].weight.device_mesh, [Shard(1)])
    (leaf,) = leaves_of({"other": other})
    assert spec_of(leaf).sharding != specs[0].sharding


def test_fsdp1_is_refused_with_the_way_out():
    """Flat parameters are not saved under names that nobody could load."""
    model = FullyShardedDataParallel(nn.Linear(2, 2), device_id=torch.device("cpu"))
    with pytest.raises(BlobError, match=r"blob 'model' is wrapped by FullyShardedDataParallel.*fsdp_state"):
        leaves_of({"model": model})


def test_a_blob_file_takes_no_shards(tmp_path):
    """One process writes the file, so it would lack what the others hold."""
    with pytest.raises(BlobError, match=r"weight is a sharded tensor.*full_tensor"):
        save_blobs(tmp_path / "file", {"model": fsdp()})


def test_a_blob_file_is_read_into_shards(tmp_path):
    """A file of whole tensors loads into FSDP2 in place."""
    plain, model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)), fsdp()
    save_blobs(tmp_path / "file", {"model": plain})
    FileSource(open_blob_file(tmp_path / "file")).load({"model": model}, strict=True, rename=None)
    for name, tensor in load_blobs(tmp_path / "file", "model", prefix="model.").items():
        assert torch.equal(model.state_dict()[name].full_tensor(), tensor)


class Copies(TorchFunctionMode):
    """Counts the copies into DTensors inside of it."""

    count = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.count += func is torch.Tensor.copy_ and isinstance(args[0], DTensor)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("hooked", [False, True])
def test_fsdp_computes_with_what_was_loaded_and_nothing_is_copied_onto_itself(tmp_path, hooked):
    """FSDP2's own hooks need no `load_state_dict`, which would send each DTensor through torch; others do."""
    plain, model, told = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)), fsdp(), []
    save_blobs(tmp_path / "file", {"model": plain})
    if hooked:
        model[1].register_load_state_dict_post_hook(lambda module, keys: told.append(keys))
    x = torch.ones(2, 3)
    with torch.no_grad():
        model(x)  # gathered parameters of before must not be computed with again
        with Copies() as copies:
            FileSource(open_blob_file(tmp_path / "file")).load({"model": model}, strict=True, rename=None)
        assert torch.equal(model(x), plain(x))
    assert (copies.count, len(told)) == ((4, 1) if hooked else (0, 0))


def test_new_state_is_placed_as_saved_or_as_its_parameter_or_whole():
    """Saved placements hold on an equal mesh; else those of the parameter, where the shapes are one."""
    mesh = init_device_mesh("cpu", (1, 1))
    model = distribute_tensor(torch.ones(4, 2), mesh, [Shard(0), Replicate()])
    saved = Mesh((0,), (1, 1), (Replicated(), Sharded(1)))
    placed = {
        "saved": empty_like(model, (4, 2), torch.float32, saved),
        "parameter": empty_like(model, (4, 2), torch.float32, Mesh((0,), (1,), (Sharded(1),))),
        "whole": empty_like(model, (4, 1), torch.float32, None),
    }
    assert {name: one.placements for name, one in placed.items()} == {
        "saved": (Replicate(), Shard(1)),
        "parameter": (Shard(0), Replicate()),
        "whole": (Replicate(), Replicate()),
    }
    assert [tuple(one.shape) for one in placed.values()] == [(4, 2), (4, 2), (4, 1)]


def test_a_local_part_of_another_shape_is_refused():
    """What placements say of a tensor must be so before anything is planned by it."""
    mesh = init_device_mesh("cpu", (1,))
    wrong = DTensor.from_local(torch.ones(3), mesh, [Shard(0)], run_check=False, shape=(4,), stride=(1,))
    (leaf,) = leaves_of({"x": wrong})
    assert spec_of(leaf).shape == (4,)
    with pytest.raises(BlobError, match=r"the local part of 'x' has shape \[3\], .* it has \[4\]"):
        target_of(wrong, "x")


@pytest.mark.parametrize("where", ["init", "setup", "epoch"])
def test_a_model_is_sharded_where_a_resume_shards_it_too(tmp_path: Path, where: str) -> None:
    """Not in `init`, which a resume skips: it would train on with whole tensors."""

    def start(epochs: int) -> nn.Module:
        torchrelay.seed(0)
        model = nn.Linear(4, 4)
        job = Job("sharded", blobs={"model": model})

        def shard() -> None:
            if not isinstance(model, FSDPModule):
                fully_shard(model)

        def epoch() -> None:
            if where == "epoch":
                shard()
            with torch.no_grad():
                model.weight.add_(1)

        job.epoch(epoch)
        if where != "epoch":
            getattr(job, where)(shard)
        job.stop_when(max_epochs(epochs))
        with LocalSession() as session:
            JobRunner(job, tmp_path / "run", best=None).train(session)
        return model

    if where == "init":
        with pytest.raises(BlobError, match=r"model.weight, model.bias of trainer_0 .* in init.*@job.setup"):
            start(1)
        return
    start(1)
    resumed = start(2)
    assert isinstance(resumed, FSDPModule)
    assert open_checkpoint(tmp_path / "run").epoch == 2


class Average:
    """An object that has its tensors only after the first step."""

    held = None

    def state_dict(self):
        return {"held": self.held}

    def load_state_dict(self, state):
        self.held = state["held"]


@pytest.mark.parametrize("kind", [dict, Average])
def test_shards_that_came_while_training_come_back_as_shards(tmp_path, kind):
    """A DTensor for which a new start has no place lies on the mesh of the model's again."""
    for epochs in (1, 2):
        model, kept = fsdp(), kind()
        job = Job("average", blobs={"kept": kept, "model": model})

        @job.epoch
        def train(ctx, model=model, kept=kept):
            held = kept if kind is dict else vars(kept)
            before = (kept if kind is dict else kept.held) or {}
            found = {name: before.get(name, 0) + one.detach() for name, one in model.state_dict().items()}
            held.update(found if kind is dict else {"held": found})
            assert all(isinstance(one, DTensor) for one in found.values())

        job.stop_when(max_epochs(epochs))
        assert int(JobRunner(job, tmp_path / "run", code=False, best=None).train()) == epochs


def test_an_operation_on_a_dtensor_that_is_being_copied_is_counted(tmp_path, monkeypatch):
    """Torch counts it in the DTensor and not in its local part: the save says so, and the next one holds."""
    wrote, copy_late = threading.Event(), Copier.copy_late
    model = nn.Linear(256, 256)
    mesh = init_device_mesh("cpu", (1,))
    model.weight = nn.Parameter(distribute_tensor(model.weight.detach(), mesh, [Shard(0)]))
    model.bias = nn.Parameter(distribute_tensor(model.bias.detach(), mesh, [Replicate()]))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    job = Job("rows", blobs={"model": model, "optimizer": optimizer})
    rows = []

    def late(*given):
        wrote.wait(2.0)
        copy_late(*given)

    @job.epoch
    def train(ctx):
        with torch.no_grad():
            model.weight[100].fill_(ctx.epoch)  # where no stretch is looked at
        wrote.set()
        rows.append(model.weight.detach().to_local()[100].clone())

    monkeypatch.setattr(Copier, "copy_late", late)
    job.stop_when(max_epochs(3))
    with pytest.warns(UserWarning, match=r"epoch 0 was NOT saved.*'model\.weight' changed while"):
        JobRunner(job, tmp_path / "run", asynchronous=True, keep_last=None).train(LocalSession())
    for epoch in (1, 2, 3):
        stored = open_checkpoint(tmp_path / "run", epoch=epoch)["model.weight"][100]
        assert torch.equal(stored, rows[epoch - 1])
