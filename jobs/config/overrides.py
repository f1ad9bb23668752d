"""Overrides from the command line, and checks across sections."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import field, replace
from pathlib import Path
from typing import Any

from torchrelay.jobs.config.schema import LOCAL_TRAIN, RunnerSection, form_at, is_infer
from torchrelay.jobs.config.section_types import local_path, split_epoch
from torchrelay.jobs.config.tree import (
    COMMAND_LINE,
    ConfigProblem,
    ConfigTree,
    Missing,
    SourceSpan,
    SourceText,
    find,
    hint,
    item_name,
    nearest,
    value_at,
)
from torchrelay.jobs.config.types import FieldType, Reading, Section, section
from torchrelay.jobs.config.yaml_reader import ParseResult, TextPosition, Where, read_findings
from torchrelay.records import dataclass

_WORKSPACE = "{workspace}"


def overridden(tree: ConfigTree, texts: Sequence[str]) -> tuple[ConfigTree, list[ConfigProblem]]:
    """Apply overrides in order to a tree; returns the new tree and the problems of rejected ones."""
    source = SourceText(COMMAND_LINE, tuple(texts))
    work = _TreeEditor(
        copy.deepcopy(tree.value), dict(tree.origins), dict(tree.keys), set(tree.broken), source
    )
    for index, text in enumerate(texts):
        work.take(index, text)
    return ConfigTree(work.value, work.origins, work.keys, frozenset(work.broken)), work.problems


@dataclass
class _TreeEditor:
    """A tree that is being edited."""

    value: dict[str, Any]
    origins: dict[Where, SourceSpan]
    keys: dict[Where, SourceSpan]
    broken: set[Where]
    source: SourceText
    problems: list[ConfigProblem] = field(default_factory=list)

    def take(self, index: int, text: str) -> None:
        """Apply one override, or report a problem."""
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
        """Return the location of a key, existing or new; None after a reported problem."""
        place = find(self.value, key)
        if not isinstance(place, Missing):
            return place
        message, near = self._refusal(place, key, adds=adds)
        if message is None:
            return (*place.where, *place.rest)
        self._wrong(index, ends - len(".".join(place.rest)) + 1, key, message, near)
        return None

    def _refusal(self, missing: Missing, key: str, *, adds: bool) -> tuple[str | None, str | None]:
        """Return why a new key cannot be added; None if it can."""
        here, path = value_at(self.value, missing.where), ".".join(map(str, missing.where))
        if missing.leaf and here is not None:
            return f"`{path}` is a single value without keys", None
        form = form_at(missing.where)
        if isinstance(here, list) and isinstance(form, Section):
            return f"`{path}` is a list, not {form.word}; it has no `{missing.rest[0]}`", None
        for at, word in enumerate(missing.rest):
            known = {*(missing.known if at == 0 else ()), *(form.keys if isinstance(form, Section) else ())}
            if isinstance(form, Section) and word in form.refused:
                return f"`{word}` is not supported: {form.refused[word]}", None
            if isinstance(form, Section) and word in form.keys:
                form = form.below(word)
                continue
            if _is_open(form, here):
                near = f"{hint(word, known)} ".lstrip()
                why = f"`{word}` is not in the configuration; {near}(+{key}=... adds it)"
                return (None, None) if adds else (why, nearest(word, known))
            return f"unknown name `{word}`; {hint(word, known) or 'it has no keys'}", nearest(word, known)
        return None, None

    def _put(self, where: Where, found: ParseResult, index: int, begins: int) -> None:
        here: Any = self.value
        origin = self._at(index, 1)
        for at, one in enumerate(where[:-1]):
            if isinstance(here, dict) and here.get(one) is None:
                here[one] = {}
                self._forget(where[: at + 1])
                self.origins[where[: at + 1]] = self.keys[where[: at + 1]] = origin
            here = here[one]
        self._forget(where)
        here[where[-1]] = found.value
        self.keys[where] = self.origins[where] = origin
        for inner, place in found.values.items():
            self.origins[(*where, *inner)] = self._at(index, begins + place.column)
        for inner, place in found.keys.items():
            self.keys[(*where, *inner)] = self._at(index, begins + place.column)

    def _forget(self, where: Where) -> None:
        """Remove the locations of a value and everything below it."""
        for places in (self.origins, self.keys):
            for one in [one for one in places if one[: len(where)] == where]:
                del places[one]
        self.broken = {one for one in self.broken if one[: len(where)] != where}

    def _at(self, index: int, column: int) -> SourceSpan:
        return SourceSpan(self.source, TextPosition(index + 1, column))

    def _wrong(self, index: int, column: int, key: str, message: str, near: str | None = None) -> None:
        self.problems.append(ConfigProblem(self._at(index, column), key, message, near))


def _is_open(form: FieldType | None, value: Any) -> bool:
    """Return True if the keys here are chosen by the user."""
    if isinstance(form, Section):
        return form.free is not None
    return form.below("") is not None if form is not None else isinstance(value, dict)


def _read(written: str) -> ParseResult:
    """Parse the value of an override; one that begins with `{workspace}` is a text, not a mapping."""
    if written.startswith(_WORKSPACE):
        return ParseResult(written, {(): TextPosition(1, 1)}, {}, (), frozenset())
    found = read_findings(written.encode("utf-8", "surrogatepass"))
    return found if found.values else replace(found, values={(): TextPosition(1, 1)})


_LISTS = ("runner", "phase", "dataset")
_Keys = Mapping[str, Any]


class References:
    """The runners, phases and datasets of a tree, with their locations."""

    def __init__(self, reading: Reading) -> None:
        self.reading, self.tree = reading, reading.tree
        self.items = {name: list(self._items(name)) for name in _LISTS}
        self.phases = {name: one for _, one in self.items["phase"] if (name := item_name(one)) is not None}

    def check(self) -> None:
        """Report inconsistencies, at one location in this order; not of values reported for their type."""
        names = {section: self._unique(section) for section in _LISTS}
        self._known(("mode",), names["runner"], "runner")
        for where, runner in self.items["runner"]:
            self._known((*where, "phases"), names["phase"], "phase")
            if is_infer(runner):
                self._infer_range(where, runner)
            else:
                self._trains(where, runner)
        # Check the keys of the learning rate schedule.
        place: Where = ("hyper_parameters", "optimizer")
        optimizer = self._value(place)
        if isinstance(optimizer, dict):
            given = _given(optimizer, "decay_steps", "decay_rate")
            if len(given) == 1:
                other = "decay_rate" if given[0] == "decay_steps" else "decay_steps"
                if not self._is_broken(*place, other):
                    self._wrong((*place, given[0]), f"`{other}` missing", key=True)
            if given and optimizer.get("lr_scheduler") is not None:
                why = "`lr_scheduler` already sets the learning rate schedule: remove one"
                self._wrong((*place, given[0]), why, key=True)
        self._profiles_in_order()
        for where, phase in self.items["phase"]:
            self._known((*where, "dataset_name"), names["dataset"], "dataset")
            validation = phase.get("validation")
            inner = () if isinstance(validation, str) else ("dataset_name",)
            if isinstance(validation, (str, dict)):
                self._known((*where, "validation", *inner), names["dataset"], "dataset")
            if phase.get("dataset_name") is None and len(names["dataset"]) > 1:
                self._wrong(where, f"`dataset_name` missing; {hint('', names['dataset'])}")

    def _wrong(self, where: Where, message: str, near: str | None = None, *, key: bool = False) -> None:
        self.reading.wrong(where, message, near, key=key)

    def _is_broken(self, *where: str | int) -> bool:
        return where in self.tree.broken

    def _items(self, section: str) -> Iterator[tuple[Where, _Keys]]:
        listed = self.tree.value.get(section)
        for at, item in enumerate(listed if isinstance(listed, list) else []):
            if isinstance(item, dict) and not self._is_broken(section, at):
                yield (section, at), item

    def _unique(self, section: str) -> list[str]:
        """Return the names of a section's items; reports duplicates."""
        first: dict[str, Where] = {}
        for where, item in self.items[section]:
            name = item_name(item)
            if name is not None and name in first:
                line = self.tree.origin((*first[name], "name")).place.line
                self._wrong((*where, "name"), f"another {section} is called `{name}`, in line {line}")
            elif name is not None:
                first[name] = where
        return list(first)

    def _value(self, where: Where) -> Any:
        """Return a value; None if it or something around it is broken."""
        here: Any = self.tree.value
        for depth, one in enumerate(where, 1):
            if self._is_broken(*where[:depth]):
                return None
            here = here.get(one) if isinstance(here, dict) else here[one] if isinstance(one, int) else None
        return here

    def _known(self, where: Where, names: list[str], what: str) -> None:
        """Report each name at `where`, one or a list, that is not in `names`."""
        value = self._value(where)
        places: list[tuple[Where, Any]] = [(where, value)]
        if isinstance(value, list):
            places = [((*where, at), one) for at, one in enumerate(value)]
        for place, name in places:
            if isinstance(name, str) and name and name not in names and not self._is_broken(*place):
                near = hint(name, names) or f"no {what} is declared"
                self._wrong(place, f"unknown {what} `{name}`; {near}", nearest(name, names))

    def _trains(self, where: Where, runner: _Keys) -> None:
        """Check the keys of a runner that trains."""
        for name, spec in section(RunnerSection).keys.items():
            if spec.infer_only and runner.get(name) is not None:
                near, remedy = ("epochs", "; did you mean `epochs`?") if name == "epoch" else (None, "")
                why = f"only valid for a runner of class `infer`{remedy}"
                self._wrong((*where, name), why, near, key=True)
        said = runner.get("stop")
        stop: _Keys = said if isinstance(said, dict) else {}
        ends = runner.get("epochs_per_partition") is not None or any(one is not None for one in stop.values())
        if runner.get("epochs") is None:
            if not ends and not self._is_broken(*where, "epochs"):
                self._wrong(where, "`epochs` missing, and there is no `stop`: training would never end")
        elif stop.get("max_epochs") is not None:
            why = "`epochs` of the runner already sets it: remove one"
            self._wrong((*where, "stop", "max_epochs"), why, key=True)
        onnx, place = runner.get("onnx"), (*where, "onnx")
        if isinstance(onnx, dict):
            if onnx.get("best") is True and runner.get("keep_best") is None:
                why = "`keep_best` is missing, which defines the best epoch"
                self._wrong((*place, "best"), why, key=True)
            broken = any(one[: len(place)] == place for one in self.tree.broken)
            if onnx.get("every") is None and onnx.get("best") is not True and not broken:
                why = "`every` or `best: true` is missing, so nothing would be written"
                self._wrong(place, why, key=True)
        count = runner.get("worker_num")
        if type(count) is int and count > 1 and runner.get("class") != LOCAL_TRAIN:
            why = f"only class `{LOCAL_TRAIN}` starts processes; other classes use those started by torchrun"
            self._wrong((*where, "worker_num"), why, key=True)

    def _infer_range(self, where: Where, runner: _Keys) -> None:
        given = _given(runner, "infer_start_epoch", "infer_end_epoch")
        also = [*given, *_given(runner, "epoch")]
        of_path = self._weights(runner)[1]
        if of_path is not None and also:
            self._wrong((*where, also[0]), f"`init_model_path` ends with @{of_path}: remove one", key=True)
        first, behind = runner.get("infer_start_epoch"), runner.get("infer_end_epoch")
        if given and also != given:
            self._wrong((*where, given[0]), "`epoch` already selects the epochs: remove one", key=True)
        elif len(given) == 1:
            other = "infer_end_epoch" if given[0] == "infer_start_epoch" else "infer_start_epoch"
            self._wrong((*where, given[0]), f"`{other}` missing; or write `epoch: 1..5`", key=True)
        elif type(first) is int and type(behind) is int and first >= behind:
            message = f"no epoch is from {first} to before {behind}; or write `epoch: {behind}..{first}`"
            self._wrong((*where, "infer_end_epoch"), message)

    def _profiles_in_order(self) -> None:
        """Check the run directories of the mode's runners, and the epochs that `infer` runners evaluate."""
        mode = self._value(("mode",))
        names = [mode] if isinstance(mode, str) else mode
        known = self.items["runner"]
        chosen = [pair for pair in known if not isinstance(names, list) or item_name(pair[1]) in names]
        training = [one for _, one in chosen if not is_infer(one)]
        training = training or [one for _, one in known if not is_infer(one)]
        places: dict[str, str | None] = {}
        for where, runner in chosen:
            path = runner.get("save_checkpoint_path")
            if is_infer(runner):
                self._stored_models(where, runner, training)
            elif isinstance(path, str) and path:
                place = path if "://" in path else str(self._local(path))
                if place in places:
                    why = f"runner `{places[place]}` already uses this path: give each runner its own path"
                    self._wrong((*where, "save_checkpoint_path"), why)
                places.setdefault(place, item_name(runner))

    def _stored_models(self, where: Where, runner: _Keys, training: Sequence[_Keys]) -> None:
        """Report an `infer` runner whose model is not trained by the runner whose epochs it evaluates.

        Another class is accepted if only one is trained, because it may have the same weights.
        """
        source = training
        if runner.get("init_model_path"):
            weights = self._local(self._weights(runner)[0])
            paths = [(one, one.get("save_checkpoint_path")) for one in training]
            source = [one for one, path in paths if isinstance(path, str) and self._local(path) == weights]
        elif len(training) > 1 and not self._is_broken(*where, "init_model_path"):
            message = f"`init_model_path` missing, and {len(training)} runners train: set the run to evaluate"
            self._wrong(where, message)
        if len(source) != 1 or runner.get("init_prefix") or runner.get("network_class_path"):
            return
        trained = self._phases(source[0])
        for name in self._phases(runner):
            model = self.phases[name].get("model")
            alike = [one for one in trained if self.phases[one].get("model") == model]
            if name not in trained and len(alike) != 1 and len(trained) > 1:
                other = f"a phase of `{item_name(source[0])}`, which has {', '.join(trained)}"
                remedy = "name the same model, or give `init_prefix`"
                why = f"the model of phase `{name}` is not that of {other}: {remedy}"
                self._wrong((*where, "phases"), why)

    def _weights(self, runner: _Keys) -> tuple[str, int | str | None]:
        """Return the path of `init_model_path` and the epoch after its `@`."""
        path = runner.get("init_model_path")
        if not isinstance(path, str):
            return "", None
        return split_epoch(path, lambda one: os.path.exists(self._local(one)))  # noqa: PTH110

    def _local(self, path: str) -> Path:
        return local_path(path, self.reading.workspace)

    def _phases(self, runner: _Keys) -> list[str]:
        """Return the names of its existing phases."""
        chosen = runner.get("phases")
        listed = [chosen] if isinstance(chosen, str) else chosen
        names = listed if isinstance(listed, list) else self.phases
        return [one for one in names if isinstance(one, str) and one in self.phases]


def _given(values: _Keys, *names: str) -> list[str]:
    return [name for name in names if values.get(name) is not None]
