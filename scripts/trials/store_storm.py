"""Plays worlds of faults between jobs and a real S3 server; prints each that breaks a promise."""

from __future__ import annotations

import argparse
import faulthandler
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "helpers"))

import rgw_server
import s3_server
from store_proxy import Proxy, proxy_to
from store_servers import Served
from store_worlds import BOUND_SECS, CALLS, CLIENT, BrokenError, World, impatient
from surroundings import surroundings

SERVERS = {"moto": (s3_server.MISSING, s3_server.moto), "rgw": (rgw_server.MISSING, rgw_server.rgw)}
_EVERY = 10
"""Worlds between two lines."""


def main(words: Sequence[str] | None = None) -> int:
    """Play; the exit code is 1 where a promise was broken."""
    parser = argparse.ArgumentParser(prog="scripts/campaigns/store-storm", description=__doc__)
    parser.add_argument("--worlds", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--first", type=int, default=0, metavar="N", help="begin with the N-th world of the seed"
    )
    parser.add_argument("--server", choices=sorted(SERVERS), default="moto")
    parser.add_argument("--verbose", action="store_true", help="the story of each world")
    options = parser.parse_args(words)
    if options.worlds < 1:
        parser.error("--worlds is a number from 1")
    missing, start = SERVERS[options.server]
    if missing:
        parser.error(
            f"{options.server}: {missing} missing; scripts/test-services and torchrelay[test] have them"
        )
    with (
        start() as served,
        proxy_to(served.port) as proxy,
        surroundings({**served.seen_at(proxy.port), **CLIENT}),
    ):
        return storm(options, served, proxy)


def storm(options: argparse.Namespace, served: Served, proxy: Proxy) -> int:
    """All worlds, one after another."""
    begin, failures, ends, longest = time.monotonic(), 0, Counter[str](), 0.0
    for number in range(options.worlds):
        name = f"{options.seed}-{options.first + number}"
        faulthandler.dump_traceback_later(BOUND_SECS * CALLS, exit=True)
        with impatient():
            world = World(name, f"{served.url}world-{name}", proxy)
            try:
                world.play()
            except BrokenError as error:
                failures += 1
                again = f"--server {options.server} --seed {options.seed} --first {options.first + number}"
                print(error, f"again: scripts/campaigns/store-storm {again} --worlds 1", sep="\n", flush=True)
        if options.verbose:
            print(f"world {name}", *world.story, sep="\n", flush=True)
        ends, longest = ends + world.ended, max(longest, world.longest_secs)
        if number % _EVERY == _EVERY - 1 or number == options.worlds - 1:
            took = time.monotonic() - begin
            print(f"{number + 1} worlds, {failures} failures, {took:.0f} s; longest call {longest:.1f} s")
            print(f"  calls ended: {dict(ends)}; faults: {dict(proxy.fired)}", flush=True)
    faulthandler.cancel_dump_traceback_later()
    return int(failures > 0)


if __name__ == "__main__":
    sys.exit(main())
