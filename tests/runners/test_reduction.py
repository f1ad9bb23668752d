"""Metrics: the reduction over steps and ranks is that of all values in rank order."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from paired_sessions import paired_sessions
from ranks import on_ranks

from torchrelay.errors import UsageError
from torchrelay.jobs.session import Solo
from torchrelay.runners.session.local import LocalSession
from torchrelay.runners.session.metrics import REDUCTIONS, MetricLog, reduce_metrics

values = st.one_of(st.floats(-1e6, 1e6), st.sampled_from([math.nan, math.inf, -math.inf]))
weights = st.sampled_from([0, 0.5, 1, 3])
logged = st.lists(st.lists(st.tuples(values, weights, st.booleans()), max_size=6), min_size=1, max_size=4)

NUMPY = {
    "mean": lambda v, w: np.sum(v * w) / np.sum(w),
    "sum": lambda v, w: np.sum(v * w),
    "last": lambda v, w: v[-1],
    "min": lambda v, w: np.min(v),
    "max": lambda v, w: np.max(v),
}


def expected(reduce, nodes):
    kept = [(value, weight) for node in nodes for value, weight, _ in node if weight]
    if not kept:
        return {}
    with np.errstate(all="ignore"):
        v, w = (np.array(column, dtype=np.float64) for column in zip(*kept, strict=True))
        return {"x": float(NUMPY[reduce](v, w))}


@settings(max_examples=200, deadline=None)
@given(st.sampled_from(REDUCTIONS), logged)
def test_reduction_is_that_of_numpy_over_all_values_in_rank_order(reduce, nodes):
    """Floats and tensors alike, weights 0 left out, over any split into nodes."""
    logs = []
    for node in nodes:
        log = MetricLog()
        for value, weight, as_tensor in node:
            given_value = torch.tensor(value, dtype=torch.float64) if as_tensor else value
            log.log("x", given_value, reduce, torch.tensor(float(weight)) if as_tensor else weight)
        logs.append(log)
    result = reduce_metrics(Solo(), logs)
    assert result == pytest.approx(expected(reduce, nodes), rel=1e-9, abs=1e-6, nan_ok=True)


@settings(max_examples=20, deadline=None)
@given(st.sampled_from(REDUCTIONS), logged)
def test_processes_reduce_to_the_same_bits_as_emulated_nodes(reduce, nodes):
    """The same values logged in several processes and on several nodes of one give the same floats."""

    def log_of(node):
        log = MetricLog()
        for value, weight, _ in node:
            log.log("x", value, reduce, weight)
        return log

    alone = reduce_metrics(Solo(), [log_of(node) for node in nodes])
    sessions = paired_sessions(len(nodes))
    apart = on_ranks(len(nodes), lambda r: reduce_metrics(sessions[r].peers, [log_of(nodes[r])]))
    assert [str(result) for result in apart] == [str(alone)] * len(nodes)


def test_a_value_of_weight_zero_is_ignored_even_nan():
    """NaN with weight 0, as number and as tensor, changes nothing and alone is no metric."""
    log = MetricLog()
    log.log("a", 2.0)
    log.log("a", math.nan, weight=0)
    log.log("a", torch.tensor(math.nan), weight=torch.tensor(0))
    log.log("b", math.nan, weight=0)
    log.log("m", math.nan, "min", weight=torch.tensor(0.0))
    log.log("m", 3, "min")
    assert reduce_metrics(Solo(), [log]) == {"a": 2.0, "m": 3.0}


def test_tensors_are_detached_copied_and_summed_in_double_precision():
    """A later in-place change of a logged tensor, its graph and its precision do not matter."""
    log = MetricLog()
    value = torch.ones((), requires_grad=True)
    log.log("grad", value * 2)
    held = torch.tensor([5.0])
    log.log("held", held, "last")
    held.fill_(-1)
    for _ in range(1000):
        log.log("sum", torch.tensor(0.1, dtype=torch.float32), "sum")
    result = reduce_metrics(Solo(), [log])
    assert result["grad"] == 2
    assert result["held"] == 5
    assert result["sum"] == pytest.approx(1000 * float(np.float32(0.1)), rel=1e-12)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("", 1), "invalid metric name"),
        (("a\nb", 1), "invalid metric name"),
        ((3, 1), "invalid metric name"),
        (("a", torch.ones(2)), r"shape \(2,\).*mean\(\)"),
        (("a", torch.ones((), dtype=torch.complex64)), "one real number"),
        (("a", object()), "is a object"),
        (("a", None), "is a NoneType"),
        (("a", 1, "median"), "expected mean, sum, last, min, max"),
        (("a", 1, "mean", -1), "invalid weight"),
        (("a", 1, "mean", math.nan), "invalid weight"),
    ],
)
def test_a_bad_log_is_refused_by_name(arguments, message):
    """The message names the metric and says what would be right."""
    with pytest.raises(UsageError, match=message):
        MetricLog().log(*arguments)


def test_one_name_has_one_reduction_on_a_node_and_over_all():
    """Two reductions of one name are a UsageError: at once on one node, at the reduction between two."""
    one, other = MetricLog(), MetricLog()
    one.log("a", 1)
    with pytest.raises(UsageError, match="reduce='mean' and with reduce='sum'"):
        one.log("a", 1, "sum")
    other.log("a", 1, "max")
    with pytest.raises(UsageError, match="reduce='mean' and with reduce='max'"):
        reduce_metrics(Solo(), [one, other])


def test_ctx_tells_the_metrics_of_the_last_reduction():
    """ctx.metric and ctx.metrics give what the epoch before was reduced to; unknown names list the known."""
    session = LocalSession(["a", "b"])
    session.run(lambda ctx: ctx.log("loss", ctx.rank, weight=1 + 2 * ctx.rank))
    assert session.reduce_metrics() == {"loss": 0.75}
    session.run(lambda ctx: ctx.log("acc", 1, "last"))
    assert session.reduce_metrics() == {"acc": 1.0}
    handle = session.run(lambda ctx: (ctx.metric("loss"), dict(ctx.metrics)))
    assert handle.fetch("b") == (0.75, {"loss": 0.75, "acc": 1.0})
    with pytest.raises(UsageError, match="no metric 'los' was reduced yet; there are: acc, loss"):
        session.run(lambda ctx: ctx.metric("los"))
