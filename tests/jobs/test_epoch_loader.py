"""EpochLoader: each sample once, whatever happens to workers, processes and their number."""

import random
from itertools import chain, pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import Dataset, TensorDataset

from torchrelay.errors import NotAllowedNowError, UsageError
from torchrelay.jobs.data.loader import EpochLoader, StepPlan
from torchrelay.jobs.random import RandomStreams, permutation


class Noisy(Dataset):
    """Random augmentation drawn from all three global streams."""

    def __init__(self, n: int) -> None:
        self.n = n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int):
        return index, random.random(), float(np.random.rand()), torch.rand(1, dtype=torch.float64)


def loader_of(n: int, batch_size: int, rank: int = 0, world: int = 1, **options) -> EpochLoader:
    return EpochLoader((torch.arange(n),), batch_size, seed=options.pop("seed", 3), **options).placed(
        rank, world
    )


def flat(lists) -> list:
    return list(chain.from_iterable(lists))


def rows_of(loader: EpochLoader) -> dict:
    """Every sample with its augmentation, by index."""
    rows = {}
    for index, *values in loader:
        rows |= {
            i: row for i, *row in zip(index.tolist(), *(v.flatten().tolist() for v in values), strict=True)
        }
    return rows


# Steps


@settings(deadline=None, max_examples=200)
@given(st.integers(1, 400), st.integers(1, 60), st.integers(1, 9), st.booleans(), st.data())
def test_plan_covers_the_rest_of_the_epoch_once(total, batch_size, world, drop_last, data):
    """Steps follow each other without hole or overlap, shares too, and no joined step reaches far."""
    batch_size = max(batch_size, world)
    done = data.draw(st.integers(0, total))
    plan = StepPlan(done, total, batch_size, world, drop_last)
    at = done
    for step in plan:
        assert step.start == at
        shares = [step.share(rank, world) for rank in range(world)]
        assert shares[0][0] == step.start
        assert shares[-1][1] == step.stop
        assert all(a[1] == b[0] for a, b in pairwise(shares))
        sizes = [end - begin for begin, end in shares]
        assert max(sizes) - min(sizes) <= 1
        assert step.stop - step.start < batch_size + 2 * world
        assert sum(step.weight(rank, world) for rank in range(world)) == pytest.approx(world)
        at = step.stop
    assert at == plan.stop
    assert drop_last or at == total


def test_short_tail_joins_the_step_before():
    """A tail of fewer than two samples per rank joins, one of two per rank stands alone."""
    assert [(s.start, s.stop) for s in StepPlan(0, 19, 8, 2)] == [(0, 8), (8, 19)]
    assert [(s.start, s.stop) for s in StepPlan(0, 20, 8, 2)] == [(0, 8), (8, 16), (16, 20)]
    assert [(s.start, s.stop) for s in StepPlan(0, 3, 8, 2)] == [(0, 3)]
    assert [(s.start, s.stop) for s in StepPlan(0, 19, 8, 2, drop_last=True)] == [(0, 8), (8, 16)]


# Every sample once


@settings(deadline=None, max_examples=60)
@given(
    st.integers(1, 120),
    st.integers(4, 20),
    st.lists(st.tuples(st.integers(1, 4), st.integers(1, 4)), min_size=1),
)
def test_each_sample_once_for_any_sequence_of_world_sizes(n, batch_size, attempts):
    """Restarts on other numbers of ranks in the middle of an epoch lose and repeat no sample."""
    seen, state = [], None
    for world, steps in [*attempts, (3, 10**6)]:
        loaders = [loader_of(n, batch_size, rank, world, seed=9) for rank in range(world)]
        for loader in loaders:
            loader.load_state_dict(state or loader.state_dict())
        if loaders[0].epoch:
            break
        for _, batches in zip(range(steps), zip(*loaders, strict=True), strict=False):
            seen += [index for batch in batches for index in batch.indices.tolist()]
            state = loaders[0].state_dict()
            assert all(loader.state_dict() == state for loader in loaders)
    assert seen == permutation(9, 0, n).tolist()


def test_union_over_ranks_is_the_slice_of_the_permutation():
    """Step s holds samples [s*B, (s+1)*B) of the permutation, split contiguously over the ranks."""
    order = permutation(3, 0, 50).tolist()
    loaders = [loader_of(50, 12, rank, 3) for rank in range(3)]
    steps = [[b.indices.tolist() for b in batches] for batches in zip(*loaders, strict=True)]
    assert [flat(step) for step in steps] == [order[0:12], order[12:24], order[24:36], order[36:50]]
    assert [[len(part) for part in step] for step in steps] == [[4, 4, 4]] * 3 + [[5, 5, 4]]
    assert [[b.tolist() for b in batch] for batch in loader_of(50, 12, 1, 3)] == [[step[1]] for step in steps]


def test_rank_without_samples_gets_one_of_weight_zero():
    """With fewer samples left than ranks, each still has a batch to run; idle ones weigh nothing."""
    loaders = [loader_of(14, 8, rank, 4) for rank in range(4)]
    for loader in loaders:
        loader.load_state_dict({"epoch": 0, "samples_done": 12, "seed": 3, "length": 14})
    batches = [next(iter(loader)) for loader in loaders]
    assert [(batch.count, batch.weight, len(batch[0])) for batch in batches] == [
        (1, 2.0, 1),
        (1, 2.0, 1),
        (0, 0.0, 1),
        (0, 0.0, 1),
    ]
    assert flat(b.indices.tolist() for b in batches) == permutation(3, 0, 14).tolist()[12:]


@pytest.mark.parametrize(("n", "batch_size", "world"), [(19, 8, 2), (23, 8, 3), (50, 12, 4), (5, 4, 4)])
def test_weighted_mean_over_ranks_is_the_exact_gradient(n, batch_size, world):
    """DDP's mean of weighted gradients equals the gradient of one process, in uneven steps too."""
    torch.manual_seed(0)
    x, y = torch.randn(n, 5, dtype=torch.float64), torch.randn(n, 1, dtype=torch.float64)
    weights = torch.randn(5, 1, dtype=torch.float64, requires_grad=True)

    def gradient(batch) -> torch.Tensor:
        loss = ((batch[0] @ weights - batch[1]) ** 2).mean()
        return torch.autograd.grad(loss * batch.weight, weights)[0]

    ranks = [EpochLoader((x, y), batch_size, seed=1).placed(rank, world) for rank in range(world)]
    uneven = 0
    for step in zip(*ranks, strict=True):
        mean = sum(gradient(batch) for batch in step) / world
        whole = torch.cat([batch.indices for batch in step])
        loss = ((x[whole] @ weights - y[whole]) ** 2).mean()
        torch.testing.assert_close(mean, torch.autograd.grad(loss, weights)[0], rtol=1e-12, atol=1e-12)
        uneven += any(batch.weight != 1.0 for batch in step)
    assert uneven


# Epochs and state


def test_epochs_advance_and_differ():
    """An exhausted iteration advances the epoch; each epoch has its own order; without shuffle none."""
    loader = loader_of(20, 6)
    first, second = ([b.indices.tolist() for b in loader] for _ in range(2))
    assert loader.epoch == 2
    assert flat(first) == permutation(3, 0, 20).tolist()
    assert flat(second) == permutation(3, 1, 20).tolist()
    assert flat(b[0].tolist() for b in loader_of(20, 6, shuffle=False)) == list(range(20))


def test_leaving_a_loop_early_continues_as_a_resumed_process_does():
    """After a `break` the next loop takes the rest of the epoch, exactly as after loading the state."""
    loader = loader_of(20, 6)
    for step, _ in enumerate(loader):
        if step == 1:
            break
    resumed = loader_of(20, 6)
    resumed.load_state_dict(loader.state_dict())
    assert loader.state_dict() == {"epoch": 0, "samples_done": 12, "seed": 3, "length": 20}
    assert loader.steps_left == 2
    rest = [b.indices.tolist() for b in loader]
    assert rest == [b.indices.tolist() for b in resumed]
    assert flat(rest) == permutation(3, 0, 20).tolist()[12:]
    assert (
        loader.state_dict()
        == resumed.state_dict()
        == {"epoch": 1, "samples_done": 0, "seed": 3, "length": 20}
    )


def test_leaving_at_the_last_batch_completes_the_epoch():
    """A limit that ends the loop at its last batch leaves no empty epoch behind."""
    loader = loader_of(12, 6)
    for step, _ in enumerate(loader):
        if step == 1:
            assert loader.state_dict()["samples_done"] == 12
            break
    assert (loader.epoch, loader.samples_done) == (1, 0)


def test_set_epoch_keeps_the_place_in_the_present_epoch():
    """`set_epoch` goes to the start of another epoch, and does nothing when the loader is in it."""
    loader = loader_of(12, 6)
    loader.load_state_dict({"epoch": 2, "samples_done": 6, "seed": 3, "length": 12})
    loader.set_epoch(2)
    assert loader.samples_done == 6
    loader.set_epoch(5)
    assert (loader.epoch, loader.samples_done) == (5, 0)
    assert flat(b.indices.tolist() for b in loader) == permutation(3, 5, 12).tolist()


def test_seeking_reads_no_data():
    """Continuing deep in an epoch touches no sample before it."""
    touched = []

    class Recording(Noisy):
        def __getitem__(self, index: int):
            touched.append(index)
            return super().__getitem__(index)

    loader = EpochLoader(Recording(1000), 10, seed=0)
    loader.load_state_dict({"epoch": 7, "samples_done": 990, "seed": 0, "length": 1000})
    assert len(list(loader)) == 1
    assert touched == permutation(0, 7, 1000).tolist()[990:]


def test_state_of_other_data_is_refused_in_the_middle_of_an_epoch():
    """With another length "each sample once" cannot be kept, so only the start of an epoch is accepted."""
    loader = loader_of(12, 6)
    with pytest.raises(UsageError, match=r"20 samples.*12 now"):
        loader.load_state_dict({"epoch": 2, "samples_done": 6, "seed": 3, "length": 20})
    loader.load_state_dict({"epoch": 2, "samples_done": 0, "seed": 3, "length": 20})
    assert loader.epoch == 2


def test_two_loops_at_once_are_refused():
    """A second loop over the same loader ends the first with an error instead of mixing them."""
    loader = loader_of(30, 6)
    first = iter(loader)
    next(first)
    second = iter(loader)
    next(second)
    with pytest.raises(NotAllowedNowError, match="newer"):
        next(first)
    assert next(second).indices.tolist() == permutation(3, 0, 30).tolist()[12:18]


# Batches and datasets


def test_batches_unpack_and_know_their_place():
    """A batch is what the dataset gave, collated, with weight, indices and count beside it."""
    x, y = torch.arange(8.0).reshape(4, 2), torch.arange(4)
    for dataset in [(x, y), TensorDataset(x, y), [(x[i], int(y[i])) for i in range(4)]]:
        for bx, by in EpochLoader(dataset, 2, seed=0):
            assert torch.equal(bx, x[by])
        batch = next(iter(EpochLoader(dataset, 2, seed=0)))
        assert (batch.weight, batch.count) == (1.0, 2)
        assert torch.equal(batch.indices, batch[1])
    (row,) = next(iter(EpochLoader(x, 2, seed=0)))
    assert row.shape == (2, 2)
    mapping = next(iter(EpochLoader([{"a": i} for i in range(4)], 2, seed=0)))
    assert mapping["a"].tolist() == mapping.indices.tolist()
    assert mapping.weight == 1.0
    collated = next(iter(EpochLoader((x, y), 2, seed=0, collate=len)))
    assert collated.data == 2
    assert tuple(collated) == (2,)


def test_changing_a_batchs_indices_changes_no_later_batch():
    """What a loop does with a batch does not reach into the loader."""
    loader = loader_of(12, 6)
    for batch in loader:
        batch.indices.fill_(-1)
    loader.set_epoch(0)
    assert flat(b.indices.tolist() for b in loader) == permutation(3, 0, 12).tolist()


def test_augmentation_depends_on_the_sample_alone():
    """Seeds per sample make augmentation the same for any world size, restart and number of workers."""
    plain = rows_of(EpochLoader(Noisy(30), 8, seed=4))
    ranks = {}
    for rank in range(3):
        ranks |= rows_of(EpochLoader(Noisy(30), 8, seed=4).placed(rank, 3))
    workers = rows_of(EpochLoader(Noisy(30), 8, seed=4, num_workers=1))
    assert plain == ranks == workers
    assert len(set(map(tuple, plain.values()))) == 30
    loader = EpochLoader(Noisy(30), 8, seed=4)
    loader.set_epoch(1)
    assert not set(map(tuple, rows_of(loader).values())) & set(map(tuple, plain.values()))


@pytest.mark.parametrize("options", [{}, {"num_workers": 1}, {"sample_seeds": False, "num_workers": 1}])
def test_global_streams_stay_where_they_are(options):
    """Making iterators and reading through them moves no stream of this process."""
    before = RandomStreams.capture()
    assert len(list(EpochLoader(Noisy(12), 4, seed=0, **options))) == 3
    assert RandomStreams.capture() == before


def test_streams_come_back_when_a_dataset_raises():
    """A failing dataset leaves the streams as they were."""

    class Failing(Noisy):
        def __getitem__(self, index: int):
            raise OSError("no such image")

    before = RandomStreams.capture()
    with pytest.raises(OSError, match="no such image"):
        next(iter(EpochLoader(Failing(4), 2, seed=0)))
    assert RandomStreams.capture() == before


def test_without_seeds_a_dataset_may_fetch_many_at_once():
    """`sample_seeds=False` uses a dataset's `__getitems__` as torch's own loader does."""
    asked = []

    class Many(Noisy):
        def __getitems__(self, indices: list[int]):
            asked.append(indices)
            return indices

    loader = EpochLoader(Many(6), 3, seed=0, sample_seeds=False)
    assert [b.data.tolist() for b in loader] == asked


def test_persistent_workers_serve_several_epochs():
    """Workers that stay read every epoch in its own order, also after a loop that was left early."""
    loader = EpochLoader((torch.arange(12),), 4, seed=3, num_workers=1, persistent_workers=True)
    next(iter(loader))
    rest = [b.indices.tolist() for b in loader]
    assert flat(rest) == permutation(3, 0, 12).tolist()[4:]
    assert flat(b[0].tolist() for b in loader) == permutation(3, 1, 12).tolist()


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: EpochLoader(iter([1]), 1), "__getitem__"),
        (lambda: EpochLoader([], 1), "empty"),
        (lambda: EpochLoader([1], 0), "batch_size"),
        (lambda: EpochLoader([1], True), "batch_size"),
        (lambda: EpochLoader([1], 1, seed=-1), "seed"),
        (lambda: EpochLoader([1], 1, num_workers=-1), "num_workers"),
        (lambda: EpochLoader([1], 1, sampler=[0]), "sampler"),
        (lambda: EpochLoader((torch.ones(2), torch.ones(3)), 1), "lengths"),
        (lambda: EpochLoader([1], 1).placed(2, 2), "rank 2"),
        (lambda: len(EpochLoader([1] * 9, 2).placed(0, 3)), "all ranks together"),
        (lambda: EpochLoader([1], 1).set_epoch(-1), "epoch"),
    ],
)
def test_bad_arguments_are_refused(make, words):
    """Arguments that cannot be are refused by a message that names them."""
    with pytest.raises(UsageError, match=words):
        make()
