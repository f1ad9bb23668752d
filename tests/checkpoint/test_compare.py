"""Comparing replicas: which leaves, when, and what a difference means."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import torch
from epochs import buffer, moment, parameter, tensor, value

from torchrelay.checkpoint.format import canonical_json
from torchrelay.checkpoint.save import replicas
from torchrelay.checkpoint.save.replicas import (
    Lone,
    Mode,
    ReplicaVerdict,
    compare_replicas,
    digests_of,
    fails_when_different,
    is_compared,
    mode_at,
    verdict,
)


def test_parameters_are_compared_whole_at_the_first_save_and_every_ten_epochs():
    """Whole after a start and at every tenth epoch, samples between."""
    assert mode_at(3, first=True) is Mode.WHOLE
    assert [mode_at(epoch, first=False) is Mode.WHOLE for epoch in (1, 9, 10, 11, 20)] == [
        False,
        False,
        True,
        False,
        True,
    ]


def test_samples_see_the_ends_and_whole_digests_see_everything():
    """A changed element between samples is found by the whole digest, at the ends by both."""
    weight = torch.zeros(1_000_000)

    def digest(mode):
        return digests_of([parameter("w", weight)], mode)["w"]

    before = {mode: digest(mode) for mode in Mode}
    weight[200_000] = 1
    assert digest(Mode.SAMPLES) == before[Mode.SAMPLES]
    assert digest(Mode.WHOLE) != before[Mode.WHOLE]
    weight[200_000], weight[-1] = 0, 1
    assert digest(Mode.SAMPLES) != before[Mode.SAMPLES]


def test_other_tensors_are_always_compared_whole():
    """Sampling is for parameters and optimizer state only."""
    ema = torch.zeros(1_000_000)
    before = digests_of([tensor("ema", ema), value("total", 1)], Mode.SAMPLES)
    ema[200_000] = 1
    after = digests_of([tensor("ema", ema), value("total", 2)], Mode.SAMPLES)
    assert before["ema"] != after["ema"]
    assert before["total"] != after["total"]


def test_dtype_and_shape_belong_to_the_digest_and_layout_in_memory_does_not():
    """Equal bytes of another form are different; a transposed copy with equal elements is not."""
    square = torch.arange(9.0).reshape(3, 3)
    names = digests_of(
        [parameter("a", square), parameter("b", square.flatten()), parameter("c", square.view(torch.int32)),
         parameter("d", square.t().contiguous().t())], Mode.WHOLE,
    )  # fmt: skip
    assert len({names["a"], names["b"], names["c"]}) == 3
    assert names["a"] == names["d"]


def test_what_is_never_compared():
    """Buffers that DDP broadcasts, aliases, and leaves that belong to a rank or host."""
    assert not is_compared(buffer("model.mean", torch.zeros(1)), "replicated", {"model.mean"})
    assert is_compared(buffer("model.mean", torch.zeros(1)), "replicated")
    assert not is_compared(parameter("model.b", torch.zeros(1), alias_of="model.a"), "replicated")
    assert not is_compared(value("total", 1), "rank")
    assert not is_compared(value("total", 1), "host")


def test_a_difference_demotes_or_fails():
    """Names of init become `rank`; parameters, optimizer state and forced blobs fail the save, with nodes."""
    leaves = [
        parameter("model.w", torch.zeros(1)),
        moment("opt.m", torch.zeros(1)),
        value("total", 1),
        value("forced", 1),
    ]
    strict = {leaf.name for leaf in leaves if fails_when_different(leaf, {"forced"})}
    assert strict == {"model.w", "opt.m", "forced"}
    same = {"model.w": "a", "opt.m": "a", "total": "a", "forced": "a"}
    found = verdict({0: same, 1: {**same, "total": "b"}, 2: {**same, "forced": "c", "model.w": "x"}}, strict)
    assert found == ReplicaVerdict(frozenset({"total"}), {"forced": (2,), "model.w": (2,)})
    assert verdict({0: same, 1: dict(same)}, strict) == ReplicaVerdict()


def test_of_two_nodes_the_first_counts_as_right():
    """With one against one, the message names the later node."""
    assert verdict({0: {"w": "a"}, 1: {"w": "b"}}, {"w"}).failures == {"w": (1,)}


class Recorded:
    """Peers of which this is rank 0; the others' answers are computed from theirs. Counts exchanges."""

    def __init__(self, hosted):
        self.hosted, self.rank, self.size, self.topics = hosted, 0, len(hosted), []

    def exchange(self, topic, mine, *, deadline_secs=None, **_):
        self.topics.append(topic)
        if topic == "t":
            return [
                mine,
                *(
                    {"value": [[node, groups_of(d), [], False] for node, d in one.items()]}
                    for one in self.hosted[1:]
                ),
            ]
        if topic.endswith("in detail"):
            return [mine, *([[node, d] for node, d in one.items()] for one in self.hosted[1:])]
        return [sorted({"w"})] * self.size


def groups_of(digests):
    return [replicas._combined(digests)]


class Meeting:
    """Peers in threads, which meet at each topic and count what travels."""

    def __init__(self, size):
        self.size, self.barrier, self.posted, self.topics = size, threading.Barrier(size), [None] * size, []

    def of(self, rank):
        def exchange(topic, value, *, deadline_secs=None, **_):
            self.posted[rank] = value
            self.barrier.wait(60)
            found = list(self.posted)
            if rank == 0:
                self.topics.append((topic, len(canonical_json.dumps(found))))
            self.barrier.wait(60)
            return found

        return SimpleNamespace(rank=rank, size=self.size, exchange=exchange)


def compared(hosted, lone=None):
    """The verdict that all processes get, one node each, and the topics with the bytes of each."""
    meeting = Meeting(len(hosted))

    def one(rank):
        alone = {rank: [Lone(tuple(d), lambda mode, d=d: counted(d)) for d in (lone or {}).get(rank, [])]}
        return compare_replicas(meeting.of(rank), "t", lambda: {rank: hosted[rank]}, FORCED, lone=alone)

    hashed = []

    def counted(digests):
        hashed.append(digests)
        return digests

    with ThreadPoolExecutor(len(hosted)) as pool:
        verdicts = list(pool.map(one, range(len(hosted))))
    assert all(found == verdicts[0] for found in verdicts)
    return verdicts[0], meeting.topics, hashed


FORCED = [f"w{n} {side}" for n in range(1000) for side in "ab"]


def test_replicas_of_shards_cost_one_small_exchange():
    """Nodes of one mesh have parts of other names; no detail travels where all are alike."""
    a, b = ({f"w{n} {side}": f"{n}" for n in range(1000)} for side in "ab")
    plain = {"x": "1"}
    found, topics, _ = compared([[plain, a], [plain, b], [plain, dict(a)], [plain, dict(b)]])
    assert found == ReplicaVerdict() and [topic for topic, _ in topics] == ["t"] and topics[0][1] < 1500
    found, topics, _ = compared([[plain, a], [plain, b], [plain, dict(a)], [plain, {**b, "w7 b": "odd"}]])
    assert found == ReplicaVerdict(frozenset(), {"w7 b": (3,)})


def test_parts_on_several_meshes_are_compared_and_others_not_hashed():
    """Parts that no place of their mesh shares are hashed only where another mesh has the same ones."""
    lone = {rank: [{f"w{n} {'ab'[rank % 2]}": "same" for n in range(3)}] for rank in range(4)}
    found, topics, hashed = compared([[{}]] * 4, lone)
    assert found == ReplicaVerdict() and len(topics) == 2 and len(hashed) == 4
    lone[3] = [{**lone[3][0], "w1 b": "odd"}]
    found, _, _ = compared([[{}]] * 4, lone)
    assert found == ReplicaVerdict(frozenset(), {"w1 b": (3,)})
    apart = {rank: [{f"w{rank} a": "mine"}] for rank in range(4)}
    found, topics, hashed = compared([[{}]] * 4, apart)
    assert found == ReplicaVerdict() and len(topics) == 1 and hashed == []


def run(*hosted):
    peers = Recorded(hosted)
    return compare_replicas(peers, "t", lambda: {n: [d] for n, d in hosted[0].items()}, {"w"}), peers.topics


def test_equal_replicas_cost_one_small_exchange():
    """Details travel only where combined digests differ."""
    found, topics = run({0: {"w": "a", "v": "b"}}, {1: {"w": "a", "v": "b"}})
    assert found == ReplicaVerdict()
    assert topics == ["t"]


def test_a_difference_is_told_in_detail():
    """The second exchange names leaf and node."""
    found, topics = run({0: {"w": "a", "v": "b"}}, {1: {"w": "z", "v": "c"}})
    assert found == ReplicaVerdict(frozenset({"v"}), {"w": (1,)})
    assert len(topics) == 3


def test_nodes_with_different_leaves_compare_what_they_share():
    """Stages of a pipeline are compared on the leaves that both have."""
    found, _ = run({0: {"w": "a", "first": "b"}}, {1: {"w": "z", "second": "c"}})
    assert found == ReplicaVerdict(frozenset(), {"w": (1,)})
    found, _ = run({0: {"w": "a", "first": "b"}}, {1: {"w": "a", "second": "c"}})
    assert found == ReplicaVerdict()


def test_what_is_due_for_one_is_due_for_all():
    """Every process hears whether any wants all bytes compared, and lone leaves are hashed accordingly."""
    asked = []

    def lone(mode):
        asked.append(mode)
        return {"w": "a"}

    def verdicts(due):
        meeting = Meeting(len(due))

        def one(rank):
            alone = {rank: [Lone(("w",), lone)]}
            return compare_replicas(
                meeting.of(rank), "t", lambda: {rank: [{"v": "b"}]}, {"w"}, lone=alone, due=due[rank]
            )

        with ThreadPoolExecutor(len(due)) as pool:
            return list(pool.map(one, range(len(due))))

    assert verdicts([False, True]) == [ReplicaVerdict(due=True)] * 2
    assert verdicts([False, False]) == [ReplicaVerdict()] * 2
    assert asked == [Mode.WHOLE] * 2 + [Mode.SAMPLES] * 2
