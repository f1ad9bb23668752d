"""What changed between two epochs: decided by digests, read where they do not tell, in any layout."""

from __future__ import annotations

import json
import math
import random
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from epochs import Writing, moment, parameter, value
from hypothesis import example, given, settings
from hypothesis import strategies as st
from meshes import Saved, random_mesh, random_shape

from torchrelay import Checkpointer
from torchrelay.checkpoint.format.dtypes import BLOCK
from torchrelay.checkpoint.format.mesh import Mesh
from torchrelay.checkpoint.format.mesh_geometry import Replicated, Sharded
from torchrelay.checkpoint.format.position import Position
from torchrelay.checkpoint.inspect.contents import DiffOptions, Epoch, LeafChange, leaf_changes, open_epoch
from torchrelay.checkpoint.storage.open import CountingStorage
from torchrelay.errors import DamagedError, UsageError
from torchrelay.metadata.run_directory import RunDirectory
from torchrelay.tools.cli import main as command_line
from torchrelay.tools.cli.checkpoints.diff import _percent
from torchrelay.tools.cli.main import main

FULL, QUICK = DiffOptions(), DiffOptions(figures=False)


def changes(a: Epoch, b: Epoch, wish: DiffOptions = FULL) -> dict[str, LeafChange]:
    return {one.name: one for one in leaf_changes(a, b, wish)}


class Both:
    """Two epochs of one run with counted reads."""

    def __init__(self, root: Path, before, after, nodes: Sequence[int] = (1, 1)) -> None:
        with Writing(root) as run:
            entries = [run.save(1, before, nodes[0]), run.save(2, after, nodes[1])]
            self.storage = CountingStorage(run.storage)
            self.a, self.b = (open_epoch(self.storage, entry) for entry in entries)
            self.headers = sum(
                row.header_bytes for number in (1, 2) for row in run.manifests[Position(number)].shards
            )
        self._start = self.storage.bytes_read

    @property
    def tensor_bytes_read(self) -> int:
        """Bytes that were read of tensors, once all headers were."""
        return self.storage.bytes_read - self._start - self.headers


def test_identical_epochs_read_no_tensor(tmp_path: Path):
    """Digests tell that nothing changed: headers are read, not one byte of a tensor."""
    torch.manual_seed(0)
    leaves = [parameter("m.w", torch.randn(900_000)), parameter("m.b", torch.randn(3)), value("n", [1, 2.5])]
    both = Both(tmp_path, leaves, leaves, nodes=(2, 2))
    assert {one.kind for one in leaf_changes(both.a, both.b)} == {"same"}
    assert both.tensor_bytes_read == 0


def test_only_changed_blocks_are_read(tmp_path: Path):
    """Of 24 MiB in which elements of two blocks changed, these two blocks are read of each epoch."""
    before = torch.randn(6 << 18)
    after = before.clone()
    after[[5, (4 << 18) + 7]] += 1.0
    both = Both(tmp_path, [parameter("m.w", before)], [parameter("m.w", after)])
    found = changes(both.a, both.b)["m.w"]
    assert found.kind == "content" and found.change is not None
    assert both.tensor_bytes_read == 2 * 2 * BLOCK
    assert (found.change.changed, found.change.compared, found.elements) == (2, 2 << 18, 6 << 18)
    assert math.isclose(
        found.change.norm_difference, float((after.double() - before.double()).norm()), rel_tol=1e-12
    )
    quick = Both(tmp_path / "quick", [parameter("m.w", before)], [parameter("m.w", after)])
    assert changes(quick.a, quick.b, QUICK)["m.w"].kind == "content"
    assert quick.tensor_bytes_read == 0


def test_whole_gives_the_figures_of_the_tensor(tmp_path: Path):
    """With `whole` norms and cosine are those of all of a changed tensor; an unchanged one stays unread."""
    before = torch.randn(3 << 18)
    after = before.clone()
    after[-1] = -9.0
    both = Both(
        tmp_path,
        [parameter("m.w", before), parameter("m.v", before)],
        [parameter("m.w", after), parameter("m.v", before)],
    )
    found = changes(both.a, both.b, DiffOptions(whole=True))
    change, (a, b) = found["m.w"].change, (before.double(), after.double())
    assert change is not None and found["m.v"].kind == "same"
    assert both.tensor_bytes_read == 2 * before.nbytes
    assert math.isclose(change.norm_a, float(a.norm()), rel_tol=1e-12)
    assert math.isclose(change.cosine or 0, float(a @ b / a.norm() / b.norm()), rel_tol=1e-12)


def test_two_ranks_against_four(tmp_path: Path):
    """Cut between other numbers of ranks a tensor is the same one; blocks still line up, none is read."""
    torch.manual_seed(1)
    leaves = [parameter("m.w", torch.randn(2_000_003)), parameter("m.x", torch.randn(300_001))]
    both = Both(tmp_path, leaves, leaves, nodes=(2, 4))
    assert {one.kind for one in leaf_changes(both.a, both.b)} == {"same"}
    assert both.tensor_bytes_read == 0


def test_every_kind_of_change(tmp_path: Path):
    """Added, removed, another type or shape, another value, another content, the same: each by name."""
    ones = torch.ones(3)
    before = [
        *(parameter(f"m.{name}", ones) for name in ("same", "type", "shape", "gone", "content")),
        *(parameter("m.tied", ones, "m.same"), value("n", {"a": 1}), value("k", [1, float("nan")])),
        moment("o.x", torch.zeros(0)),
    ]
    after = [
        *(parameter(f"m.{name}", ones) for name in ("same", "new")),
        *(parameter("m.type", ones.double()), parameter("m.shape", torch.ones(3, 1))),
        *(parameter("m.content", ones * 2), parameter("m.tied", ones, "m.same")),
        *(value("n", {"a": 2}), value("k", [1, float("nan")]), moment("o.x", torch.zeros(0))),
    ]
    both = Both(tmp_path, before, after)
    found = changes(both.a, both.b)
    assert {name: one.kind for name, one in found.items()} == {
        "m.same": "same", "m.type": "form", "m.shape": "form", "m.gone": "removed", "m.content": "content",
        "m.tied": "same", "n": "value", "k": "same", "m.new": "added", "o.x": "same",
    }  # fmt: skip
    assert (found["m.type"].before, found["m.type"].after) == ("float32[3]", "float64[3]")
    assert (found["n"].before, found["n"].after) == ({"a": 1}, {"a": 2})
    assert set(changes(both.a, both.b, DiffOptions(("m.s*", "n")))) == {"m.same", "m.shape", "n"}
    with pytest.raises(UsageError, match="no blob or leaf matches 'nothing'"):
        changes(both.a, both.b, DiffOptions(("nothing",)))


def test_an_optimizer_without_state_is_compared(tmp_path: Path):
    """What stands in the manifest is there, though no file is of its group (SGD without momentum)."""
    same, lr = value("o.same", 1, "optim"), [value("o.lr", rate, "optim") for rate in (0.1, 0.2)]
    both = Both(tmp_path, *([parameter("m.w", torch.ones(2)), same, rate] for rate in lr))
    assert both.a.groups == both.b.groups == ("main",)
    kinds = {name: one.kind for name, one in changes(both.a, both.b).items()}
    assert kinds == {"m.w": "same", "o.same": "same", "o.lr": "value"}


def test_types_without_numbers_are_told_by_their_bytes(tmp_path: Path):
    """Of a type of less than a byte it is told whether it changed, without figures."""
    bits = torch.arange(5, dtype=torch.uint8)
    before = [parameter("m.w", bits.view(torch.uint4)), parameter("m.v", bits.view(torch.uint4))]
    after = [parameter("m.w", (bits + 1).view(torch.uint4)), parameter("m.v", bits.view(torch.uint4))]
    both = Both(tmp_path, before, after)
    found = changes(both.a, both.b)
    assert (found["m.w"].kind, found["m.w"].change, found["m.v"].kind) == ("content", None, "same")


def test_small_leaves_are_read_together(tmp_path: Path):
    """Of 1,000 small tensors that all changed neighbours share a read, and each is told right."""
    before = [torch.full((50,), float(number)) for number in range(1000)]
    both = Both(
        tmp_path,
        [parameter(f"m.{number:04}", one) for number, one in enumerate(before)],
        [parameter(f"m.{number:04}", one + 2) for number, one in enumerate(before)],
    )
    start = both.storage.reads
    found = changes(both.a, both.b)
    assert both.storage.reads - start < 40
    for number, change in enumerate(one.change for one in found.values()):
        assert change is not None and (change.max_abs, change.changed) == (2.0, 50)
        assert math.isclose(change.norm_a, number * math.sqrt(50))


def epoch_of(whole: torch.Tensor, mesh: Mesh | None, world: int = 10) -> Epoch:
    return Epoch(Saved({"m": whole}, {"m": mesh}, world).run())


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 1 << 30), st.sampled_from(["float32", "bfloat16", "complex128", "int64", "bool"]))
@example(10946, "float32")  # one part of the second lies in several of the first
def test_any_mesh_against_any_mesh(seed, dtype):
    """On random meshes, plain ranks among them: the elements that changed are found, whatever the layouts."""
    rng = random.Random(seed)
    shape = random_shape(rng, large=True)
    before = torch.randint(0, 2, shape).to(getattr(torch, dtype))
    after, count = before.clone().reshape(-1), math.prod(shape)
    places = rng.sample(range(count), min(count, rng.choice([0, 1, 3])))
    for place in places:
        after[place] = 1 - int(after[place].real)
    after = after.reshape(shape)
    meshes = [rng.choice([None, random_mesh(rng, shape)]) for _ in range(2)]
    a, b = epoch_of(before, meshes[0]), epoch_of(after, meshes[1])
    (found,) = leaf_changes(a, b)
    (quick,) = leaf_changes(a, b, QUICK)
    (whole,) = leaf_changes(a, b, DiffOptions(whole=True))
    assert found.kind == quick.kind == whole.kind == ("content" if places else "same")
    if places:
        assert found.change is not None and whole.change is not None
        assert (found.change.changed, whole.change.compared) == (len(places), count)
        assert math.isclose(found.change.norm_difference, math.sqrt(len(places)))
        assert math.isclose(whole.change.norm_a, float(before.to(torch.complex128).norm()), rel_tol=1e-12)


def test_the_same_boxes_are_compared_by_digests():
    """Columns that both epochs store alike are not read where they did not change."""
    torch.manual_seed(2)
    before = torch.randn(1024, 1024)
    after = before.clone()
    after[3, 700] = 0.0
    mesh = Mesh((0, 1), (2,), (Sharded(1),))
    a, b = (epoch_of(one, mesh, 2) for one in (before, after))
    list(leaf_changes(a, b, QUICK))  # opens the headers
    stores = [one.reader.shards.storage for one in (a, b)]
    start = sum(store.bytes_read for store in stores)
    (found,) = leaf_changes(a, b)
    assert found.change is not None and found.change.changed == 1
    assert sum(store.bytes_read for store in stores) - start == 2 * BLOCK
    rows = epoch_of(before, Mesh((0, 1), (2,), (Sharded(0),)), 2)
    (same,) = leaf_changes(a, rows)
    assert same.kind == "same"


def test_a_damaged_block_is_named(tmp_path: Path):
    """A changed byte in a block that has to be read fails the comparison, with file, leaf and block."""
    both = Both(tmp_path, [parameter("m.w", torch.ones(9))], [parameter("m.w", torch.zeros(9))])
    damage(tmp_path, 2)
    with pytest.raises(DamagedError, match=r"safetensors: block 0 of m\.w"):
        changes(both.a, both.b)


def damage(root: Path, epoch: int) -> None:
    """Flip a bit of the last byte of an epoch's shard, which is data."""
    file = next(root.glob(f"data/e{epoch:08d}-*/*.safetensors"))
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


# The command


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run with three epochs; one more value changes in each."""
    directory = RunDirectory(tmp_path / "hello")
    directory.create("hello", None, 1)
    weight = torch.arange(6.0)
    with Writing(directory.checkpoints, "hello") as writing:
        for epoch in range(3):
            weight = weight.clone()
            weight[epoch] = float("nan") if epoch == 2 else -1.0
            writing.save(epoch, [parameter("model.weight", weight), value("lr", 0.1 * epoch)])
    return directory.path


def told(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    code = main([str(one) for one in arguments])
    said = capsys.readouterr()
    return code, said.out, said.err


def test_diff_for_people(run: Path, capsys: pytest.CaptureFixture[str]):
    """A row per change with figures, NaN before all others, then other values, and how much was read."""
    code, out, err = told(capsys, "ckpt", "diff", f"{run}@0", "@2")
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert lines[1].split() == [
        *("model.weight", "float32[6]", "33.3%", "100%", "0.27735", "0.96154", "2", "7.4833", "7.2111"),
        *("NaN", "0->1"),
    ]
    assert lines[2].split() == ["leaf", "what"]
    assert lines[3].split() == ["lr", "0.0", "->", "0.2"]
    assert lines[4].endswith("1 changed, 1 changed values")
    assert lines[5].startswith("read ")


def test_saved_gradients_are_no_change_of_the_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """They are saved where the program may add to them: one line names them, `--blobs` lists them."""
    model = torch.nn.Linear(2, 1)
    model(torch.ones(2)).backward()
    with Checkpointer(tmp_path, dict(model=model), asynchronous=False) as checkpointer:
        checkpointer.save(1)
        model.zero_grad()
        checkpointer.save(2)
    lines = told(capsys, "ckpt", "diff", f"{tmp_path}@1", "@2")[1].splitlines()
    assert "removed" not in "".join(lines) and lines[-1].startswith("not shown: saved gradients")
    assert "3 removed" in told(capsys, "ckpt", "diff", f"{tmp_path}@1", "@2", "--blobs", "@grad")[1]


def test_diff_as_json(run: Path, capsys: pytest.CaptureFixture[str]):
    """One strict JSON object; --top leaves out what changed least but counts it."""
    _, out, _ = told(capsys, "ckpt", "diff", f"{run}@1", f"{run}@2", "--json", "--top", 1)
    found = json.loads(out, parse_constant=lambda text: pytest.fail(f"{text} is no JSON"))
    assert (found["a"]["epoch"], found["b"]["epoch"]) == (1, 2)
    assert found["counts"]["content"] == found["counts"]["value"] == 1
    (change,) = found["changes"]
    assert (change["leaf"], change["figures"]["nan_b"], change["figures"]["changed"]) == (
        "model.weight",
        1,
        1,
    )


@pytest.mark.parametrize(
    ("changed", "of", "share"),
    [(0, 7, "0%"), (1, 1 << 24, "<0.01%"), (1, 10_000, "0.01%"), (999, 1000, "99+%"), (5, 5, "100%")],
)
def test_a_share_is_never_rounded_to_what_it_is_not(changed: int, of: int, share: str):
    """One element of sixteen millions is less than a hundredth of a percent."""
    assert _percent(changed, of) == share


def test_diff_of_an_epoch_with_itself(run: Path, capsys: pytest.CaptureFixture[str]):
    """Nothing changed, nothing is listed, and it is said."""
    code, out, _ = told(capsys, "ckpt", "diff", run, run)
    assert (code, len(out.splitlines())) == (0, 2)
    assert "2 unchanged" in out


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["RUN@7", "RUN@1"], 2, "no epoch 7"),
        (["RUN@1", "RUNX@1"], 2, "does not exist"),
        (["RUN@x", "RUN"], 2, "invalid epoch"),
        (["RUN@0", "@1", "--only", "modle"], 2, "did you mean"),
        (["RUN@0", "@1"], 5, "block 0 of model.weight"),
    ],
)
def test_diff_says_what_is_wrong_in_one_line(run: Path, capsys, arguments, code, said):
    """A user's mistake is 2, damage 5: one line on stderr that names it, no traceback."""
    damage(run / "checkpoints", 1)
    found, out, err = told(capsys, "ckpt", "diff", *(one.replace("RUN", str(run)) for one in arguments))
    assert (found, out, err.count("\n")) == (code, "", 1)
    assert said in err


def test_the_page_tells_commands_that_exist():
    """Every diff and find-bad of the page is understood as it stands there."""
    lines = (Path(__file__).parents[3] / "docs/inspection.md").read_text().splitlines()
    typed = [line[1:].partition("#")[0] for line in lines if line.startswith("$ torchrelay ")]
    words = [shlex.split(line)[1:] for line in typed]
    mine = [one for one in words if one[0] == "ckpt" and one[1] in ("diff", "find-bad")]
    assert len(mine) >= 8
    for one in mine:
        assert command_line._parser(one).parse_args(one).run is not None


@pytest.mark.parametrize("verb", [("ckpt", "diff", "RUN@0", "RUN@1"), ("ckpt", "find-bad", "RUN")])
def test_a_damaged_manifest_is_5(run: Path, capsys: pytest.CaptureFixture[str], verb):
    """Where a manifest is not what was committed: one line that names epoch and file, code 5."""
    for manifest in (run / "checkpoints").glob("data/*/manifest.json"):
        manifest.write_bytes(manifest.read_bytes().replace(b"float32", b"float64"))
    code, out, err = told(capsys, *(one.replace("RUN", str(run)) for one in verb))
    assert (code, out, err.count("\n")) == (5, "", 1)
    assert "cannot be loaded" in err and "manifest.json" in err


HIDDEN = """
import sys
class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "numpy":
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Hidden())
import importlib.util
find_spec = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name == "numpy" else find_spec(name, *rest)
from torchrelay.tools.cli.main import main
code = main(sys.argv[1:])
print(code, "torch" in sys.modules, "pickle" in sys.modules)
"""


def without_numpy(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", HIDDEN, *map(str, arguments)],
        capture_output=True, text=True, timeout=100, check=True,
    )  # fmt: skip


def test_without_numpy_changes_are_told_without_figures(run: Path):
    """Digests need no numpy: what changed is listed, and one line says how to get the figures."""
    done = without_numpy("ckpt", "diff", f"{run}@0", f"{run}@2")
    assert done.stdout.splitlines()[-1] == "0 False False"
    assert "model.weight" in done.stdout and "1 changed" in done.stdout
    assert "pip install numpy" in done.stderr
    bad = without_numpy("ckpt", "find-bad", run)
    assert bad.stdout.splitlines()[-1] == "2 False False"
    assert bad.stderr.count("\n") == 1 and "pip install numpy" in bad.stderr


def test_memory_stays_below_64_mib(tmp_path: Path):
    """Comparing tensors of 80 MiB takes at most 64 MiB beyond what comparing small ones takes."""
    torch.manual_seed(3)
    whole = torch.randn(20 << 10, 1 << 10)
    for name, sizes in (("small", whole[:2]), ("large", whole)):
        with Writing(tmp_path / name) as run:
            run.save(1, [parameter("m.w", sizes)], 1)
            run.save(2, [parameter("m.w", sizes * 1.01)], 3)
    code = (
        "import re, sys\n"
        "from torchrelay.tools.cli.main import main\n"
        "main(sys.argv[1:])\n"
        "print(re.search(r'VmHWM:\\s+(\\d+)', open('/proc/self/status').read())[1])"
    )
    used = []
    for name in ("small", "large"):
        command = [sys.executable, "-c", code, "ckpt", "diff", f"{tmp_path / name}@1", f"{tmp_path / name}@2"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=True)
        assert "1 changed" in done.stdout
        used.append(int(done.stdout.splitlines()[-1]))
    assert used[1] - used[0] <= 64 << 10


def test_replicated_meshes_are_alike():
    """Replicas that share the writing of a tensor store other boxes than one node does; nothing changed."""
    whole = torch.arange(float(1 << 19)).reshape(512, 1024)
    a = epoch_of(whole, Mesh((0, 1, 2), (3,), (Replicated(),)), 3)
    b = epoch_of(whole, None, 1)
    (found,) = leaf_changes(a, b)
    assert found.kind == "same"
