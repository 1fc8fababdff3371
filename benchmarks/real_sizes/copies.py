"""Measure the copy of a prompt's history to another node: seconds until an engine there can draft from it.

    python -m benchmarks.real_sizes copies [--json] [--quick]

Two Ray nodes on this machine, without a network: the real history writer on one, the real fetcher on the other.
Histories have four epochs of 16 responses, at 8k and 32k tokens each. One prompt is built, the others differ from it by
their rewards. `fetch_s`: until the copies are in their files, of 1 and of 32 prompts without copies; `again_s`: the
same for unchanged prompts; `sibling_s`: the same after another node's fetch, whose values the writer may still hold in
Ray's store; `read_s`: the engine thread's time to read one. Medians.
"""

from __future__ import annotations

import dataclasses
import tempfile
import time
import timeit
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from benchmarks.machine import print_row
from benchmarks.real_sizes.history import NAMESPACE, key, responses
from verl_rhyme.config import HistoryConfig
from verl_rhyme.history.copies import CopyReader
from verl_rhyme.history.record import PromptHistory
from verl_rhyme.history_writer.history_copies import HistoryFetcher, node_copies_dir
from verl_rhyme.history_writer.history_writer import READ, HistoryWriter, writer_name

EPOCHS, PROMPTS = 4, 32
OBJECT_STORE = 1 << 30


class Writer(HistoryWriter):
    """History writer that is filled without building each prompt's index."""

    def fill(self, tokens: int, rewards: list[float]) -> int:
        """Store prompts with one text each, replacing the last fill. Return the bytes of one value."""
        built = PromptHistory.build([t for epoch in range(EPOCHS) for t in responses(0, epoch, tokens)])
        opened = self._store._values.opened
        with opened.env.begin(write=True) as txn:
            for prompt, reward in enumerate(rewards):
                made = dataclasses.replace(built, reward=np.full_like(built.reward, reward))
                value = made.encode()
                self._store._values.put(txn, key(prompt), made, value, EPOCHS - 1)
        return len(value)


def run(tokens: int, folder: str, writer: Any, fetchers: list[Any], node: str) -> dict[str, Any]:
    import ray

    rng = np.random.default_rng(tokens)

    def seconds(fetcher: Any, prompts: int) -> float:
        began, now = time.perf_counter(), time.time_ns()
        ray.get(fetcher.fetch.remote({key(prompt): now for prompt in range(prompts)}))
        return time.perf_counter() - began

    row: dict[str, Any] = {"tokens_a_response": tokens}
    for prompts in (1, PROMPTS):
        fetch, again, sibling = [], [], []
        for _ in range(3):
            size = ray.get(writer.fill.remote(tokens, rng.random(prompts).tolist()))
            fetch.append(seconds(fetchers[0], prompts))
            again.append(seconds(fetchers[0], prompts))
            sibling.append(seconds(fetchers[1], prompts))
        row |= {"value_mb": round(size / 1e6, 2)}
        for name, found in (("fetch_s", fetch), ("again_s", again), ("sibling_s", sibling)):
            row[f"{name}_{prompts}"] = round(float(np.median(found)), 4)
            row[f"{name}_{prompts}_range"] = [round(f(found), 4) for f in (min, max)]
    reader = CopyReader(node_copies_dir(folder, node))
    read = timeit.repeat(lambda: reader.get(key(0)).first_tokens, number=1, repeat=9)  # type: ignore[union-attr]
    row["read_s"] = round(float(np.median(read)), 4)
    return row


def main(
    as_json: Annotated[bool, typer.Option("--json", help="one JSON object per line")] = False,
    quick: Annotated[bool, typer.Option(help="responses of 1k tokens")] = False,
) -> None:
    """Measure and print a row per size."""
    import ray
    from ray.cluster_utils import Cluster
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    options = {"num_cpus": 1, "object_store_memory": OBJECT_STORE, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, connect=True, head_node_args=options)
    here = ray.get_runtime_context().get_node_id()
    for _ in range(2):
        cluster.add_node(**options)
    cluster.wait_for_nodes()
    others = [node["NodeID"] for node in ray.nodes() if node["NodeID"] != here]
    about = {"benchmark": "real_sizes", "part": "copies"}
    with tempfile.TemporaryDirectory() as folder:
        config = HistoryConfig(dir=folder, max_bytes=4 << 30)
        actor = ray.remote(concurrency_groups={READ: 1})(Writer).options(num_cpus=0, name=writer_name(folder))
        writer = actor.remote(str(Path(folder) / "store"), NAMESPACE, config, "run")
        fetchers = []
        for node in others:
            where = NodeAffinitySchedulingStrategy(node_id=node, soft=False)
            fetchers.append(
                ray.remote(HistoryFetcher).options(num_cpus=0, scheduling_strategy=where).remote(node, config)
            )
        for tokens in (1024,) if quick else (8192, 32768):
            print_row({**about, **run(tokens, folder, writer, fetchers, others[0])}, as_json)
        ray.get([each.close.remote() for each in (*fetchers, writer)])
    ray.shutdown()
    cluster.shutdown()
