"""Entry point of the command line: `python -m torchrelay`, or `torchrelay`."""

from __future__ import annotations

import sys

from torchrelay.tools.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
