"""Steps: how a function of the user is called."""

import functools

import pytest
import torch

from torchrelay.errors import UsageError
from torchrelay.jobs.blobs import call_style, invoke, step_name


class Trainer:
    def epoch(self, ctx):
        return "method", ctx

    def __call__(self):
        return "object"


def with_default(ws, count=3):
    return ws, count


def keyword_only(*, workspace):
    return workspace


def positional_only(context, /):
    return context


def two(a, b):
    return a, b


async def asynchronous(ctx):
    pass


def generator(ctx):
    yield ctx


@pytest.mark.parametrize(
    ("step", "style", "result"),
    [
        (lambda: "none", "nothing", "none"),
        (lambda i=7: i, "nothing", 7),
        (lambda *args, **kwargs: (args, kwargs), "nothing", ((), {})),
        (lambda ws: ws, "workspace", "WS"),
        (lambda workspace: workspace, "workspace", "WS"),
        (with_default, "workspace", ("WS", 3)),
        (keyword_only, "workspace", "WS"),
        (lambda ctx: ctx, "context", "CTX"),
        (lambda anything: anything, "context", "CTX"),
        (positional_only, "context", "CTX"),
        (Trainer().epoch, "context", ("method", "CTX")),
        (Trainer(), "nothing", "object"),
        (functools.partial(two, 1), "context", (1, "CTX")),
        (functools.partial(with_default, ws="mine"), "nothing", ("mine", 3)),
    ],
)
def test_a_step_gets_what_its_signature_asks_for(step, style, result):
    """Nothing, a workspace by name, or a context; a parameter with a default keeps it."""
    assert call_style(step) == style
    assert invoke(step, "WS", "CTX") == result


@pytest.mark.parametrize(
    ("step", "remedy"),
    [
        (two, "functools.partial"),
        (asynchronous, "use a plain def"),
        (generator, "use a plain def"),
        (Trainer, "expected a function"),
        ("train", "expected a function"),
        (None, "expected a function"),
        (torch.zeros, "wrap it"),
    ],
)
def test_what_cannot_be_a_step_is_refused_with_a_remedy(step, remedy):
    """Too many parameters, lazy functions, classes and things without a signature are refused."""
    with pytest.raises(UsageError, match=remedy):
        call_style(step)


def test_the_name_of_a_step_is_its_function_s():
    """Partials are named after their function, lambdas have no name."""
    assert step_name(two) == step_name(functools.partial(two, 1)) == "two"
    assert step_name(Trainer().epoch) == "epoch"
    assert step_name(lambda: 0) is None
    assert step_name(Trainer()) is None
