"""Looking at any epoch and loading some of it, without the job."""

from __future__ import annotations

import json
import math
import os

import numpy as np
import pytest
import torch
from epochs import Writing, buffer, moment, parameter, value

from torchrelay.checkpoint.format.position import Facts, Position
from torchrelay.checkpoint.load.checkpoint import open_checkpoint
from torchrelay.checkpoint.state.leaf import Leaf, Role, Value
from torchrelay.checkpoint.storage.local import LocalStorage, LocalWriteHandle
from torchrelay.errors import (
    BlobError,
    DamagedError,
    NoProvableEpochError,
    PartiallyLoadedError,
    UnknownEpochError,
    UsageError,
)


def make_model(fill=None):
    model = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.BatchNorm1d(5), torch.nn.Linear(5, 2))
    if fill is not None:
        with torch.no_grad():
            for tensor in model.state_dict().values():
                tensor.fill_(fill)
    return model


def leaves_of(model, k):
    names = dict(model.named_parameters())
    found = [
        parameter(f"model.{n}", t.detach()) if n in names else buffer(f"model.{n}", t)
        for n, t in model.state_dict().items()
    ]
    return [
        *found,
        value("total", 100 + k),
        value("mine", f"own of {k}"),
        moment("extra.m", torch.full((4,), float(k))),
    ]


ACCURACY = {1: 0.5, 2: 0.9, 3: math.nan, 4: 0.7}


@pytest.fixture
def run(tmp_path):
    """Epochs 0 to 4 of two nodes; `mine` is per node; 3+7 is a position inside an epoch."""
    with Writing(tmp_path / "checkpoints") as writing:
        for k in range(5):
            leaves = leaves_of(make_model(k), k)
            metrics = {"val/acc": ACCURACY[k]} if k else {}
            own = [*leaves[:-2], value("mine", f"trainer_1 of {k}"), leaves[-1]]
            writing.save(
                k, [leaves, own], 2, scopes={"mine": "rank"}, facts=Facts(metrics=metrics, total_steps=10 * k)
            )
        writing.save(4, leaves, 2, step=7)
    return tmp_path


def filled(model, fill):
    return all(bool((tensor == fill).all()) for tensor in model.state_dict().values())


def damage(run, epoch, pattern, offset=-1):
    (path,) = (run / "checkpoints" / "data").glob(f"e{epoch:08d}-*/{pattern}")
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)


def test_last_means_the_newest_whole_epoch(run):
    """A run directory and its prefix open alike; positions inside an epoch are never `last`."""
    for where in (run, str(run), run / "checkpoints"):
        ckpt = open_checkpoint(where)
        assert ckpt.position == Position(4)
        assert ckpt.facts.total_steps == 40
        assert ckpt.nodes == ("trainer_0", "trainer_1")
        assert ckpt.notices == ()


@pytest.mark.parametrize("epoch", [2, "2", np.int64(2), "2,branch=0", " 2 "])
def test_an_epoch_is_named_by_its_number(run, epoch):
    """Whatever is a whole number names an epoch."""
    assert open_checkpoint(run, epoch).value("total") == 102


@pytest.mark.parametrize(
    "epoch",
    [
        -1,
        True,
        1.0,
        "1.5",
        "1e3",
        "",
        "newest",
        "+5",
        "4+7",
        "²",
        "7,branch=x",
        None,
        "9" * 5000,
        "1,branch=-1",
    ],
)
def test_what_names_no_epoch_is_a_usage_error(run, epoch):
    """One clear error that shows what was given and what may be."""
    with pytest.raises(UsageError, match="epoch") as caught:
        open_checkpoint(run, epoch)
    assert not isinstance(caught.value, UnknownEpochError)


def test_an_unknown_epoch_lists_what_there_is(run):
    """The error says which epochs can be opened, on abandoned branches too."""
    with pytest.raises(UnknownEpochError, match=r"no epoch 9 in .*checkpoints: there are epochs 0 to 4"):
        open_checkpoint(run, 9)
    with Writing(run / "checkpoints") as writing:
        writing.log.rewind(Position(2), {"epoch": 2})
        writing.save(3, [value("total", 999)])
    with pytest.raises(
        UnknownEpochError, match=r"epochs 0 to 3; on branch 0 also 3 to 4 \(write 3,branch=0\)"
    ):
        open_checkpoint(run, 4)


def test_abandoned_epochs_are_opened_by_their_branch_and_never_chosen(run):
    """After a rewind the new branch counts; the old one stays readable."""
    with Writing(run / "checkpoints") as writing:
        writing.log.rewind(Position(2), {"epoch": 2})
        writing.save(3, [value("total", 999)])
    assert open_checkpoint(run).value("total") == 999
    assert open_checkpoint(run, 2).value("total") == 102
    assert open_checkpoint(run, "3,branch=0").value("total") == 103
    assert open_checkpoint(run, 4, branch=0).value("total") == 104
    assert open_checkpoint(run, "last", branch=0).value("total") == 104
    with pytest.raises(UsageError, match="no branch 7"):
        open_checkpoint(run, 4, branch=7)
    with pytest.raises(UsageError, match="contradict"):
        open_checkpoint(run, "4,branch=0", branch=1)


def test_best_is_by_metric_and_ignores_what_is_no_number(run):
    """`best` needs a metric, from the call or the run; nan never wins; the metric may be minimised."""
    assert open_checkpoint(run, "best", best=("val/acc", "max")).position.epoch == 2
    assert open_checkpoint(run, "best", best=("val/acc", "min")).position.epoch == 1
    with pytest.raises(UsageError, match="needs a metric"):
        open_checkpoint(run, "best")
    with pytest.raises(UnknownEpochError, match="val/acc"):
        open_checkpoint(run, "best", best=("val/loss", "min"))
    with pytest.raises(UsageError, match="direction"):
        open_checkpoint(run, "best", best=("val/acc", "largest"))
    (run / "run.json").write_text(json.dumps({"best": ["val/acc", "max"]}))
    assert open_checkpoint(run, "best").epoch == 2


def test_places_without_checkpoints_are_refused_by_name(tmp_path):
    """A wrong path says what is wrong with it."""
    (tmp_path / "file").write_text("")
    for where, why in [("nothing", "not there"), ("file", "a file"), ("", "no checkpoints")]:
        with pytest.raises(UsageError, match=why):
            open_checkpoint(tmp_path / where)
    (tmp_path / "loop").symlink_to("loop")
    odd = {
        "loop": "looked at: Too many levels",
        "x" * 300: "looked at: File name too long",
        "a\0b": "invalid path",
    }
    for where, why in odd.items():
        with pytest.raises(UsageError, match=why):
            open_checkpoint(tmp_path / where)
    (tmp_path / "digits").mkdir()
    with pytest.raises(UsageError, match=r"not there \(did you mean .*/digits\?\)"):
        open_checkpoint(tmp_path / "digit")
    (tmp_path / "digi\x1b[31mts").mkdir()
    with pytest.raises(UsageError, match=r"did you mean .*/digits, and '3' as the epoch\?"):
        open_checkpoint(f"{tmp_path}/digits@3")
    (tmp_path / "digits@3").touch()
    with pytest.raises(UsageError, match="digits@3 is a file"):
        open_checkpoint(f"{tmp_path}/digits@3")
    with pytest.raises(UsageError, match="an empty text"):
        open_checkpoint("")
    for odd in (tmp_path / "digi\x1b[31mt", "a\0b/c"):
        with pytest.raises(UsageError) as caught:
            open_checkpoint(odd)
        assert "31mts" not in str(caught.value)
    with pytest.raises(UsageError, match="nosuch"):
        open_checkpoint("nosuch://bucket/run")
    with Writing(tmp_path / "empty"), pytest.raises(UnknownEpochError, match="nothing is committed"):
        open_checkpoint(tmp_path / "empty")


def test_blobs_are_described_without_reading_a_tensor(run):
    """kind, dtype, shape, scope, bytes, nodes; digests come from headers."""
    ckpt = open_checkpoint(run, 3)
    cost = ckpt.bytes_read
    assert set(ckpt.blobs) == {"model", "total", "mine", "extra"}
    model = ckpt.blobs["model"]
    assert (model.kind, model.scope, model.dtype, model.nodes) == ("stateful", "replicated", None, ckpt.nodes)
    assert model.bytes == sum(t.numel() * t.element_size() for t in make_model().state_dict().values())
    assert ckpt.blobs["total"].kind == "value"
    assert ckpt.blobs["mine"].scope == "rank"
    assert ckpt.bytes_read == cost
    assert model.digest == open_checkpoint(run, 3).blobs["model"].digest
    assert model.digest != open_checkpoint(run, 2).blobs["model"].digest
    with pytest.raises(UsageError, match="did you mean 'model'"):
        ckpt.blobs["modle"]
    assert ckpt.blobs.get("modle") is None


def test_a_digest_does_not_depend_on_how_many_nodes_wrote(tmp_path):
    """Cuts fall on digest blocks, so equal bytes have equal digests on any number of nodes."""
    weight = torch.randn(1_500_000)
    with Writing(tmp_path) as writing:
        for nodes in (1, 2, 5):
            writing.save(nodes, [parameter("model.w", weight)], nodes)
    assert len({open_checkpoint(tmp_path, nodes).blobs["model"].digest for nodes in (1, 2, 5)}) == 1


def test_a_model_is_loaded_and_only_its_bytes_are_read(run):
    """load() is strict, exact, and leaves other files alone."""
    for k in range(5):
        model = make_model()
        result = open_checkpoint(run, k).load({"model": model})
        assert filled(model, k)
        assert set(result.loaded) == {f"model.{name}" for name in model.state_dict()}
        assert 0 < result.bytes_read < 20_000


def test_what_is_not_needed_may_be_gone(run):
    """An epoch asked for by its number gives what is left of it; `last` means a whole one."""
    for path in (run / "checkpoints" / "data").glob("*/*optim*"):
        path.unlink()
    ckpt = open_checkpoint(run, 3)
    model = make_model()
    ckpt.load({"model": model})
    assert filled(model, 3)
    with pytest.raises(DamagedError, match=r"optim.*missing"):
        ckpt.load_tensors("extra.m")
    with pytest.raises(NoProvableEpochError, match="an epoch's number"):
        open_checkpoint(run)


def test_values_of_one_node_are_addressed_by_its_name(run):
    """`trainer_1:name` is one node's own; without a node the error says what to ask for."""
    ckpt = open_checkpoint(run, 2)
    assert ckpt.value("trainer_1:mine") == "trainer_1 of 2"
    assert ckpt.value("trainer_0:mine") == "own of 2"
    assert ckpt.value("trainer_1:total") == ckpt.value("total") == 102
    with pytest.raises(UsageError, match="use trainer_0:mine, trainer_1:mine"):
        ckpt.value("mine")
    with pytest.raises(UsageError, match="did you mean 'trainer_1'"):
        ckpt.value("trainer_l:mine")
    with pytest.raises(UsageError, match="did you mean 'total'"):
        ckpt.value("totl")
    with pytest.raises(UsageError, match=r"'model' is a blob, not a single leaf: .*'model\.\*'"):
        ckpt.value("model")
    assert ckpt.load_values("t*") == {"total": 102}
    assert ckpt.load_values(["total", "trainer_1:mine"]) == {"total": 102, "mine": "trainer_1 of 2"}
    assert ckpt.load_values(["total", "mine"], nodes="trainer_1") == {"total": 102, "mine": "trainer_1 of 2"}
    with pytest.raises(
        UsageError, match=r"'mine' has a different value on each of 2 nodes.*nodes='trainer_0'"
    ):
        ckpt.load_values()
    for nodes in (["trainer_1"], [], 1):
        with pytest.raises(UsageError, match="expected the name of a node"):
            ckpt.load_values(["total", "mine"], nodes=nodes)


def test_of_several_values_one_is_taken_by_its_node_and_none_is_left_out(tmp_path):
    """Buffers that differ between nodes: `nodes=` says whose, and what was taken is said."""
    nodes = [
        [parameter("ema.w", torch.ones(3)), buffer("ema.mean", torch.full((3,), float(rank)))]
        for rank in (0, 1)
    ]
    with Writing(tmp_path / "checkpoints") as writing:
        writing.save(1, nodes, 2, scopes={"ema.mean": "rank"})
    ckpt = open_checkpoint(tmp_path)
    ema = torch.nn.BatchNorm1d(3)
    names = {"w": "weight", "mean": "running_mean"}
    told = r"'ema\.mean' has a different value on each of 2 nodes: choose one, such as nodes='trainer_0'"
    for pattern in ("ema.*", "ema", ["ema.w", "ema.mean"], "*"):
        with pytest.raises(UsageError, match=told):
            ckpt.load_tensors(pattern)
        with pytest.warns(UserWarning, match=r"differs between nodes: ema\.mean of trainer_1$"):
            found = ckpt.load_tensors(pattern, nodes="trainer_1")
        assert (set(found), found["ema.mean"].tolist()) == ({"ema.w", "ema.mean"}, [1.0] * 3)
    rename = {f"ema.{old}": f"ema.{new}" for old, new in names.items()}
    with pytest.raises(UsageError, match=told):
        ckpt.load({"ema": ema}, rename=rename, strict=False)
    assert ema.running_mean.eq(0).all()
    result = ckpt.load({"ema": ema}, rename=rename, strict=False, nodes={"ema": "trainer_1"})
    assert ema.running_mean.eq(1).all()
    assert result.nodes == {"ema.running_mean": "trainer_1"}
    with pytest.raises(UsageError, match="nodes='trainer_l': no such node; did you mean 'trainer_1'"):
        ckpt.load_tensors("ema.*", nodes="trainer_l")


def test_tensors_are_chosen_by_name_prefix_and_glob(run):
    """Patterns, renaming, dtype; what matches nothing is an error with a suggestion unless strict=False."""
    ckpt = open_checkpoint(run, 3)
    assert set(ckpt.load_tensors("model.0")) == {"model.0.weight", "model.0.bias"}
    assert set(ckpt.load_tensors("model.*.weight")) == {"model.0.weight", "model.1.weight", "model.2.weight"}
    found = ckpt.load_tensors(["model.0", "model.1"], rename={"model.": ""}, dtype=torch.float64)
    assert found["0.weight"].dtype == torch.float64
    assert found["1.num_batches_tracked"].dtype == torch.int64
    assert bool((found["0.weight"] == 3).all())
    assert set(ckpt.load_tensors("model.0.bias", rename={"0.": "first."})) == {"model.first.bias"}
    with pytest.raises(UsageError, match=r"did you mean 'model\.0\.weight'"):
        ckpt.load_tensors("model.0.weigth")
    with pytest.raises(
        UsageError, match=r"^no tensor matches 'total': 'total' is a value \(use load_values\)$"
    ):
        ckpt.load_tensors("total")
    with pytest.raises(
        UsageError, match=r"no value matches 'model\.0': '.*', '.*' are tensors \(.*load_tensors\)"
    ):
        ckpt.load_values("model.0")
    assert ckpt.load_tensors("nothing.*", strict=False) == {}
    with pytest.raises(UsageError, match="rename"):
        ckpt.load_tensors(["model.0.bias", "model.2.bias"], rename={"model.0.": "x.", "model.2.": "x."})
    with pytest.raises(UsageError, match="no tensor"):
        ckpt.load_tensors("total")


def test_load_is_strict_and_changes_nothing_when_it_does_not_fit(run):
    """Missing, unexpected and different leaves are all listed, before any object changes."""
    ckpt = open_checkpoint(run, 3)
    other = torch.nn.Sequential(torch.nn.Linear(3, 6), torch.nn.Linear(5, 2))
    before = {name: tensor.clone() for name, tensor in other.state_dict().items()}
    with pytest.raises(BlobError) as caught:
        ckpt.load({"model": other})
    for name in ("model.0.weight", "model.1.running_mean"):
        assert name in str(caught.value)
    assert all(torch.equal(tensor, before[name]) for name, tensor in other.state_dict().items())
    with pytest.raises(UsageError, match="no blob 'modle'; did you mean 'model'"):
        ckpt.load({"modle": make_model()})
    with pytest.raises(UsageError, match="by blob name"):
        ckpt.load(make_model())


def test_without_strict_the_result_says_what_was_skipped(run):
    """strict=False loads what both sides have and names the rest."""
    smaller = torch.nn.Sequential(torch.nn.Linear(3, 5))
    larger = torch.nn.Sequential(*make_model(), torch.nn.Linear(2, 2))
    ckpt = open_checkpoint(run, 3)
    result = ckpt.load({"model": smaller}, strict=False)
    assert filled(smaller, 3)
    assert "model.2.weight" in result.unexpected
    assert set(result.loaded) == {"model.0.weight", "model.0.bias"}
    result = ckpt.load({"model": larger}, strict=False)
    assert result.missing == ("model.3.weight", "model.3.bias")


def test_rename_loads_a_part_into_another_object(run):
    """`rename` changes stored names before they are compared."""
    head = torch.nn.Linear(5, 2)
    result = open_checkpoint(run, 4).load({"head": head}, rename={"model.2.": "head."})
    assert filled(head, 4)
    assert set(result.loaded) == {"head.weight", "head.bias"}


def test_a_block_that_is_damaged_leaves_every_object_as_it_was(run):
    """All or nothing: bytes are verified before the first object changes, unless atomic=False."""
    damage(run, 3, "trainer_0.3.main.safetensors")
    ckpt = open_checkpoint(run, 3)
    for model in (make_model(9), make_model(9)):
        with pytest.raises(DamagedError, match=r"epoch 3 in .*trainer_0\.3\.main"):
            ckpt.load({"model": model})
        assert filled(model, 9)
    with pytest.raises(PartiallyLoadedError):
        ckpt.load({"model": model}, atomic=False)


def test_blocks_are_taken_as_they_are_only_where_that_is_asked_for(run):
    """With `headers` a damaged block loads, byte by byte as it lies there; an unknown level is refused."""
    damage(run, 3, "trainer_0.3.main.safetensors")
    good, loaded = make_model(9), make_model(9)
    with pytest.raises(DamagedError):
        open_checkpoint(run, 3, verify="full").load({"model": good})
    open_checkpoint(run, 3, verify="headers").load({"model": loaded})
    assert filled(good, 9) and not filled(loaded, 9)
    with pytest.raises(UsageError, match="invalid verify='off'"):
        open_checkpoint(run, 3, verify="off")


def test_last_falls_back_and_says_so_and_an_explicit_epoch_never_does(run):
    """A damaged manifest or a missing file: `last` warns and takes the next older, a number raises."""
    damage(run, 4, "manifest.json", 60)
    next((run / "checkpoints" / "data").glob("e00000003-*/trainer_1.3.optim*")).unlink()
    with pytest.warns(
        UserWarning, match=r"epoch 4 is damaged: .*epoch 3 is damaged: .*missing.*Epoch 2 is used"
    ):
        ckpt = open_checkpoint(run)
    assert ckpt.position.epoch == 2
    assert len(ckpt.notices) == 1
    with pytest.raises(DamagedError, match="epoch 4"):
        open_checkpoint(run, 4)
    with pytest.raises(DamagedError, match=r"trainer_1\.3\.optim.*missing"):
        open_checkpoint(run, 3).load_tensors("extra")


def test_when_no_epoch_can_be_proved_that_is_an_error(run):
    """Commits without a provable epoch never look like an empty directory."""
    for epoch in range(5):
        damage(run, epoch, "manifest.json", 60)
    with pytest.raises(NoProvableEpochError, match="no epoch"):
        open_checkpoint(run)


def test_ties_are_one_tensor_again(tmp_path):
    """Tied names are stored once, and loaded as one."""
    weight = torch.randn(4, 4)
    with Writing(tmp_path) as writing:
        writing.save(0, [parameter("model.a", weight), parameter("model.b", weight, alias_of="model.a")], 2)
    ckpt = open_checkpoint(tmp_path)
    found = ckpt.load_tensors("model")
    assert found["model.a"] is found["model.b"]
    assert torch.equal(ckpt.load_tensors("model.b")["model.b"], weight)
    module = torch.nn.ParameterDict({"b": torch.nn.Parameter(torch.zeros(4, 4))})
    ckpt.load({"model": module}, strict=False)
    assert torch.equal(module["b"], weight)
    assert ckpt.blobs["model"].bytes == 64


def test_values_with_tensors_inside_come_back_whole(tmp_path):
    """A value may hold tensors; they are read with it."""
    inner = torch.arange(3)
    json_form = {"scale": 2, "table": {"$": "tensor", "v": "state.table"}}
    with Writing(tmp_path) as writing:
        writing.save(0, [
            Leaf("state", "state", Role.VALUE, "main", Value(json_form)),
            Leaf("state.table", "state", Role.TENSOR, "main", inner),
        ])  # fmt: skip
    found = open_checkpoint(tmp_path).value("state")
    assert found["scale"] == 2
    assert torch.equal(found["table"], inner)


class SparseHandle(LocalWriteHandle):
    """Leaves zeros out: the file is as long, and takes no space."""

    def preallocate(self, nbytes):
        os.ftruncate(self._descriptor, nbytes)

    def write_at(self, offset, data):
        if data.nbytes < 4096 or data[:-1] != data[1:] or data[0]:
            super().write_at(offset, data)


class SparseStorage(LocalStorage):
    def open_exclusive(self, path):
        handle = super().open_exclusive(path)
        return SparseHandle(handle.path, handle._descriptor)


def test_partial_load_of_20_mb_out_of_2_gb_reads_at_most_a_tenth_more(tmp_path):
    """Loading whole blobs, 20 MB out of 2 GB, reads at most 1.1 times those bytes plus the headers."""
    part = 20_000_000
    zeros, content = torch.zeros(part // 4), torch.zeros(part // 4)
    content[::100_000] = 1
    with Writing(tmp_path) as writing:
        writing.storage = SparseStorage(tmp_path)
        wanted = [parameter("model.050.weight", content), parameter("small.weight", content)]
        writing.save(
            1, [*(parameter(f"model.{i:03d}.weight", zeros) for i in range(100) if i != 50), *wanted], 2
        )
        shards = writing.manifests[Position(1)].shards
    assert sum(row.nbytes for row in shards) > 2_000_000_000
    headers = sum(row.header_bytes for row in shards)
    for name in ("model.050", "small"):
        ckpt = open_checkpoint(tmp_path, 1)
        opening = ckpt.bytes_read
        (loaded,) = ckpt.load_tensors(name).values()
        assert torch.equal(loaded, content)
        assert part <= ckpt.bytes_read - opening <= 1.1 * part + headers
        assert opening < 50_000
