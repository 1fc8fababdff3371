"""Run checks that need a GPU, part by part in at most 46 minutes. Figures of an H100: docs/results.md.

    bash benchmarks/gpu_check.sh [--quick] [--only PART ...] [--again] [--out FOLDER]

A second start runs the unfinished parts.
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
    """Return the name of the first GPU, or ``""`` without a GPU or torch."""
    try:
        import torch
    except ImportError:
        return ""
    return str(torch.cuda.get_device_name(0)) if torch.cuda.is_available() else ""


def _versions() -> str:
    versions = []
    for name in _PACKAGES:
        try:
            versions.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            versions.append(f"no {name}")
    return ", ".join(versions)


def main() -> int:
    """Run the parts and print the table. Return 0 if every part is done or cannot run on this machine."""
    parser = argparse.ArgumentParser(prog="gpu_check", description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="small sizes; the default without a GPU")
    parser.add_argument("--only", action="append", choices=[part.name for part in PARTS], help="repeat for several")
    parser.add_argument("--again", action="store_true", help="run finished parts again")
    parser.add_argument("--out", type=Path, default=Path("runs/gpu_check"), help="results folder")
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
        print("Small sizes: the figures only show that the parts run.", flush=True)
    about = {"benchmark": "gpu_check", "quick": quick, "machine": machine, "commit": commit()}
    complete = driver.run(parts, results, about, bool(gpu), quick, lambda line: print(line, flush=True))
    print(driver.table(results, parts))
    return 0 if complete else 1


if __name__ == "__main__":
    sys.exit(main())
