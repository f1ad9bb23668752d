"""Evaluation of stop conditions: on every node, once per epoch, with an agreed result."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, field, replace
from difflib import get_close_matches
from functools import partial
from types import SimpleNamespace
from typing import Any

from torchrelay.checkpoint.format.names import nearest
from torchrelay.checkpoint.format.position import Facts
from torchrelay.errors import MissingMetricError
from torchrelay.jobs.job import Job
from torchrelay.jobs.session import decide, together
from torchrelay.jobs.stop import StopAnswer, StopCondition, combine, made_with, verdict_holds
from torchrelay.records import dataclass
from torchrelay.runners.session.base import SessionBase
from torchrelay.runners.session.run_state import RunState
from torchrelay.runners.session.steps import naming

WAITS_EPOCHS = 3
"""Epochs that a stop condition may wait for its metric without a warning."""
DEFAULT_BEST = ("val/acc", "max")
"""Metric and direction by which the best epoch is chosen unless the program names another one."""
_SIMILAR = 0.85  # similarity of names from which one is taken for a misspelling of the other


@dataclass(frozen=True)
class StopVerdict:
    """The decision to end the loop, with the answer of each condition."""

    stop: bool = False
    by_condition: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    waiting: Mapping[str, str] = field(default_factory=dict)
    """Conditions that wait for a metric that was never logged, with its name."""
    asked: str | None = None
    """External stop request; not stored in checkpoints."""

    @property
    def reasons(self) -> tuple[str, ...]:
        """The reasons to stop, one sentence per condition."""
        said = tuple(answer["reason"] for answer in self.by_condition.values() if answer["stop"])
        return said if self.asked is None else (*said, self.asked)


def verdict_of(job: Job, answers: Mapping[str, StopAnswer]) -> StopVerdict:
    """Combine answers: any may stop the loop; settings of the conditions are stored with them."""
    by_condition: dict[str, dict[str, Any]] = {}
    for condition in job.stop_conditions:
        answer, settings = answers[condition.name], made_with(condition)
        with_settings = {} if settings is None or condition.limit else {"settings": settings}
        by_condition[condition.name] = {"stop": answer.stop, "reason": answer.reason, **with_settings}
    return StopVerdict(any(answer.stop for answer in answers.values()), by_condition)


def ask_all(job: Job, session: SessionBase) -> StopVerdict:
    """Evaluate every condition on every node, also after one stops, as a condition may count."""

    def ask() -> dict[str, dict[str, list[Any]]]:
        return {
            condition.name: {
                place.name: list(_ask(condition, session, place.name)) for place in session.local_nodes
            }
            for condition in job.stop_conditions
        }

    answers = together(session.peers, "stop conditions", ask)
    combined, waiting = {}, {}
    for condition in job.stop_conditions:
        by_node = {node: answer for part in answers for node, answer in part[condition.name].items()}
        given = {node: StopAnswer(stop, reason) for node, (stop, reason, _) in by_node.items()}
        combined[condition.name] = combine(given, condition.rule)
        for metric in [metric for _, _, metric in by_node.values() if metric is not None]:
            waiting[condition.name] = metric
    return replace(verdict_of(job, combined), waiting=waiting)


def _ask(condition: StopCondition, session: SessionBase, node: str) -> tuple[bool, str, str | None]:
    """Return one node's answer, and the metric that it waits for, if any."""
    with session.on_node(node):
        ctx = session.context(node)
        try:
            with naming(f"the stop condition {condition.name!r}", ctx.place):
                answer = condition.ask(ctx)
        except MissingMetricError as error:
            return False, "", error.name
    return answer.stop, answer.reason, None


def over_there(
    session: SessionBase, job: Job, facts: Facts, epoch: int, *, inside: bool = False, rewound: bool = False
) -> StopVerdict:
    """Call `over_by_facts` on rank 0 for all, because settings may differ between ranks."""
    look = partial(over_by_facts, job, facts, epoch, inside=inside, rewound=rewound)
    return StopVerdict(**decide(session.peers, "verdicts", lambda: asdict(look())))


def over_by_facts(
    job: Job, facts: Facts, epoch: int, *, inside: bool = False, rewound: bool = False
) -> StopVerdict:
    """Decide if the epochs were finished at a saved position, by current limits and stored verdicts.

    Limits come from the current program, so raising `max_epochs` continues a finished run. Other conditions
    keep the stored verdict, unless their settings changed, or they judge metrics and the user has `rewound`
    to this position. `inside` an epoch limits on steps and time are left to the next step.
    """
    steps, secs, metrics = facts.total_steps, facts.elapsed_secs, facts.last_metrics
    # values of the loaded position that built-in limits use
    remembered = SimpleNamespace(epoch=epoch, total_steps=steps, elapsed_secs=secs, metrics=metrics)
    answers = {}
    for condition in job.stop_conditions:
        if (
            condition.limit
            and inside
            and any(getattr(condition, name, None) is not None for name in ("steps", "secs"))
        ):
            answers[condition.name] = StopAnswer(False)
        elif condition.limit:
            answers[condition.name] = condition.ask(remembered)
        else:
            verdict = facts.stop.get(condition.name, {"stop": False, "reason": ""})
            judges = getattr(condition, "settings", None) is not None  # otherwise it depends on the data
            holds = verdict_holds(condition, verdict.get("settings"))
            held = verdict["stop"] and holds and not (rewound and judges)
            answers[condition.name] = StopAnswer(True, str(verdict["reason"])) if held else StopAnswer(False)
    return verdict_of(job, answers)


def ended_before(job: Job, facts: Facts) -> list[str]:
    """List stored verdicts that ended the run but no longer apply, with the reason."""
    conditions = {condition.name: condition for condition in job.stop_conditions}
    said = []
    for name, verdict in facts.stop.items():
        condition = conditions.get(name)
        if verdict["stop"] and condition is None:
            said.append(f"continuing although {verdict['reason']}: the program no longer has {name}")
        elif verdict["stop"] and condition is not None and not condition.limit:
            changed = not verdict_holds(condition, verdict.get("settings"))
            why = "has other settings now" if changed else "is evaluated again because of the rewind"
            said.append(f"continuing although {verdict['reason']}: {name} {why}")
    return said


def early_reasons(job: Job, by_condition: Mapping[str, Mapping[str, Any]]) -> str:
    """Join the reasons of the conditions that end the run before its limits; empty if none does."""
    limits = {condition.name for condition in job.stop_conditions if condition.limit}
    others = [one for name, one in by_condition.items() if name not in limits]
    return ", ".join(one["reason"] for one in others if one["stop"])


def only_time_is_up(job: Job, verdict: StopVerdict) -> bool:
    """Return True if only `max_time` ends the run: it is stopped but not finished."""
    timed = {one.name for one in job.stop_conditions if getattr(one, "secs", None) is not None}
    stopping = {name for name, answer in verdict.by_condition.items() if answer["stop"]}
    return bool(stopping) and stopping <= timed


def limits_of(conditions: Sequence[StopCondition]) -> dict[str, Any]:
    """Return the totals that also end a running epoch, from limits only (see StopCondition)."""
    return {"limit_steps": _least(conditions, "steps"), "limit_secs": _least(conditions, "secs")}


def last_epoch_of(conditions: Sequence[StopCondition]) -> int | None:
    """Return the epoch at which a limit ends the run; None without one."""
    least: int | None = _least(conditions, "epochs")
    return least


def _least(conditions: Sequence[StopCondition], what: str) -> Any:
    found = [getattr(condition, what, None) for condition in conditions if condition.limit]
    return min((n for n in found if n is not None), default=None)


def warn_of_waiting(
    state: RunState, verdict: StopVerdict, best: tuple[str, str] | None, warn: Callable[[str], None]
) -> None:
    """Warn once of a metric that was never logged, because it may be misspelt.

    Where no similar name was logged it has `WAITS_EPOCHS` epochs. The default of `best` is only a suggestion.
    """
    waiting = {f"the stop condition {name} waits for": metric for name, metric in verdict.waiting.items()}
    if best is not None and best != DEFAULT_BEST and best[0] not in state.metrics:
        waiting["best= names"] = best[0]
    for what, metric in waiting.items():
        similar = get_close_matches(metric, state.metrics, n=1, cutoff=_SIMILAR)
        if (similar or verdict.stop or state.epoch >= WAITS_EPOCHS) and state.first_time(what):
            warn(f"{what} the metric {metric!r}, which no epoch has logged{nearest(metric, state.metrics)}")
