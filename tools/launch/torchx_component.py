"""TorchX component: `torchx run -s local_cwd .../torchx_component.py:job --layout 2x8 -- train.py`.

TorchX reads this file by its path; `torchrelay launch --torchx` writes the command. Each replica is a host of
the launch and runs `on_host`. Written for TorchX 0.7 (`torchx.specs`).
"""

import json  # no string annotations here: TorchX reads the types of arguments
from pathlib import Path

from torchx import specs

from torchrelay.errors import UsageError
from torchrelay.tools.launch.on_host import words_of
from torchrelay.tools.launch.request import layout_of


def job(
    *command: str,
    layout: str = "1",
    name: str = "torchrelay",
    run: str = "",
    environment: str = "",
    image: str = "",
    python: str = "python3",
    notice: int = 300,
    port: int = 29400,
    cpu: int = 1,
    gpu: int = 0,
    memory: int = 1024,
    restarts: int = 0,
) -> specs.AppDef:
    """Run a training program on all ranks of a layout.

    Args:
        command: script and its arguments, or -m MODULE and its arguments, as for torchrun
        layout: NODESxRANKS_PER_NODE, such as 2x8
        name: name of the job
        run: run directory or URL, whose status.json determines the exit code
        environment: JSON file with the environment variables of the ranks
        image: image, for schedulers that run images
        python: Python interpreter on the hosts
        notice: seconds from SIGTERM to SIGKILL
        port: port of the rendezvous on host 0
        cpu: CPUs per host
        gpu: GPUs per host
        memory: memory per host in MB
        restarts: how often the scheduler may restart the hosts
    """
    ranks = layout_of(layout)
    alone = ranks.nodes == 1
    place = [
        *("--layout", str(ranks)),
        *("--index", specs.macros.replica_id),
        *("--endpoint", f"localhost:{0 if alone else port}"),
        *("--host-variable", specs.macros.rank0_env),
        *("--id", specs.macros.app_id),
    ]
    words = [_literal(word) for word in command]
    role = specs.Role(
        name=name,
        image=image,
        entrypoint=python,
        args=words_of(words, notice=notice, run=_literal(run) or None, place=place),
        env={key: _literal(value) for key, value in _variables(environment).items()},
        num_replicas=ranks.nodes,
        resource=specs.Resource(cpu=cpu, gpu=gpu, memMB=memory),
        port_map={"c10d": port},
        max_retries=restarts,
        retry_policy=specs.RetryPolicy.APPLICATION,
    )
    return specs.AppDef(name=name, roles=[role])


def _literal(text: str) -> str:
    """Escape `$` as `$$`, so that TorchX does not replace macros such as `${app_id}`."""
    return text.replace("$", "$$")


def _variables(path: str) -> dict[str, str]:
    try:
        found = json.loads(Path(path).read_bytes()) if path else {}
    except (OSError, ValueError) as error:
        raise UsageError(f"environment: cannot read {path}: {error}") from None
    if not isinstance(found, dict) or not all(isinstance(one, str) for one in found.values()):
        raise UsageError(f"environment: {path} must contain a JSON object of strings")
    return found
