"""The storm of scripts/campaigns/serve-storm, a bounded part of it, at a server in this process."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import torch
from samples import sample
from serve_load import Seen, attack, good_clients
from served import served, serving

from torchrelay.tools.serving.handlers import TensorHandler

SEED = 20261122
MALFORMED, CLIENTS, PAUSE_SECS = sample(1000, 3000), 100, 1.0
MOST_MIB = 100


def memory_mib() -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS")) / 1024


def test_malformed_requests_harm_nobody(tell: Any):
    """Malformed requests beside 100 good clients: no 5xx but by design, right answers, no memory."""
    torch.manual_seed(0)
    model = torch.nn.Linear(64, 10)
    found: list[Seen] = []

    def right(sample: list[float], reply: Any) -> str:
        result = torch.tensor(reply.json()["result"])
        with torch.inference_mode():
            wanted = model(torch.tensor([sample]))[0]
        return "" if torch.allclose(result, wanted, atol=1e-5) else f"{sample} gave {result}"

    async def both(port: int) -> tuple[Seen, Seen]:
        over = threading.Event()
        good = asyncio.create_task(
            good_clients(port, CLIENTS, lambda: not over.is_set(), right, SEED, PAUSE_SECS)
        )
        bad = await attack(port, 0, MALFORMED, 4, SEED)
        over.set()
        return await good, bad

    with serving(served(TensorHandler(model))) as here:
        asyncio.run(attack(here.port, MALFORMED, MALFORMED + 200, 4, SEED))
        before = memory_mib()
        found += asyncio.run(both(here.port))
        after = memory_mib()
        good, bad = found
        assert here.metric("torchrelay_faults_total") == 0
        assert here.running._predicting._budget.held == 0
        assert here.client.get("/ready").status_code == 200
    assert not good.findings and not bad.findings, (good.findings[:3], bad.findings[:3])
    assert sum(bad.statuses.values()) == MALFORMED and sum(good.statuses.values()) >= CLIENTS
    assert {400, 404, 405, 413, 415, 421, 422} <= set(bad.statuses)
    assert after - before < MOST_MIB
    tell(f"server: malformed {dict(sorted(bad.statuses.items()))}, {after - before:+.1f} MiB")
