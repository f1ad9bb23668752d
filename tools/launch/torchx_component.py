"""A component of TorchX: `torchx run -s local_cwd .../torchx_component.py:job --layout 2x8 -- train.py`.

TorchX reads this file by its path; `torchrelay launch --torchx` writes the command. Each replica is a host of
the launch and runs `on_host`. Source: TorchX 0.7, component and macro conventions of `torchx.specs`.
"""

import json  # no annotations as texts in this file: TorchX reads arguments by their types
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
    """A training program on all ranks of a layout.

    Args:
        command: what torchrun takes: a script and its arguments, or -m MODULE and arguments
        layout: NODESxRANKS_PER_NODE, such as 2x8
        name: of the job
        run: the run directory or URL, whose status.json says what became of it
        environment: a file with variables of the ranks, a JSON object of strings
        image: for schedulers that run images
        python: the interpreter on the hosts
        notice: seconds from SIGTERM to SIGKILL
        port: where the hosts of several meet, on host 0
        cpu: processors of a host
        gpu: devices of a host
        memory: MB of a host
        restarts: how often the scheduler may start the hosts again
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
    """A text that TorchX leaves as it is: `$` doubled, or `${app_id}` would be replaced."""
    return text.replace("$", "$$")


def _variables(path: str) -> dict[str, str]:
    try:
        found = json.loads(Path(path).read_bytes()) if path else {}
    except (OSError, ValueError) as error:
        raise UsageError(f"environment: {path} cannot be read: {error}") from None
    if not isinstance(found, dict) or not all(isinstance(one, str) for one in found.values()):
        raise UsageError(f"environment: {path} holds no JSON object of strings")
    return found
