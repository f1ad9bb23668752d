"""Run the profiles of a configuration in the order of `mode`, isolated from each other, step by step."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from torchrelay.checkpoint.load.checkpoint import open_checkpoint
from torchrelay.errors import (
    PreemptedError,
    RelayError,
    TaskFailedError,
    UnknownEpochError,
    UsageError,
    exit_code_of,
)
from torchrelay.jobs.config.config import Config
from torchrelay.jobs.config.schema import LOCAL_TRAIN, RunnerSection, Settings
from torchrelay.jobs.config.tree import hint
from torchrelay.jobs.session import Solo
from torchrelay.metadata.experiments import RunStore
from torchrelay.metadata.run_directory import RunDirectory
from torchrelay.records import dataclass
from torchrelay.runners.config_runs import steps
from torchrelay.runners.config_runs.class_loading import Classes, Loader, Unread, load_classes
from torchrelay.runners.config_runs.context import (
    END,
    LAST_OF_START_UP,
    STEPS,
    StepContext,
    StepName,
    after,
    step_named,
)
from torchrelay.runners.config_runs.processes import (
    LocalRanksError,
    apart,
    command_of,
    release,
    run_local_ranks,
)
from torchrelay.runners.config_runs.selection import (
    built_on,
    check_launch,
    epochs_place,
    is_of_training,
    recorded,
    replayed,
    run_directory_of,
    source_of,
    weights_place,
)
from torchrelay.runners.config_runs.training import runner_options
from torchrelay.runners.config_runs.user_objects import made
from torchrelay.runners.distributed.launcher import current_world, read_launch_env
from torchrelay.runners.remote_runs.local_copies import mirror_of
from torchrelay.runners.remote_runs.names import for_a_glance, is_remote
from torchrelay.runners.training.exit import code_of_result
from torchrelay.runners.training.plan import RunResult

_OWN = f"{Path(__file__).parents[2]}/"


class StepFailedError(RelayError):
    """A step of a profile failed; `__cause__` is the reason. The message lists skipped profiles."""

    def __init__(self, runner: str, step: StepName, error: BaseException, not_run: Sequence[str]) -> None:
        left = f"; not run: {', '.join(not_run)}" if not_run else ""
        if isinstance(error, TaskFailedError):
            reason = f"{error}\n{error.details}".rstrip()
        elif isinstance(error, RelayError):
            reason = str(error)
        else:  # the traceback from the user's first frame on; all of it if there is none
            frame = error.__traceback__
            while frame is not None and frame.tb_frame.f_code.co_filename.startswith(_OWN):
                frame = frame.tb_next
            trace = traceback.format_exception(type(error), error, frame or error.__traceback__)
            reason = f"\n{''.join(trace).rstrip()}"
        super().__init__(f"runner {runner} failed in step {step.name} ({step.class_name}){left}: {reason}")
        self.exit_code = exit_code_of(error)
        self.runner, self.step, self.not_run = runner, step.name, tuple(not_run)
        self.consequence = getattr(error, "consequence", False)


def run_steps(
    context: StepContext,
    not_run: Sequence[str] = (),
    started: Callable[[StepContext], None] = lambda _: None,
) -> tuple[str, ...]:
    """Run the steps and return their names; `started` is called after `start`. Raises StepFailedError."""
    status, ran = STEPS[0].name, list[str]()
    while status != END:
        step = step_named(status)
        context.pop("status", None)
        try:
            call_step(step, context)
            if step.name == LAST_OF_START_UP:
                started(context)
        except Exception as error:
            raise StepFailedError(context.runner_name, step, error, not_run) from error
        ran.append(step.name)
        status = context.get("status") or after(step.name)
    return tuple(ran)


def call_step(step: StepName, context: StepContext) -> None:
    """Create the class of a step, the user's or the default, and call its method."""
    kind = context.classes.steps.get(step.name) or getattr(steps, step.class_name)
    one = made(kind, context)
    own = getattr(one, step.older, None)
    (own if callable(own) else getattr(one, step.name))(context)


NO_WARM_START: dict[str, Any] = {"init_model_path": None, "init_prefix": None, "init_rename": None}


def built(
    config: Config, settings: Settings, runner: RunnerSection, run_dir: str, stack: ExitStack
) -> StepContext:
    """Return the context after the steps `setup` and `build`."""
    loader = Loader()
    stack.callback(loader.forget)
    classes = load_classes(settings, runner, loader)
    context = StepContext.of(config, runner, run_dir, classes, settings=settings)
    call_step(step_named("setup"), context)
    stack.callback(lambda: release(context.session, world_stays=True))
    call_step(step_named("build"), context)
    return context


@dataclass(frozen=True)
class ProfileResult:
    """Result of a profile: a RunResult, or for `infer` one row (dict) per epoch.

    None if its steps set no result, and for `local_cluster_train`, which ran in other processes.
    """

    name: str
    result: Any = None
    steps: tuple[str, ...] = ()


@dataclass(frozen=True)
class ConfigResult:
    """The profiles that ran, in order. `exit_code` is 75 if one was preempted and can be resumed."""

    profiles: tuple[ProfileResult, ...]
    exit_code: int = 0

    def __getitem__(self, name: str) -> Any:
        """Return the result of a profile by its name."""
        return {one.name: one.result for one in self.profiles}[name]


def run_config(
    config: Config,
    mode: Sequence[str] | None = None,
    *,
    run_dir: str | Callable[[], str] | None = None,
    job_options: Mapping[str, Any] | None = None,
    strict: bool = False,
) -> ConfigResult:
    """Run the profiles of `mode` (None: those of the configuration) one after another.

    All user classes are imported before the first profile starts. Config keys that no profile reads during
    start-up are reported. A preempted profile ends the list; the same call resumes it. In a launched job the
    processes stay connected until they exit (`run_and_leave`).

    Args:
        config: The configuration.
        mode: Names of the profiles to run.
        run_dir: Replaces the run directory of training profiles, and the default source of `infer` profiles.
            A function is called after all classes are loaded.
        job_options: Further options of JobRunner (`resume`, `resume_from_epoch`, ...).
        strict: Raise an error for config keys that are not read.

    Returns:
        The results of the profiles.

    Raises:
        UsageError: The configuration cannot run; nothing was started.
        ClassLoadError: A user class cannot be loaded; nothing was started.
        StepFailedError: A profile failed; the profiles after it do not run.

    Example:
        result = run_config(load_config("config.yaml"), ["train1"], run_dir="runs/x")
    """
    chosen = _chosen(config, mode)
    env = read_launch_env()
    for runner in chosen:
        check_launch(runner, launched=env.launched, world_size=env.world_size)
        if run_dir is None and not runner.infers:
            _check_place(config, runner)
    if run_dir is None:
        _check_weights(config, chosen)
    elif len(several := [one.name for one in chosen if not one.infers]) > 1:
        raise UsageError(
            f"--run-dir is one directory, but {' and '.join(several)} train: choose one of them with "
            f"-o mode=[{several[0]}]"
        )
    with ExitStack() as stack:
        loaded = [_loaded(config, runner, stack) for runner in chosen]
        unread = Unread(config, strict)
        if len(chosen) > 1:
            unread.check_before_training(list(zip(chosen, loaded, strict=True)))
        where = run_dir() if callable(run_dir) else run_dir
        done = list[ProfileResult]()
        for at, (runner, classes) in enumerate(zip(chosen, loaded, strict=True)):
            later = [one.name for one in chosen[at + 1 :]]
            done.append(_run_profile(config, runner, classes, where, job_options or {}, unread, later))
            result = done[-1].result
            if isinstance(result, RunResult) and (code := code_of_result(result)):
                return ConfigResult(tuple(done), code)
    return ConfigResult(tuple(done))


def check_keys(config: Config) -> None:
    """Load all classes of the mode; raise ConfigError for keys that their readers and models do not read.

    `strict` of `run_config` does the same before the first of several profiles trains.
    """
    chosen = _chosen(config, None)
    with ExitStack() as stack:
        loaded = [_loaded(config, runner, stack) for runner in chosen]
        Unread(config, strict=True).check_before_training(list(zip(chosen, loaded, strict=True)))


def _chosen(config: Config, mode: Sequence[str] | None) -> Sequence[RunnerSection]:
    known = {one.name: one for one in config.settings.runner}
    for name in mode or ():
        if name not in known:
            raise UsageError(f"{config.name}: unknown runner `{name}`; {hint(name, known)}")
    chosen = config.settings.runners_of_mode() if mode is None else [known[name] for name in mode]
    if not chosen:
        raise UsageError(f"{config.name} has no runner, so there is nothing to run")
    return chosen


def _check_place(config: Config, runner: RunnerSection) -> None:
    """Raise UsageError if the directory holds several runs of the train subcommand."""
    place = run_directory_of(config.settings, runner)
    own = is_remote(place) or (Path(place) / "run.json").exists()
    if not own and ((there := RunStore(Path(place)).look()).runs or there.unread):
        raise UsageError(
            f"{place} holds runs of `torchrelay train -m {config.name}`: continue with that command, or pass "
            "another --run-dir to `torchrelay run`"
        )


def _check_weights(config: Config, chosen: Sequence[RunnerSection]) -> None:
    """Raise an error for missing weights before training for hours; own steps may write anywhere."""
    written: list[str] = []
    for runner in chosen:
        where, epoch = weights_place(runner)
        own = run_directory_of(config.settings, runner)
        begun = not runner.infers and not is_remote(own) and (Path(own) / "run.json").exists()
        if runner.infers and runner is chosen[0]:
            continue  # its start-up reports missing epochs itself
        named = (f"{where}/", f"{runner.init_model_path}/")  # `exp@2` may itself be a path that is written
        later = any(name.startswith(f"{one}/") for one in written for name in named)
        if where is not None and not is_remote(where) and not begun and not later:
            key = f"runner.{runner.name}.init_model_path"
            if not Path(where).exists():
                raise UsageError(
                    f"{key}: {where} does not exist, and no earlier runner of `mode` writes it: correct the "
                    "path or the order"
                )
            if epoch is not None:
                try:
                    open_checkpoint(where, epoch)
                except UnknownEpochError as error:
                    raise UnknownEpochError(f"{key}: {error}") from None
        if any(getattr(runner, step.key) is not None for step in STEPS):
            return
        if not runner.infers:
            other = (runner.save_step_path, runner.save_inference_path)
            written += [own, *(one for one in other if one is not None)]


def _loaded(config: Config, runner: RunnerSection, stack: ExitStack) -> Classes:
    """Load the classes of a profile, unloaded again by `stack`."""
    loader = Loader()
    stack.callback(loader.forget)
    with apart():
        return load_classes(config.settings, runner, loader)


def _run_profile(
    config: Config,
    runner: RunnerSection,
    classes: Classes,
    run_dir: str | None,
    job_options: Mapping[str, Any],
    unread: Unread,
    later: Sequence[str],
) -> ProfileResult:
    settings, launched = config.settings, read_launch_env().launched
    if runner.kind == LOCAL_TRAIN and not launched and runner.worker_num > 1:
        command = command_of(config.name, config.overrides, runner.name, runner.worker_num, run_dir)
        try:
            run_local_ranks([*command, "--strict-config"] if unread.strict else command)
        except Exception as error:
            if isinstance(error, LocalRanksError):
                # Only the run knows the exit code: torchrun exits with code 1 for any failure.
                place = run_dir or run_directory_of(settings, runner)
                run = mirror_of(place).run(wanted=for_a_glance) if is_remote(place) else RunDirectory(place)
                if run.status().get("state") == "PREEMPTED":
                    error.exit_code = PreemptedError.exit_code
            raise StepFailedError(runner.name, step_named("loop"), error, later) from error
        return ProfileResult(runner.name)
    default = epochs_place if runner.infers else run_directory_of
    own = run_dir if not runner.infers or is_of_training(settings, runner) else None
    where, options = own or default(settings, runner), dict[str, Any]()
    if not runner.infers:
        options = {"configuration": recorded(config), "code": source_of(config), **built_on(config)}
        options |= {**runner_options(runner, where), **replayed(settings, runner), **job_options}
    context = StepContext.of(config, runner, where, classes, job_options=options)

    def report_unread(context: StepContext) -> None:
        session = context.get("session")
        unread.report(runner, Solo() if session is None else session.peers)

    world_stays = launched or current_world() is not None
    with apart():
        try:
            ran = run_steps(context, later, report_unread)
            return ProfileResult(runner.name, context.get("result"), ran)
        finally:
            if (session := context.get("session")) is not None:
                release(session, world_stays=world_stays)
