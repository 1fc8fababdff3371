"""Is the preflight's memory estimate true? Measured peaks of training steps beside it.

    python -m benchmarks.studies.memory [--json] [--quick]

A model is built from its config with transformers and trained as verl's FSDP engine trains it (verl's own log-probs,
two micro-batches, AdamW, transformers' activation checkpointing), without sharding ("torch") and under FSDP2 on one
rank ("fsdp"), on the CPU. The measure is torch's own allocator: its profiler reports every allocation and release, an
operation's inner buffers included, so the running sum is exact to the byte; the process's resident size would add
Python, libraries and what the C allocator has not given back. Two steps are run, since Adam's states exist from the
second on, and the peak of the second counts.
"""

from __future__ import annotations

import gc
import os
import tempfile
from dataclasses import replace
from typing import Annotated, Any

import typer

from benchmarks.machine import print_row
from verl_rhyme.checks.preflight import memory
from verl_rhyme.checks.preflight.architecture import Architecture
from verl_rhyme.checks.preflight.memory import Training

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)

#: (model_type, hidden, MLP, layers, heads, key heads, vocabulary, tied)
MODELS = {
    "qwen2-25m": ("qwen2", 384, 1024, 8, 6, 2, 16384, False),
    "qwen3-25m": ("qwen3", 384, 1024, 8, 6, 2, 16384, False),
    "llama-44m": ("llama", 512, 1408, 12, 8, 4, 16384, True),
    "qwen2-101m": ("qwen2", 768, 2048, 12, 12, 4, 32768, True),
}


def config(name: str) -> dict[str, Any]:
    """A ``config.json`` of one of :data:`MODELS`."""
    kind, hidden, ffn, layers, heads, kv_heads, vocab, tied = MODELS[name]
    return {
        "model_type": kind,
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": hidden // heads,
        "vocab_size": vocab,
        "tie_word_embeddings": tied,
        "max_position_embeddings": 8192,
    }


def measure(fields: dict[str, Any], training: Training, rows: int) -> tuple[int, int]:
    """Peak bytes of forward and backward, and of Adam's step, of the second of two steps.

    Args:
        fields: The model's config.
        training: Of one process; ``tokens`` are shared among ``rows`` sequences.
        rows: Sequences of a micro-batch.
    """
    import torch
    from torch.profiler import ProfilerActivity, profile, record_function
    from transformers import AutoConfig, AutoModelForCausalLM
    from verl.utils.torch_functional import logprobs_from_logits

    gc.collect()  # an earlier model that went later would count as memory given back
    torch.manual_seed(0)
    length = training.tokens // rows
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as profiler:
        made = AutoConfig.for_model(**fields)
        model = AutoModelForCausalLM.from_config(made, dtype=torch.float32, attn_implementation="sdpa").train()
        if training.recompute:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        if training.engine == "fsdp":
            from torch.distributed.fsdp import fully_shard

            for layer in model.model.layers:
                fully_shard(layer)
            fully_shard(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, foreach=training.foreach)
        for step in range(2):
            with record_function(f"backward {step}"):
                for _ in range(2):
                    ids = torch.randint(0, fields["vocab_size"], (rows, length))
                    logits = model(input_ids=ids, use_cache=False).logits
                    loss = -logprobs_from_logits(logits, ids).mean()
                    del logits
                    loss.backward()
                    del loss
            with record_function(f"step {step}"):
                optimizer.step()
                optimizer.zero_grad()
    events = profiler.profiler.kineto_results.events()
    span = {e.name(): (e.start_ns(), e.end_ns()) for e in events if e.name() in ("backward 1", "step 1")}
    peaks, held = dict.fromkeys(span, 0), 0
    for event in sorted((e for e in events if e.name() == "[memory]"), key=lambda e: e.start_ns()):
        held += event.nbytes()
        for name, (start, end) in span.items():
            if start <= event.start_ns() <= end:
                peaks[name] = max(peaks[name], held)
    return peaks["backward 1"], peaks["step 1"]


@app.command()
def main(
    as_json: Annotated[bool, typer.Option("--json", help="one object a line")] = False,
    quick: Annotated[bool, typer.Option(help="one small model")] = False,
    only: Annotated[str | None, typer.Option(help=f"one of {', '.join(MODELS)}")] = None,
) -> None:
    """Measure, estimate, and print the error."""
    import torch.distributed as dist

    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
    plain = Training("torch", compute_bytes=4, fused_loss=False, foreach=False)
    worst = 0.0
    for name in [only] if only else ["qwen2-25m"] if quick else MODELS:
        model = Architecture.read(config(name))
        for engine in ("torch", "fsdp"):
            for recompute in (False, True):
                for rows, tokens in [(2, 512)] if quick else [(2, 512), (4, 2048)]:
                    training = replace(plain, engine=engine, recompute=recompute, tokens=tokens)
                    found = dict(zip(("update", "step"), measure(config(name), training, rows), strict=True))
                    estimated = {
                        "update": memory.update(model, training).total,
                        "step": memory.optimizer_step(model, training).total,
                    }
                    error = max(estimated.values()) / max(found.values()) - 1
                    worst = max(worst, abs(error))
                    row = {
                        "benchmark": "memory",
                        "arm": engine,
                        "model": name,
                        "parameters": model.parameters,
                        "recompute": recompute,
                        "tokens": tokens,
                        "measured_mb": {phase: round(size / 1e6, 1) for phase, size in found.items()},
                        "estimated_mb": {phase: round(size / 1e6, 1) for phase, size in estimated.items()},
                        "error": round(error, 3),
                        "update_error": round(estimated["update"] / found["update"] - 1, 3),
                    }
                    print_row(row, as_json)
    if not as_json:
        print(f"largest error of the peak: {worst:.1%}")
    dist.destroy_process_group()


if __name__ == "__main__":
    app()
