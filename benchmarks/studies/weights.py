"""The relay of weights: seconds to write a version, to fetch it from another node's relay, and to read it.

    python -m benchmarks.studies.weights [--json] [--quick] [--gigabytes 2]

Tensors of a decoder's shapes in bf16, in shared memory, through the real folder and two real relays (Ray actors) on
this machine: what is fetched goes through Ray's object store as it does between nodes, but over no network. ``write``
is what the actor waits for, copy from the GPU aside; ``read`` maps the tensors and touches every byte, as their copy to
a GPU does. ``copy`` is one plain copy of as many bytes in memory, to compare with.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Annotated, Any

import ray
import torch
import typer

from benchmarks.machine import commit, describe
from verl_rhyme.weights import relay
from verl_rhyme.weights.folder import Folder
from verl_rhyme.weights.writer import Writer

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, help=__doc__)

HIDDEN = 4096


def tensors(gigabytes: float) -> dict[str, torch.Tensor]:
    shape = (HIDDEN, 4 * HIDDEN)
    count = max(1, round(gigabytes * 1e9 / (shape[0] * shape[1] * 2)))
    return {
        f"model.layers.{n}.mlp.up_proj.weight": torch.full(shape, n + 1.0, dtype=torch.bfloat16) for n in range(count)
    }


def timed(work: Callable[[], Any]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def measure(gigabytes: float, repeats: int) -> Iterator[dict[str, Any]]:
    weights = tensors(gigabytes)
    size = sum(tensor.nbytes for tensor in weights.values())
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    try:
        here = ray.get_runtime_context().get_node_id()
        near, far = relay.start(here, None), relay.start(here, None)
        source, target = (Folder(path) for path in ray.get([near.folder.remote(), far.folder.remote()]))
        seconds: dict[str, list[float]] = {"copy": [], "write": [], "fetch": [], "read": []}
        for version in range(1, repeats + 1):
            ray.get([each.expect.remote(version) for each in (near, far)])
            seconds["copy"].append(timed(lambda: [tensor.clone() for tensor in weights.values()]))
            seconds["write"].append(timed(lambda version=version: write(source, version, weights)))
            wanted = ray.get(near.publish.remote(version))

            def fetch(version: int = version, wanted: str = wanted) -> None:
                ray.get(far.fetch.remote(version, wanted, [(near, False)]))
                while version not in target.versions():
                    time.sleep(0.005)

            seconds["fetch"].append(timed(fetch))
            seconds["read"].append(timed(lambda version=version: [t.sum() for _, t in target.read(version)]))
    finally:
        ray.shutdown()
    for part, took in seconds.items():
        rates = [size / each / 1e9 for each in took]
        yield {
            "part": part,
            "gigabytes": round(size / 1e9, 2),
            "gigabytes_per_s": round(statistics.median(rates), 2),
            "spread": [round(min(rates), 2), round(max(rates), 2)],
        }


def write(folder: Folder, version: int, weights: dict[str, torch.Tensor]) -> None:
    writer = Writer(folder, version)
    for name, tensor in weights.items():
        writer.add(name, tensor)
    writer.close()


@app.command()
def main(
    as_json: Annotated[bool, typer.Option("--json", help="one object a line")] = False,
    quick: Annotated[bool, typer.Option(help="a few hundred megabytes, twice")] = False,
    gigabytes: Annotated[float, typer.Option(help="of a version; three times as much memory is needed")] = 2.0,
    repeats: Annotated[int, typer.Option(help="versions", min=1)] = 5,
) -> None:
    """Measure each part."""
    for row in measure(0.3 if quick else gigabytes, 2 if quick else repeats):
        if as_json:
            print(json.dumps({"benchmark": "weights", **row, "machine": describe(), "commit": commit()}), flush=True)
        else:
            low, high = row["spread"]
            print(f"{row['part']:6} {row['gigabytes_per_s']:6.2f} GB/s ({low} to {high}), {row['gigabytes']} GB")


if __name__ == "__main__":
    app()
