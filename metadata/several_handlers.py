"""Several metadata handlers as one: all of them are told, whatever becomes of the others."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from torchrelay.errors import RelayError
from torchrelay.metadata.handler import Holder, MetadataHandler


class SeveralHandlers:
    """Tells all in their order. Only those that say `decides = True` are asked where a run starts.

    The last of these has the last word: each is given the answer of the one before as the user's wish.
    """

    def __init__(self, handlers: Sequence[MetadataHandler]) -> None:
        self._all = tuple(handlers)

    @property
    def decides(self) -> bool:
        """Whether one of them does."""
        return bool(self._deciding())

    def _deciding(self) -> list[MetadataHandler]:
        return [one for one in self._all if getattr(one, "decides", False)]

    def set_params(
        self,
        db_prefix: str,
        db_type: str,
        node_names: Sequence[str],
        path_prefix: str | None = None,
        path_type: str | None = None,
    ) -> None:
        """Tell all; the first failure is raised at once, because the run does not start then."""
        for one in self._all:
            one.set_params(
                db_prefix=db_prefix,
                db_type=db_type,
                node_names=node_names,
                path_prefix=path_prefix,
                path_type=path_type,
            )

    def opened(self, holder: Holder) -> None:
        """Tell those that want to hear it."""
        for one in self._all:
            opened = getattr(one, "opened", None)
            if opened is not None:
                opened(holder)

    def last_epoch(self, user_epoch: int | None = None) -> int | None:
        """What those that decide make of the user's wish."""
        for one in self._deciding():
            user_epoch = one.last_epoch(user_epoch=user_epoch)
        return user_epoch

    def write(self, epoch: int) -> None:
        """Tell all; failures are raised together when all have been told."""
        self._tell(lambda one: one.write(epoch=epoch))

    def report(self, action: str, stats: Mapping[str, float]) -> None:
        """Tell all; failures are raised together when all have been told."""
        self._tell(lambda one: one.report(action, stats))

    def cp_accessible(self, epoch: int | None = None) -> bool:
        """Whether all agree; nobody is asked after the first who does not."""
        return all(one.cp_accessible(epoch) for one in self._all)

    def _tell(self, call: Callable[[MetadataHandler], None]) -> None:
        failures: list[Exception] = []
        for one in self._all:
            try:
                call(one)
            except Exception as error:
                failures.append(error)
        if len(failures) == 1:
            raise failures[0]
        if failures:
            raise RelayError("; ".join(map(str, failures))) from failures[0]
