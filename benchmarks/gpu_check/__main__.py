"""What a GPU is to decide about this project, in at most 40 minutes, part by part: docs/studies/gpu_check.md.

    bash benchmarks/gpu_check.sh [--quick] [--only PART ...] [--again] [--out FOLDER]

Started again, it runs the parts that are not done.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import re
import sys
from pathlib import Path

from benchmarks.gpu_check import driver
from benchmarks.gpu_check.parts import PARTS
from benchmarks.machine import commit, describe

_PACKAGES = ("torch", "triton", "transformers", "numba", "lmdb", "typer", "pyarrow", "vllm", "verl")


def _gpu() -> str:
    """Name of the first GPU; empty where there is none, or no torch."""
    try:
        import torch
    except ImportError:
        return ""
    return str(torch.cuda.get_device_name(0)) if torch.cuda.is_available() else ""


def _versions() -> str:
    found = []
    for name in _PACKAGES:
        try:
            found.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            found.append(f"no {name}")
    return ", ".join(found)


def main() -> int:
    """Run, and print the table; 0 where every part is done or cannot run here."""
    parser = argparse.ArgumentParser(prog="gpu_check", description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="small sizes; always so without a GPU")
    parser.add_argument("--only", action="append", choices=[part.name for part in PARTS], help="may be given again")
    parser.add_argument("--again", action="store_true", help="also what is done")
    parser.add_argument("--out", type=Path, default=Path("runs/gpu_check"), help="results go below it, by machine")
    chosen = parser.parse_args()
    gpu = _gpu()
    quick = chosen.quick or not gpu
    machine = gpu or describe()
    folder = re.sub(r"[^a-z0-9]+", "-", machine.lower()).strip("-") + ("-quick" if quick else "")
    results = driver.Results(chosen.out / folder)
    parts = [part for part in PARTS if not chosen.only or part.name in chosen.only]
    if chosen.again:
        for part in parts:
            results.drop(part.name)
    print(f"{machine}: {_versions()}\nresults: {results.file}", flush=True)
    if quick:
        print("Small sizes: the figures show that the parts run, and decide nothing.", flush=True)
    about = {"benchmark": "gpu_check", "quick": quick, "machine": machine, "commit": commit()}
    whole = driver.run(parts, results, about, bool(gpu), quick, lambda line: print(line, flush=True))
    print(driver.table(results, parts))
    return 0 if whole else 1


if __name__ == "__main__":
    sys.exit(main())
