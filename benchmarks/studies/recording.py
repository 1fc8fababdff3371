"""What recording a step costs the trainer's process: bytes through it, seconds, memory. Real TransferQueue, Ray, store.

    python -m benchmarks.studies.recording [--json] [--quick]

Each size is a process of its own with a Ray of its own, which records six synthetic steps of other prompts each, the
first to warm up. A step's end waits ``wait_s``, until its samples may be cleared; after ``wall_s`` the history has
them. Bytes are counted where they pass: messages of TransferQueue in the trainer's process, and what it puts into Ray
or gets of it. Peak memory is the trainer's own, above what it had before the first step, and the whole of the writer's
(of which some 330 MB are torch and TransferQueue). Recorded rows of the arm "through the trainer" are of an earlier
recorder, which fetched all of a step, packed it, and put it into Ray's store for the history writer.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from benchmarks.machine import print_row

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, help=__doc__)

#: Samples, response tokens of each.
SIZES = ((512, 2048), (512, 8192), (256, 32768))
GROUP, PROMPT_TOKENS, STEPS = 16, 256, 6


def store(step: int, samples: int, tokens: int) -> tuple[list[str], list[dict[str, int]]]:
    """A finished step in TransferQueue, put there by another process, as agent loop workers do."""
    import torch
    import transfer_queue as tq
    from verl.utils.tensordict_utils import list_of_dict_to_tensordict

    rng = np.random.default_rng(step)
    keys, tags = [], []
    for first in range(step * samples, (step + 1) * samples, GROUP):
        prompt = torch.arange(first, first + PROMPT_TOKENS)
        rows = []
        for number in range(GROUP):
            scores = torch.zeros(tokens)
            scores[-1] = float(rng.random())
            rows.append(
                {
                    "prompts": prompt,
                    "responses": torch.from_numpy(rng.integers(0, 150_000, tokens)),
                    "rollout_log_probs": torch.from_numpy(-rng.random(tokens, dtype=np.float32)),
                    "rm_scores": scores,
                    "extra_fields": {"rhyme": [_record(first, step, tokens, number)]},
                }
            )
        names = [f"s{step}p{first}_{number}_0" for number in range(GROUP)]
        made = [{"response_len": tokens, "seq_len": tokens + PROMPT_TOKENS, "max_global_steps": step}] * GROUP
        tq.kv_batch_put(keys=names, partition_id="train", fields=list_of_dict_to_tensordict(rows), tags=made)
        keys, tags = keys + names, tags + made
    return keys, tags


def _record(prompt: int, step: int, tokens: int, number: int) -> dict[str, Any]:
    from verl_rhyme.history.keys import prompt_key
    from verl_rhyme.processes.request import RequestRecord

    key, now = prompt_key(list(range(prompt, prompt + PROMPT_TOKENS))).hex(), time.time()
    record = RequestRecord(
        id=f"{prompt:032x}",
        prompt_key=key,
        sample=number,
        attempt=0,
        replica=0,
        node="node",
        queued_at=now - 9.0,
        started_at=now - 8.0,
        first_token_at=now - 7.9,
        finished_at=now,
        prompt_tokens=PROMPT_TOKENS,
        response_tokens=tokens,
        policy_version_start=step,
        policy_version_end=step,
        stop_reason="completed",
    )
    return record.to_dict()


class Traffic:
    """Bytes through this process, counted where they pass."""

    def __init__(self) -> None:
        import ray
        from transfer_queue.utils.zmq_utils import ZMQMessage

        self.bytes = 0
        deserialize, put, get = ZMQMessage.deserialize, ray.put, ray.get

        def counted(frames: Any) -> Any:
            self.bytes += sum(len(frame) for frame in frames)
            return deserialize(frames)

        def counted_put(value: Any, **kwargs: Any) -> Any:
            self.bytes += _serialized(value)
            return put(value, **kwargs)

        def counted_get(refs: Any, **kwargs: Any) -> Any:
            values = get(refs, **kwargs)
            self.bytes += _serialized(values)
            return values

        ZMQMessage.deserialize, ray.put, ray.get = counted, counted_put, counted_get


def _serialized(value: Any) -> int:
    import ray

    return ray._private.worker.global_worker.get_serialization_context().serialize(value).total_bytes


def trainer(samples: int, tokens: int) -> dict[str, Any]:
    """Record a step as the trainer's process does; figures of the steps after the first."""
    import ray
    import transfer_queue as tq
    from transfer_queue import KVBatchMeta

    from verl_rhyme.config import HistoryConfig
    from verl_rhyme.history_writer.history_service import HistoryService
    from verl_rhyme.observability.events import EventLog
    from verl_rhyme.trainer.draft_counts import DraftCounts
    from verl_rhyme.trainer.observers import Step
    from verl_rhyme.trainer.recorder import Recorder

    ray.init(num_cpus=8, include_dashboard=False, object_store_memory=max(1 << 28, 12 * samples * tokens))
    found: list[dict[str, float]] = []
    with tempfile.TemporaryDirectory() as folder:
        tq.init()
        traffic = Traffic()
        events, config = EventLog(Path(folder) / "events"), HistoryConfig(dir=f"{folder}/history", max_bytes=8 << 30)
        service = HistoryService(config, "benchmark")
        recorder = Recorder(service, events, lambda: samples, DraftCounts(dict))
        pid = ray.get(service._opening)
        putter = ray.remote(store).options(num_cpus=1)
        for step in range(STEPS):
            keys, tags = ray.get(putter.remote(step, samples, tokens))
            batch = KVBatchMeta(partition_id="train", keys=keys, tags=tags)
            before, traffic.bytes = _peak(), 0
            wall, cpu = time.perf_counter(), time.process_time()
            recorder.start(batch, step=step, part=step, epoch=step)
            recorder.join()
            waited = time.perf_counter() - wall
            recorder.drain()
            figures = {"wait_s": waited, "wall_s": time.perf_counter() - wall, "cpu_s": time.process_time() - cpu}
            figures |= {"bytes_per_token": traffic.bytes / samples / tokens, "peak_mb": (_peak() - before) / 1e6}
            found.append(figures)
            tq.kv_clear(keys=keys, partition_id="train")
        metrics = recorder.on_step(Step(1, 1.0, 1.0))
        assert metrics["rollout/history/errors"] == 0
        assert metrics["rollout/history/responses"] == STEPS * samples
        recorder.close()
        writer_kb = next(line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if "VmHWM" in line)
        service.close()
        tq.close()
    ray.shutdown()
    shown: dict[str, Any] = {}
    for name in ("wait_s", "wall_s", "cpu_s"):
        warm = [row[name] for row in found[1:]]
        shown |= {name: round(float(np.median(warm)), 4), f"{name}_range": [round(f(warm), 4) for f in (min, max)]}
    peak = sum(row["peak_mb"] for row in found)  # of the process: a step adds what it takes beyond those before it
    shown |= {"bytes_per_token": round(found[-1]["bytes_per_token"], 4), "peak_mb": round(peak, 1)}
    return {**shown, "writer_mb": round(int(writer_kb.split()[1]) / 1e3, 1)}


def _peak() -> int:
    """Bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


@app.command()
def main(
    as_json: Annotated[bool, typer.Option("--json", help="one object a line")] = False,
    quick: Annotated[bool, typer.Option(help="a small step")] = False,
    size: Annotated[tuple[int, int] | None, typer.Option(hidden=True)] = None,
) -> None:
    """Measure and print."""
    if size is not None:
        print("\n" + json.dumps(trainer(*size)), flush=True)
        return
    for samples, tokens in ((128, 1024),) if quick else SIZES:
        command = [sys.executable, "-m", "benchmarks.studies.recording", "--size", str(samples), str(tokens)]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, timeout=600)
        found = json.loads(done.stdout.splitlines()[-1])
        row = {"benchmark": "recording", "arm": "by name", "samples": samples, "tokens": tokens, **found}
        print_row(row, as_json)


if __name__ == "__main__":
    app()
