"""What the user fixed about one train call as a whole: by arguments, and by the command line over these."""

from __future__ import annotations

from dataclasses import replace
from signal import Signals

from torchrelay.records import dataclass
from torchrelay.runners.choosing import Resume
from torchrelay.runners.ending.on_crash import OnCrash
from torchrelay.runners.monitoring.text import EVERY_SECS
from torchrelay.runners.options import Options


@dataclass(frozen=True)
class Plan:
    """What the user fixed about the run as a whole."""

    resume: Resume = "auto"
    best: tuple[str, str] | None = None
    save_initial: bool = True
    max_failed_saves: int | None = None
    agree_every: int = 1
    time_limit_secs: float | None = None
    max_attempts: int | None = None
    log_every_n_secs: float = EVERY_SECS
    save_signal: Signals | None = None
    on_crash: OnCrash = "none"
    from_program: tuple[str, ...] = ()

    def with_options(self, options: Options) -> Plan:
        """The same with what the command line overrides."""
        limit = self.time_limit_secs if options.time_limit_secs is None else options.time_limit_secs
        attempts = self.max_attempts if options.max_attempts is None else options.max_attempts or None
        resume = options.resume or self.resume
        return replace(self, resume=resume, time_limit_secs=limit, max_attempts=attempts)
