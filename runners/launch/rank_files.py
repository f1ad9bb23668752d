"""What each rank prints goes into files of its own, named after the rank; rank 0 is shown, too."""

from __future__ import annotations

from pathlib import Path

from torch.distributed.elastic.multiprocessing.api import LogsDest, LogsSpecs


class RankFiles(LogsSpecs):
    """`rank_3.out` and `rank_3.err` in the directory of the attempt, for torchrun's agent.

    When the agent itself starts its ranks again (it is not told to by `launch`), the files of these have the
    number of the restart in their names, because torchrun begins a file anew.
    """

    def __init__(self, directory: Path) -> None:
        super().__init__(str(directory))
        self._directory = directory

    @property
    def root_log_dir(self) -> str:
        """Where the files are."""
        return str(self._directory)

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """The files of the ranks whose environments these are, by local rank."""
        self._directory.mkdir(parents=True, exist_ok=True)
        stems = {local: self._stem(env) for local, env in envs.items()}
        shown = [local for local, env in envs.items() if env.get("RANK") == "0"]
        for local, env in envs.items():
            env["TORCHELASTIC_ERROR_FILE"] = f"{stems[local]}.error.json"
        out = {local: f"{stem}.out" for local, stem in stems.items()}
        err = {local: f"{stem}.err" for local, stem in stems.items()}
        return LogsDest(
            out,
            err,
            {local: out[local] for local in shown},
            {local: err[local] for local in shown},
            {local: f"{stem}.error.json" for local, stem in stems.items()},
        )

    def _stem(self, env: dict[str, str]) -> str:
        restart = env.get("TORCHELASTIC_RESTART_COUNT", "0")
        again = "" if restart == "0" else f".restart_{restart}"
        return str(self._directory / f"rank_{env['RANK']}{again}")
