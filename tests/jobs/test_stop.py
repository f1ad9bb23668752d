"""Stop conditions: limits, metrics, and everything that a user may give as one."""

import math
from dataclasses import dataclass, field
from datetime import timedelta
from types import MappingProxyType

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from torchrelay.errors import UsageError
from torchrelay.jobs.cluster import Node
from torchrelay.jobs.job import Job
from torchrelay.jobs.stop import (
    StopAnswer,
    combine,
    condition_of,
    early_stopping,
    epoch_limiter,
    max_epochs,
    max_steps,
    max_time,
)
from torchrelay.jobs.task import Task
from torchrelay.jobs.workspace import Workspace
from torchrelay.runners.session.stop import limits_of

NO, YES = StopAnswer(False), StopAnswer(True, "it is done")


@dataclass
class Ctx:
    """What a condition sees of a node."""

    epoch: int = 1
    total_steps: int = 0
    elapsed_secs: float = 0.0
    metrics: dict = field(default_factory=dict)
    workspace: Workspace = field(default_factory=Workspace)


# Limits


@pytest.mark.parametrize(
    ("condition", "before", "after"),
    [
        (max_epochs(3), Ctx(epoch=2), Ctx(epoch=3)),
        (max_steps(100), Ctx(total_steps=99), Ctx(total_steps=101)),
        (max_time(60), Ctx(elapsed_secs=59.9), Ctx(elapsed_secs=60.0)),
    ],
)
def test_limits_say_stop_when_they_are_reached(condition, before, after):
    """A limit compares a total of the run, is marked as a limit and says why it stops."""
    assert condition.ask(before) == NO
    assert condition.ask(after).stop
    assert condition.ask(after).reason
    assert condition.limit
    assert condition.rule == "any"


def test_limits_show_what_ends_a_running_epoch():
    """Limits on steps and seconds can be read, so that a running epoch can obey them."""
    assert max_steps(7).steps == 7
    assert max_time("00:01:00").secs == 60.0
    conditions = [max_steps(9), max_steps(7), max_time(60), Impatient()]
    assert limits_of(conditions) == {"limit_steps": 7, "limit_secs": 60.0}
    assert limits_of([Impatient()]) == {"limit_steps": None, "limit_secs": None}


class Impatient:
    """No limit of the run: its `steps` and `secs` are its own affair."""

    name, rule, limit, steps, secs = "impatient", "any", False, 3, "soon"

    def ask(self, ctx):
        return StopAnswer(False)


@pytest.mark.parametrize(
    ("given_time", "secs"),
    [
        ("00:00:01", 1),
        ("12:34:56", 45296),
        ("100:00:00", 360000),
        ("2-01:00:00", 176400),
        ("1h30m", 5400),
        ("90", 90),
        (1.5, 1.5),
        (timedelta(minutes=2), 120),
    ],
)
def test_max_time_reads_the_usual_forms(given_time, secs):
    """It reads what `time_limit` reads: clock times, also with days, units, seconds and timedeltas."""
    assert max_time(given_time).secs == secs


@pytest.mark.parametrize(
    "bad",
    [
        "",
        "soon",
        "1:2",
        "00:60:00",
        "00:00:60",
        "-1:00:00",
        0,
        -1,
        math.nan,
        math.inf,
        True,
        None,
        timedelta(0),
    ],
)
def test_max_time_refuses_the_rest(bad):
    """Times that are not positive, and what is not a time, are refused with the forms that are read."""
    with pytest.raises(UsageError, match="01:30:00"):
        max_time(bad)


@pytest.mark.parametrize("make", [max_epochs, max_steps])
@pytest.mark.parametrize("bad", [0, -1, 1.0, True, "3", None])
def test_counts_are_positive_integers(make, bad):
    """A number of epochs or steps is an integer from 1."""
    with pytest.raises(UsageError, match="integer >= 1"):
        make(bad)


# Early stopping


def verdicts(condition, values) -> list[bool]:
    return [condition.ask(Ctx(epoch=i, metrics={"m": v})).stop for i, v in enumerate(values, 1)]


@pytest.mark.parametrize(
    ("options", "values", "expected"),
    [
        ({"patience": 2}, [3, 2, 2, 2], [False, False, False, True]),
        ({"patience": 2}, [3, 4, 2, 3, 3], [False, False, False, False, True]),
        ({"patience": 1, "mode": "max"}, [1, 2, 2], [False, False, True]),
        ({"patience": 1, "min_delta": 0.5}, [3, 2.4, 2.0], [False, False, True]),
        ({"patience": 1}, [1, 0.0, -1, 0.0], [False, False, False, True]),
        ({"patience": 2}, [math.nan, math.nan], [False, True]),
        ({"patience": 2}, [-math.inf, 1, math.nan, 0.5], [False, False, False, False]),
        ({"patience": 2, "mode": "max"}, [math.inf, 1, 2], [False, False, False]),
    ],
)
def test_early_stopping_counts_epochs_without_improvement(options, values, expected):
    """Zero is a value, non-finite values never improve nor become the best, `min_delta` must be exceeded."""
    assert verdicts(early_stopping("m", **options), values) == expected


@given(st.lists(st.floats(0, 10), min_size=1, max_size=12), st.integers(0, 12), st.integers(1, 4))
def test_early_stopping_resumes_where_it_was(values, cut, patience):
    """Saving and loading its memory anywhere changes no later verdict."""
    whole = early_stopping("m", patience=patience)
    expected = verdicts(whole, values)
    first, second = early_stopping("m", patience=patience), early_stopping("m", patience=patience)
    head = verdicts(first, values[:cut])
    second.load_state_dict(first.state_dict())
    tail = [
        second.ask(Ctx(epoch=i, metrics={"m": v})).stop for i, v in enumerate(values[cut:], len(head) + 1)
    ]
    assert head + tail == expected


def test_early_stopping_counts_an_epoch_once():
    """Emulated nodes ask one object; the second question in an epoch gets the same answer."""
    condition = early_stopping("m", patience=2)
    for epoch in (1, 2):
        assert [condition.ask(Ctx(epoch=epoch, metrics={"m": 1.0})).stop for _ in range(3)] == [False] * 3
    assert [condition.ask(Ctx(epoch=3, metrics={"m": 1.0})).stop for _ in range(3)] == [True] * 3


def test_early_stopping_names_the_metrics_there_are():
    """A metric that nobody logged is an error that lists what was logged."""
    with pytest.raises(UsageError, match=r"'val/loss'.*train/loss"):
        early_stopping("val/loss").ask(Ctx(metrics={"train/loss": 0.0}))


@pytest.mark.parametrize(
    "options",
    [
        {"metric": ""},
        {"mode": "least"},
        {"patience": 0},
        {"patience": True},
        {"min_delta": -1},
        {"min_delta": math.nan},
        {"min_delta": True},
    ],
)
def test_early_stopping_refuses_what_cannot_be(options):
    """Each argument is checked when the condition is made."""
    with pytest.raises(UsageError, match="early_stopping"):
        early_stopping(**{"metric": "m", **options})


def test_early_stopping_is_a_blob_of_its_job():
    """Its memory is saved with the job's state under a valid name, unless the user registered it."""
    job, condition = Job(), early_stopping("val.loss:1")
    job.stop_when(condition)
    assert [(blob.name, blob.source) for blob in job.blobs] == [("early_stopping/val_loss_1", condition)]
    mine = early_stopping("m")
    other = Job(blobs={"mine": mine})
    other.stop_when(mine)
    assert other.blobs.names == ("mine",)


# Epoch limiter


def run_epochs(job: Job, ws: Workspace, epochs: int, after: int = 0) -> list[bool]:
    """What an executor does with the limiter's tasks, asking after each epoch."""
    stops = []
    for epoch in range(after + 1, after + epochs + 1):
        for task in job.epoch_group.tasks():
            for step in task.steps:
                step(Ctx(epoch=epoch, workspace=ws.child()))
        stops.append(job.stop_conditions[0].ask(Ctx(epoch=epoch, workspace=ws)).stop)
    return stops


@pytest.mark.parametrize("context", [Job.__enter__, lambda job: None])
def test_epoch_limiter_counts_in_the_workspace(context):
    """The count is a blob made by init and advanced by the epoch group, in or outside of the job's block."""
    job, ws = Job(), Workspace("trainer_1")
    entered = context(job)
    try:
        with Node("trainer_1"):
            epoch_limiter(job, 3)
    finally:
        if entered:
            job.__exit__(None, None, None)
    assert [task.node for task in (*job.init_group.tasks(), *job.epoch_group.tasks())] == ["trainer_1"] * 2
    job.init_group.tasks()[0].steps[0](ws)
    assert run_epochs(job, ws, 3) == [False, False, True]
    assert ws["epoch_limiter"] == 3
    assert job.stop_conditions[0].ask(Ctx(workspace=Workspace("trainer_0"))) == NO


def test_r12_a_raised_limit_continues_from_the_saved_count():
    """R12: the limit comes from today's program, the epochs from the run, also without a saved count."""
    first, second, ws = Job(), Job(), Workspace()
    epoch_limiter(first, 2)
    first.init_group.tasks()[0].steps[0](ws)
    assert run_epochs(first, ws, 2) == [False, True]
    condition = epoch_limiter(second, 4)
    assert condition.limit
    saved = type("Saved", (), {"epoch": 2})()
    assert condition.ask(saved) == NO
    assert run_epochs(second, ws, 2, after=2) == [False, True]
    assert run_epochs(second, Workspace("added"), 2, after=2) == [False, True]


@pytest.mark.parametrize("bad", [0, -1, True, 1.5])
def test_epoch_limiter_needs_an_epoch(bad):
    """A limit below one epoch is refused before the job has changed."""
    job = Job()
    with pytest.raises(UsageError, match="num_epochs"):
        epoch_limiter(job, bad)
    assert not job.stop_conditions
    assert not job.init_group.tasks()


# Everything that can be given


@pytest.mark.parametrize(
    "function",
    [lambda: True, lambda ws: ws["done"], lambda ctx: ctx.epoch == 1, lambda: YES, lambda: torch.tensor(1)],
)
def test_functions_are_called_as_steps_are(function):
    """A function of nothing, of the workspace or of the context is a condition."""
    ctx = Ctx()
    ctx.workspace["done"] = True
    assert condition_of(function).ask(ctx).stop
    assert not condition_of(function).limit


def test_tensors_are_read_when_asked():
    """A tensor of one element is read at each question."""
    done = torch.tensor(0)
    condition = condition_of(done)
    assert condition.ask(Ctx()) == NO
    done.fill_(1)
    assert condition.ask(Ctx()).stop


def test_blobs_are_read_where_they_are():
    """A blob's name is read on the current node, `node:blob` on that node, else on every node."""
    with Node("trainer_1"):
        here = condition_of("done")
    there, everywhere = condition_of("trainer_1:done"), condition_of("done")
    ws = Workspace("trainer_1")
    ws["done"] = 1
    for condition in (here, there, everywhere):
        assert condition.ask(Ctx(workspace=ws)).stop
    elsewhere = Ctx(workspace=Workspace("trainer_0"))
    assert here.ask(elsewhere) == there.ask(elsewhere) == NO
    with pytest.raises(UsageError, match=r"'done'.*init group"):
        everywhere.ask(elsewhere)


def test_outputs_of_tasks_are_read_on_their_node():
    """A task's output stops the job when it is true on the node that ran it."""
    task = Task(lambda: None, node="trainer_1", outputs=["done"])
    condition = condition_of(task.outputs[0])
    task.outputs[0].bind({"trainer_1": torch.tensor(True)})
    assert condition.ask(Ctx(workspace=Workspace("trainer_1"))).stop
    assert condition.ask(Ctx(workspace=Workspace("trainer_0"))) == NO


def test_objects_with_data_finished():
    """An object is asked for `data_finished()`, whether that is a condition or the answer itself."""

    class Stream:
        finished = False

        def data_finished(self):
            return self.finished

    stream = Stream()
    condition = condition_of(stream)
    assert condition.ask(Ctx()) == NO
    stream.finished = True
    assert condition.ask(Ctx()).stop


@pytest.mark.parametrize("wrong", [3, None, 1.5, object(), dict, ["done"], b"done"])
def test_other_types_are_refused_with_the_forms(wrong):
    """What cannot be a condition is refused by a message that lists what can."""
    with pytest.raises(UsageError, match=r"is not a stop condition.*function.*tensor.*output.*blob"):
        condition_of(wrong)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (torch.zeros(2), r"one element.*done\.all"),
        ("a[0]", "name of a blob"),
        (lambda a, b: True, "takes a, b"),
        (type("Odd", (), {"ask": lambda self, ctx: YES})(), "name, rule, limit"),
        (type("Odd", (), {"ask": len, "name": "x", "rule": "most", "limit": False})(), "'most'"),
    ],
)
def test_almost_right_conditions_are_refused(wrong, words):
    """A condition with one mistake is told which."""
    with pytest.raises(UsageError, match=words):
        condition_of(wrong)


@pytest.mark.parametrize(
    ("value", "words"), [(None, "None"), ("yes", "neither"), ([None], "neither"), (torch.zeros(2), "neither")]
)
def test_answers_are_true_or_false(value, words):
    """A function that forgets to answer, or answers something else, does not run for ever unseen."""
    with pytest.raises(UsageError, match=words):
        condition_of(lambda: value).ask(Ctx())


def test_names_are_unique_in_a_job():
    """Verdicts are saved by name, so conditions of one name get numbers; the same object twice is refused."""
    job = Job()
    job.stop_when(max_steps(5), max_steps(9), lambda: False, lambda: True)
    assert [c.name for c in job.stop_conditions] == ["max_steps", "max_steps_2", "condition", "condition_2"]
    assert [getattr(c, "steps", None) for c in job.stop_conditions] == [5, 9, None, None]
    assert job.stop_conditions[3].ask(Ctx()).stop
    with pytest.raises(UsageError, match="already"):
        job.stop_when(job.stop_conditions[0])


# Many nodes


def nodes_of(*answers: StopAnswer) -> MappingProxyType:
    return MappingProxyType({f"trainer_{rank}": answer for rank, answer in enumerate(answers)})


@pytest.mark.parametrize(
    ("rule", "answers", "stop"),
    [
        ("any", [NO, YES, NO], True),
        ("any", [NO, NO], False),
        ("all", [YES, NO], False),
        ("all", [YES, YES], True),
        ("rank0", [NO, YES], False),
        ("rank0", [YES, NO], True),
        ("any", [], False),
        ("all", [], False),
        ("rank0", [], False),
    ],
)
def test_combine_follows_the_rule(rule, answers, stop):
    """ORs over nodes unless the rule says otherwise; no nodes, no stop."""
    assert combine(nodes_of(*answers), rule).stop is stop


def test_combined_reason_names_the_nodes():
    """The reason is kept with the nodes that gave it, a few of many; without them where all did."""
    assert combine(nodes_of(NO, YES), "any").reason == "it is done (trainer_1)"
    assert (
        combine(nodes_of(*[YES] * 5, NO), "any").reason
        == "it is done (trainer_0, trainer_1, trainer_2 and 2 more)"
    )
    assert combine(nodes_of(YES, YES), "all").reason == "it is done"


def test_combine_refuses_unknown_rules():
    """A rule that is not known is refused by name."""
    with pytest.raises(UsageError, match="'most'"):
        combine(nodes_of(YES), "most")
