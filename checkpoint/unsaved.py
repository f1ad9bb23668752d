"""What the saves of a run leave out and nobody asked them to: told once, what is trained by rank 0."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from weakref import WeakSet

from torch.optim import Optimizer

from torchrelay.checkpoint.boundary import NodeState
from torchrelay.checkpoint.format.manifest.position import Position, Selection
from torchrelay.checkpoint.format.names import nearest
from torchrelay.checkpoint.state.checkpoint_set import Member, newcomers, used_patterns
from torchrelay.checkpoint.state.flatten import leaves_of
from torchrelay.checkpoint.state.leaf import Value
from torchrelay.checkpoint.state.leaves.optimizer import PARAMS, unsaved_optimizers
from torchrelay.checkpoint.state.names import memory_place
from torchrelay.jobs.cluster import NodePlace
from torchrelay.jobs.session import Session, warn


class Unsaved:
    """Remembers what was told."""

    def __init__(self, selection: Selection) -> None:
        self._selection = selection
        self._looked_at_patterns = selection.everything
        self._told_names: set[str] = set()
        self._told_optimizers = WeakSet[Optimizer]()
        self._looked_at_parameters = False

    def patterns(self, session: Session, states: Sequence[NodeState], position: Position) -> None:
        """Warn of patterns that mean no leaf of any node, when optimizers have state."""
        if self._looked_at_patterns or position.epoch == 0:
            return
        self._looked_at_patterns = True
        names = {leaf.name for state in states for leaf in leaves_of(state.objects)}
        used = session.peers.exchange("save: patterns", used_patterns(names, self._selection))
        unused = [one for one in self._selection.patterns if not any(one in part for part in used)]
        if unused and session.peers.rank == 0:
            known = nearest(unused[0], names)
            text = f"no leaf matches {', '.join(map(repr, unused))} of include= and exclude={known}"
            warn(text, stacklevel=2)

    def late_names(self, session: Session, place: NodePlace, members: Mapping[str, Member]) -> None:
        """Warn of names that came too late to be saved."""
        late = [
            name for name in newcomers(session.workspace(place.name), members) if name not in self._told_names
        ]
        if late:
            self._told_names.update(late)
            warn(
                f"{', '.join(map(repr, late))} appeared on {place} after init and will not be saved: "
                "create it in the init group, or register it as a blob",
                stacklevel=2,
            )

    def training(self, session: Session, place: NodePlace, state: NodeState) -> None:
        """Warn of optimizers and parameters that the program trains, and that no leaf is of."""
        held = (entry.target for entry in session.workspace(place.name).entries().values())
        unsaved = list(unsaved_optimizers(state.names, held, state.leaves.values(), self._told_optimizers))
        self._told_optimizers.update(optimizer for optimizer, _ in unsaved)
        said = [
            f"{type(optimizer).__name__}, which trains {name}, is no blob: its state is not saved, and a "
            "resumed run begins without it. Register it: blobs=dict(..., optimizer=optimizer)"
            for optimizer, name in unsaved
        ]
        left_out = [] if self._looked_at_parameters else self._left_out(state)
        self._looked_at_parameters = True
        if left_out:
            more = f" and {len(left_out) - 3} more" if len(left_out) > 3 else ""
            said.append(
                f"{', '.join(left_out[:3])}{more}: trained by a registered optimizer, and left out by the "
                "state_dict() of its module, so it is not saved, and a resumed run begins with what the "
                "program builds. Register it as a blob of its own"
            )
        for text in said if session.peers.rank == 0 else ():
            warn(text, stacklevel=2)

    def _left_out(self, state: NodeState) -> list[str]:
        """Parameters of optimizers that the own `state_dict` of a registered module does not show."""
        optimizers = [value for value in state.objects.values() if isinstance(value, Optimizer)]
        absent = {
            name: one
            for group in chain.from_iterable(optimizer.param_groups for optimizer in optimizers)
            for one in group[PARAMS]
            if one.requires_grad and (name := state.names.get(id(one))) is not None
            if name not in state.leaves and self._selection.saves(name)
        }
        contents = [leaf.content for leaf in state.leaves.values()] if absent else []
        stored = {memory_place(one) for one in contents if not isinstance(one, Value)}
        return [name for name, one in absent.items() if memory_place(one) not in stored]
