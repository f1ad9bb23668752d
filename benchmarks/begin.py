"""How much longer README's program takes than the same training with `torch.save`, from its start to its end.

    python benchmarks/begin.py [--beside CHECKOUT] [--rounds 7] [--no-bytecode]

Each round starts `torch.save`, this checkout and `--beside` (an older one) in turns, each as a process of its
own in a directory of its own: a run of 5 epochs from nothing, then its resume to 10 epochs. Bytecode of the
sources is compiled before, as installing compiles it; with `--no-bytecode` each start compiles what it
imports. Figures are seconds, medians with their ranges; `more` and `ratio` are the medians of each round's
difference and ratio to `torch.save`.
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
OURS = (ROOT / "README.md").read_text().split("`hello.py`:\n\n```python\n", 1)[1].split("```", 1)[0]
PLAIN = """
import glob, os
import torch, torch.nn.functional as F

torch.manual_seed(0)
x, y = torch.randn(256, 10), torch.randn(256, 1)
model = torch.nn.Linear(10, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
os.makedirs("plain", exist_ok=True)
done = max((int(name[6:-3]) for name in glob.glob("plain/*.pt")), default=0)
if done:
    saved = torch.load(f"plain/{done}.pt")
    model.load_state_dict(saved["model"]); optimizer.load_state_dict(saved["optimizer"])
for epoch in range(done + 1, 5 + 1):
    loss = F.mse_loss(model(x), y)
    optimizer.zero_grad(); loss.backward(); optimizer.step()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, f"plain/{epoch}.pt")
print("loss", float(loss))
"""
ENDS = {"fresh": {}, "resumed": {"max_epochs(5)": "max_epochs(10)", "5 + 1": "10 + 1"}}


def measure(program: str, folder: Path, checkout: Path | None, *, bytecode: bool) -> tuple[float, float]:
    """Run a program; its wall and processor seconds."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    if not bytecode:
        env["PYTHONDONTWRITEBYTECODE"] = "1"
    if checkout is not None:
        env["PYTHONPATH"] = str(checkout / "src")
    (folder / "hello.py").write_text(program)
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    done = subprocess.run(
        [sys.executable, "hello.py"],
        cwd=folder,
        env=env,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    wall, after = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode:
        raise SystemExit(done.stderr)
    return wall, after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--beside", type=Path, default=None)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--no-bytecode", action="store_true")
    asked = parser.parse_args()
    programs: dict[str, tuple[str, Path | None]] = {"torch.save": (PLAIN, None), "this code": (OURS, ROOT)}
    if asked.beside is not None:
        programs["code before"] = (OURS, asked.beside.resolve())
    found: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for index in range(asked.rounds + 1):  # the first one compiles, and is not counted
        for name in list(programs)[:: 1 if index % 2 == 0 else -1]:
            program, checkout = programs[name]
            with tempfile.TemporaryDirectory() as folder:
                for when, changes in ENDS.items():
                    text = program
                    for old, new in changes.items():
                        text = text.replace(old, new)
                    took = measure(text, Path(folder), checkout, bytecode=not asked.no_bytecode)
                    found.setdefault((when, name), []).append(took)
    print("| run | program | wall | more | ratio | processor | more | ratio |")
    print("|---|---|---|---|---|---|---|---|")
    for (when, name), rounds in sorted(found.items()):
        plain, cells = found[when, "torch.save"][1:], []
        for kind in (0, 1):
            times = sorted(one[kind] for one in rounds[1:])
            pairs = [(ours[kind], theirs[kind]) for ours, theirs in zip(rounds[1:], plain, strict=True)]
            more = statistics.median(ours - theirs for ours, theirs in pairs)
            ratio = statistics.median(ours / theirs for ours, theirs in pairs)
            cells.append(f"{statistics.median(times):.2f} ({times[0]:.2f} to {times[-1]:.2f})")
            cells[-1] += f" | {more:+.2f} | {ratio:.3f}"
        print(f"| {when} | {name} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
