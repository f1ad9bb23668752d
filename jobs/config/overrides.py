"""Values from the command line, and what sections say of each other."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import field
from typing import Any

from torchrelay.jobs.config.runner_schema import LOCAL_TRAIN, Runner, is_infer
from torchrelay.jobs.config.schema_docs import form_at
from torchrelay.jobs.config.section_types import local_path, split_epoch
from torchrelay.jobs.config.tree import (
    COMMAND_LINE,
    ConfigProblem,
    Missing,
    Origin,
    Source,
    Tree,
    find,
    hint,
    item_name,
    nearest,
    value_at,
)
from torchrelay.jobs.config.types import Form, Named, Reading, Section, section_spec
from torchrelay.jobs.config.yaml_reader import Findings, Place, Where, read_findings
from torchrelay.records import dataclass

_WORKSPACE = "{workspace}"


@dataclass(frozen=True)
class Overrides:
    """Overrides as they were typed, in order; of two for one key the later one holds."""

    texts: tuple[str, ...] = ()

    @property
    def source(self) -> Source:
        """The text in which their places are."""
        return Source(COMMAND_LINE, self.texts)


def overridden(tree: Tree, overrides: Overrides) -> tuple[Tree, list[ConfigProblem]]:
    """A tree in which the overrides stand, and what is wrong with those that do not."""
    work = _Work(copy.deepcopy(tree.value), dict(tree.origins), dict(tree.keys), set(tree.broken), overrides)
    for index, text in enumerate(overrides.texts):
        work.take(index, text)
    return Tree(work.value, work.origins, work.keys, frozenset(work.broken)), work.problems


@dataclass
class _Work:
    """A tree that is being changed."""

    value: dict[str, Any]
    origins: dict[Where, Origin]
    keys: dict[Where, Origin]
    broken: set[Where]
    overrides: Overrides
    problems: list[ConfigProblem] = field(default_factory=list)

    def take(self, index: int, text: str) -> None:
        """Put one override in its place, or complain."""
        given, equals, written = text.partition("=")
        key = given.strip().removeprefix("+")
        if not equals or not key:
            self._wrong(index, 1, key, "an override is key.path=value, such as runner.train1.epochs=3")
            return
        found = _read(written)
        begins = len(given) + 1
        for problem in found.problems:
            remedy = (
                "" if "quote" in problem.message else "; put a text in quotes, for the shell and for YAML"
            )
            self._wrong(index, begins + problem.place.column, key, problem.message + remedy)
        where = self._where(index, key, len(given.rstrip()), adds=given.strip().startswith("+"))
        if where is not None and not found.problems:
            self._put(where, found, index, begins)

    def _where(self, index: int, key: str, ends: int, *, adds: bool) -> Where | None:
        """The place that a key means, whether something stands there or may; None after a complaint."""
        place = find(self.value, key)
        if not isinstance(place, Missing):
            return place
        message, near = self._refusal(place, key, adds=adds)
        if message is None:
            return (*place.where, *place.rest)
        self._wrong(index, ends - len(".".join(place.rest)) + 1, key, message, near)
        return None

    def _refusal(self, missing: Missing, key: str, *, adds: bool) -> tuple[str | None, str | None]:
        """Why a key that is not there yet may not be put there; None if it may."""
        if missing.leaf and value_at(self.value, missing.where) is not None:
            return f"`{'.'.join(map(str, missing.where))}` is a single value, there is nothing below it", None
        form = form_at(missing.where)
        for at, word in enumerate(missing.rest):
            known = {
                *(missing.known if at == 0 else ()),
                *(form.spec.keys if isinstance(form, Section) else ()),
            }
            if isinstance(form, Section) and word in form.spec.refused:
                return f"`{word}` is not supported: {form.spec.refused[word]}", None
            if isinstance(form, Section) and word in form.spec.keys:
                form = form.below(word)
                continue
            if _is_open(form, value_at(self.value, missing.where)):
                return (None, None) if adds else (_not_there(word, known, key), nearest(word, known))
            return f"unknown name `{word}`; {hint(word, known) or 'nothing lies below'}", nearest(word, known)
        return None, None

    def _put(self, where: Where, found: Findings, index: int, begins: int) -> None:
        here: Any = self.value
        origin = Origin(self.overrides.source, Place(index + 1, 1))
        for at, one in enumerate(where[:-1]):
            if isinstance(here, dict) and here.get(one) is None:
                here[one] = {}
                self._forget(where[: at + 1])
                self.origins[where[: at + 1]] = self.keys[where[: at + 1]] = origin
            here = here[one]
        self._forget(where)
        here[where[-1]] = found.top
        self.keys[where] = self.origins[where] = origin
        for inner, place in found.values.items():
            self.origins[(*where, *inner)] = self._at(index, begins + place.column)
        for inner, place in found.keys.items():
            self.keys[(*where, *inner)] = self._at(index, begins + place.column)

    def _forget(self, where: Where) -> None:
        """What stood at a place and below it."""
        for places in (self.origins, self.keys):
            for one in [one for one in places if one[: len(where)] == where]:
                del places[one]
        self.broken = {one for one in self.broken if one[: len(where)] != where}

    def _at(self, index: int, column: int) -> Origin:
        return Origin(self.overrides.source, Place(index + 1, column))

    def _wrong(self, index: int, column: int, key: str, message: str, near: str | None = None) -> None:
        self.problems.append(ConfigProblem(self._at(index, column), key, message, near))


def _is_open(form: Form | None, value: Any) -> bool:
    """Whether the user chooses the keys here."""
    if isinstance(form, Section):
        return form.spec.free is not None
    return isinstance(form, Named) or (form is None and isinstance(value, dict))


def _not_there(word: str, known: set[str], key: str) -> str:
    near = hint(word, known)
    return f"`{word}` is not in the configuration; {near}{' ' if near else ''}(+{key}=... adds it)"


def _read(written: str) -> Findings:
    """The value; what begins with `{workspace}` is a text, as nobody means that mapping."""
    if written.startswith(_WORKSPACE):
        return Findings(written, {(): Place(1, 1)}, {}, (), frozenset())
    found = read_findings(written.encode("utf-8", "surrogatepass"))
    return found if found.values else Findings(None, {(): Place(1, 1)}, {}, found.problems, found.broken)


_LISTS = ("runner", "phase", "dataset")


def check_references(reading: Reading) -> None:
    """Complain of all of it; values of wrong types were complained of before and are passed by."""
    names = {section: _unique(reading, section) for section in _LISTS}
    _known(reading, ("mode",), names["runner"], "runner")
    for where, runner in _items(reading, "runner"):
        _known(reading, (*where, "phases"), names["phase"], "phase")
        _consistent(reading, where, runner)
    _rates(reading)
    _profiles_in_order(reading)
    for where, phase in _items(reading, "phase"):
        _known(reading, (*where, "dataset_name"), names["dataset"], "dataset")
        validation = phase.get("validation")
        inner = () if isinstance(validation, str) else ("dataset_name",)
        if isinstance(validation, (str, dict)):
            _known(reading, (*where, "validation", *inner), names["dataset"], "dataset")
        if phase.get("dataset_name") is None and len(names["dataset"]) > 1:
            reading.wrong(where, f"`dataset_name` missing; {hint('', names['dataset'])}")


def _rates(reading: Reading) -> None:
    """The two keys of a decay belong together, and one schedule is enough."""
    where: Where = ("hyper_parameters", "optimizer")
    optimizer = _value(reading, where)
    if not isinstance(optimizer, dict):
        return
    given = [name for name in ("decay_steps", "decay_rate") if optimizer.get(name) is not None]
    if len(given) == 1:
        other = "decay_rate" if given[0] == "decay_steps" else "decay_steps"
        if (*where, other) not in reading.tree.broken:
            reading.wrong((*where, given[0]), f"`{other}` missing", key=True)
    if given and optimizer.get("lr_scheduler") is not None:
        reading.wrong((*where, given[0]), "`lr_scheduler` says how the rate changes: keep one", key=True)


def _items(reading: Reading, section: str) -> Iterator[tuple[Where, Mapping[str, Any]]]:
    listed = reading.tree.value.get(section)
    for at, item in enumerate(listed if isinstance(listed, list) else []):
        if isinstance(item, dict) and (section, at) not in reading.tree.broken:
            yield (section, at), item


def _unique(reading: Reading, section: str) -> list[str]:
    """The names of a list's items; complains of those that stand there twice."""
    first: dict[str, Where] = {}
    for where, item in _items(reading, section):
        name = item_name(item)
        if name is not None and name in first:
            line = reading.tree.origin((*first[name], "name")).place.line
            reading.wrong((*where, "name"), f"another {section} is called `{name}`, in line {line}")
        elif name is not None:
            first[name] = where
    return list(first)


def _known(reading: Reading, where: Where, names: list[str], what: str) -> None:
    """Complain of each name at `where`, one or a list, that is none of `names`."""
    value = _value(reading, where)
    listed = enumerate(value) if isinstance(value, list) else [(None, value)]
    for at, name in listed:
        place = where if at is None else (*where, at)
        if isinstance(name, str) and name and name not in names and place not in reading.tree.broken:
            near = hint(name, names) or f"no {what} is declared"
            reading.wrong(place, f"there is no {what} `{name}`; {near}", nearest(name, names))


def _value(reading: Reading, where: Where) -> Any:
    if any(where[:depth] in reading.tree.broken for depth in range(len(where) + 1)):
        return None
    here: Any = reading.tree.value
    for one in where:
        here = here.get(one) if isinstance(here, dict) else here[one] if isinstance(one, int) else None
    return here


def _consistent(reading: Reading, where: Where, runner: Mapping[str, Any]) -> None:
    """What the keys of one runner say together."""
    stop = runner.get("stop")
    if is_infer(runner):
        _infer_range(reading, where, runner)
        return
    for name, spec in section_spec(Runner).keys.items():
        if spec.infer_only and runner.get(name) is not None:
            remedy = "; did you mean `epochs`?" if name == "epoch" else ""
            near = "epochs" if remedy else None
            reading.wrong((*where, name), f"only a runner of class `infer` has it{remedy}", near, key=True)
    ends = isinstance(stop, dict) and any(one is not None for one in stop.values())
    ends = ends or runner.get("epochs_per_partition") is not None
    if runner.get("epochs") is None and not ends and (*where, "epochs") not in reading.tree.broken:
        reading.wrong(where, "`epochs` missing, and there is no `stop`: training would never end")
    if runner.get("epochs") is not None and isinstance(stop, dict) and stop.get("max_epochs") is not None:
        reading.wrong(
            (*where, "stop", "max_epochs"), "`epochs` of the runner says it already: keep one", key=True
        )
    _onnx_files(reading, where, runner)
    if type(count := runner.get("worker_num")) is int and count > 1 and runner.get("class") != LOCAL_TRAIN:
        message = f"only class `{LOCAL_TRAIN}` starts processes; others run in those that torchrun started"
        reading.wrong((*where, "worker_num"), message, key=True)


def _profiles_in_order(reading: Reading) -> None:
    """What the runners of the mode say together: a run each for those that train, epochs for the others."""
    mode = _value(reading, ("mode",))
    names = [mode] if isinstance(mode, str) else mode
    known = list(_items(reading, "runner"))
    chosen = [pair for pair in known if not isinstance(names, list) or item_name(pair[1]) in names]
    training = [one for _, one in chosen if not is_infer(one)] or [
        one for _, one in known if not is_infer(one)
    ]
    places: dict[str, str | None] = {}
    for where, runner in chosen:
        path, weights = runner.get("save_checkpoint_path"), runner.get("init_model_path")
        if is_infer(runner):
            if not weights and len(training) > 1 and (*where, "init_model_path") not in reading.tree.broken:
                message = f"`init_model_path` missing, and {len(training)} runners train"
                reading.wrong(where, f"{message}: say where epochs are")
            _stored_models(reading, where, runner, training)
        elif isinstance(path, str) and path:
            place = path if "://" in path else str(local_path(path, reading.workspace))
            if place in places:
                message = f"the run of runner `{places[place]}` lies there: give each a path of its own"
                reading.wrong((*where, "save_checkpoint_path"), message)
            places.setdefault(place, item_name(runner))


def _stored_models(
    reading: Reading, where: Where, runner: Mapping[str, Any], training: Sequence[Mapping[str, Any]]
) -> None:
    """Complain where a profile infers with a model that the profile whose epochs it takes does not train.

    A model of another class is taken where only one is trained: it may have the same weights.
    """
    weights, phases = runner.get("init_model_path"), dict(_named(reading, "phase"))
    source = [
        one for one in training if not weights or _same_path(reading, one, _weights(reading, runner)[0])
    ]
    if len(source) != 1 or runner.get("init_prefix") or runner.get("network_class_path"):
        return
    trained = [name for name in _phases(source[0], phases) if name in phases]
    for name in _phases(runner, phases):
        model = phases.get(name, {}).get("model")
        alike = [one for one in trained if phases[one].get("model") == model]
        if name in phases and name not in trained and len(alike) != 1 and len(trained) > 1:
            reading.wrong(
                (*where, "phases"),
                f"the model of phase `{name}` is not the one of a phase of `{item_name(source[0])}`, which "
                f"has {', '.join(trained)}: name the same model, or give `init_prefix`",
            )


def _weights(reading: Reading, runner: Mapping[str, Any]) -> tuple[str, int | str | None]:
    """The path of `init_model_path`, and the epoch behind its `@`."""
    path = runner.get("init_model_path")

    def there(one: str) -> bool:
        return os.path.exists(local_path(one, reading.workspace))  # noqa: PTH110

    return split_epoch(path, there) if isinstance(path, str) else ("", None)


def _same_path(reading: Reading, runner: Mapping[str, Any], weights: str) -> bool:
    path = runner.get("save_checkpoint_path")
    return isinstance(path, str) and local_path(path, reading.workspace) == local_path(
        weights, reading.workspace
    )


def _named(reading: Reading, section: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    for _, item in _items(reading, section):
        if (name := item_name(item)) is not None:
            yield name, item


def _phases(runner: Mapping[str, Any], known: Mapping[str, Any]) -> list[str]:
    chosen = runner.get("phases")
    listed = [chosen] if isinstance(chosen, str) else chosen
    return [one for one in listed if isinstance(one, str)] if isinstance(listed, list) else list(known)


def _onnx_files(reading: Reading, where: Where, runner: Mapping[str, Any]) -> None:
    onnx = runner.get("onnx")
    if not isinstance(onnx, dict):
        return
    if onnx.get("best") is True and runner.get("keep_best") is None:
        reading.wrong((*where, "onnx", "best"), "`keep_best` missing, which says what is best", key=True)
    if onnx.get("every") is None and onnx.get("best") is not True and not _broken_below(reading, where):
        reading.wrong((*where, "onnx"), "`every` missing, or `best: true`: it would write nothing", key=True)


def _broken_below(reading: Reading, where: Where) -> bool:
    return any(one[: len(where) + 1] == (*where, "onnx") for one in reading.tree.broken)


def _infer_range(reading: Reading, where: Where, runner: Mapping[str, Any]) -> None:
    first, behind = runner.get("infer_start_epoch"), runner.get("infer_end_epoch")
    given = [name for name in ("infer_start_epoch", "infer_end_epoch") if runner.get(name) is not None]
    of_path = _weights(reading, runner)[1]
    if of_path is not None and (given or runner.get("epoch") is not None):
        also = given[0] if given else "epoch"
        reading.wrong((*where, also), f"`init_model_path` ends with @{of_path}: keep one", key=True)
    if given and runner.get("epoch") is not None:
        reading.wrong((*where, given[0]), "`epoch` says which epochs already: keep one", key=True)
    elif len(given) == 1:
        other = "infer_end_epoch" if given[0] == "infer_start_epoch" else "infer_start_epoch"
        reading.wrong((*where, given[0]), f"`{other}` missing; or write `epoch: 1..5`", key=True)
    elif type(first) is int and type(behind) is int and first >= behind:
        message = f"no epoch is from {first} to before {behind}; or write `epoch: {behind}..{first}`"
        reading.wrong((*where, "infer_end_epoch"), message)
