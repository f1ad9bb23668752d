"""Good clients and bad ones at a server, and what became of them."""

from __future__ import annotations

import asyncio
import json
import random
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from http_client import NOTHING, Client, Reply
from malformed import malformed

RIGHT = "right"


@dataclass
class Seen:
    """Answers by status (0: none), seconds of good ones, and what must not be."""

    statuses: Counter[int] = field(default_factory=Counter)
    secs: list[float] = field(default_factory=list)
    epochs: set[Any] = field(default_factory=set)
    findings: list[str] = field(default_factory=list)

    def quantile(self, share: float) -> float:
        """Of the seconds."""
        return quantile(self.secs, share)

    def usual_quantile(self, share: float) -> float:
        """The median of that of every hundred answers: a machine that stalls once shows once."""
        parts = [self.secs[at : at + 100] for at in range(0, len(self.secs), 100)]
        return quantile([quantile(part, share) for part in parts], 0.5)


def quantile(values: list[float], share: float) -> float:
    """Of any values; 0 of none."""
    return sorted(values)[min(len(values) - 1, int(share * len(values)))] if values else 0.0


Check = Callable[[list[float], Reply], str]
"""Empty, or what is wrong with the answer to a sample."""


async def good_client(
    port: int, seen: Seen, going: Callable[[], bool], check: Check, seed: int, pause: float
) -> None:
    """Asks for random samples, one after the other, while `going`."""
    chance, client = random.Random(seed), Client(port)
    await asyncio.sleep(pause * chance.random())
    while going():
        sample = [chance.random() for _ in range(64)]
        began = time.perf_counter()
        try:
            reply = await client.predict(sample)
        except asyncio.TimeoutError:
            seen.findings.append("a good request had no answer")
            break
        seen.secs.append(time.perf_counter() - began)
        seen.statuses[reply.status] += 1
        if reply.status == 200:
            seen.epochs.add(reply.json()["epoch"])
            if wrong := check(sample, reply):
                seen.findings.append(wrong)
        elif not by_design(reply):
            seen.findings.append(f"a good request got {reply.status}: {reply.body[:200]!r}")
        if pause:
            await asyncio.sleep(pause * chance.uniform(0.5, 1.5))
    client.close()


async def bad_client(port: int, seen: Seen, numbers: Any, seed: int) -> None:
    """Sends what is malformed, one after the other; `numbers` is shared by all of them."""
    client = Client(port)
    for number in numbers:
        data, end = malformed(random.Random(f"{seed} {number}"), port)
        try:
            reply = await client.send(data, end=end)
        except asyncio.TimeoutError:
            seen.findings.append(f"malformed request {number} of seed {seed} had no answer and no end")
            client.close()
            continue
        seen.statuses[reply.status] += 1
        if (reply.status >= 500 and not by_design(reply)) or (reply.status == NOTHING and not end):
            seen.findings.append(
                f"malformed request {number} of seed {seed} got {reply.status}: {reply.body[:200]!r}"
            )
    client.close()


def by_design(reply: Reply) -> bool:
    """Overload, in the words that say when to come again."""
    return reply.status in (429, 503) and "retry-after" in reply.headers


async def attack(port: int, first: int, last: int, connections: int, seed: int) -> Seen:
    """Send the malformed requests of these numbers over so many connections at once."""
    seen, numbers = Seen(), iter(range(first, last))
    await asyncio.gather(*(bad_client(port, seen, numbers, seed) for _ in range(connections)))
    return seen


async def good_clients(
    port: int, count: int, going: Callable[[], bool], check: Check, seed: int, pause: float = 0.0
) -> Seen:
    """So many of them, at once, while `going`."""
    seen = Seen()
    tasks = (good_client(port, seen, going, check, seed + at, pause) for at in range(count))
    await asyncio.gather(*tasks)
    return seen


def main() -> None:
    """Attack in a process of its own, so that good clients are not held up by it; prints what was seen."""
    port, first, last, connections, seed = map(int, sys.argv[1:])
    seen = asyncio.run(attack(port, first, last, connections, seed))
    print(json.dumps({"statuses": seen.statuses, "findings": seen.findings}))


if __name__ == "__main__":
    main()
