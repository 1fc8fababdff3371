"""Measure what the model's own drafter adds to a step: an EAGLE-3 head for a model of 7B, three tokens a request.

Weights are random. Only steps of all rows count: drafts that are accepted end some rows sooner. ``step_ms`` with the
drafter includes the verification of its drafts and the waits that time it. On a CPU both models are tiny.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.gpu_check import engines, models
from benchmarks.gpu_check.reporting import device, parse_arguments, report
from verl_rhyme.engine.extension import RhymeWorkerMethods

ARMS = ("stock", "model's drafter")
ROWS, TOKENS, WARM_UP, CHAIN, DRAFT_ENTRIES = (1, 64, 256), 96, 16, 3, 32_000
_MODULE = "benchmarks.gpu_check.model_drafter"


class Timed(RhymeWorkerMethods):
    """Worker methods that time vLLM's proposer alone."""

    def time_proposer(self) -> None:
        runner, self.milliseconds = self.model_runner, []
        propose = runner.propose_draft_token_ids  # ours around vLLM's

        def timed(*args: Any, **kwargs: Any) -> Any:
            _wait()
            began = time.perf_counter()
            made = propose(*args, **kwargs)
            _wait()
            self.milliseconds.append(1e3 * (time.perf_counter() - began))
            return made

        runner.propose_draft_token_ids = timed

    def proposer_milliseconds(self) -> list[float]:
        taken, self.milliseconds = self.milliseconds, []
        return taken


def _wait() -> None:
    if device().type == "cuda":
        torch.cuda.synchronize()


def write_head(model: Path, folder: Path) -> None:
    """Write the configuration of a model's EAGLE-3 head, for ``load_format="dummy"``."""
    config = json.loads((model / "config.json").read_text())
    entries, layers = min(DRAFT_ENTRIES, config["vocab_size"]), config["num_hidden_layers"]
    read = [2, layers // 2, layers - 3] if layers > 5 else [0, 1, layers]
    config |= {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_hidden_layers": 1}
    config = {name: value for name, value in config.items() if name not in ("layer_types", "use_sliding_window")}
    folder.mkdir()
    config |= {"draft_vocab_size": entries, "eagle_aux_hidden_state_layer_ids": read}
    (folder / "config.json").write_text(json.dumps(config))


def measure(arm: str) -> None:
    engines.prepare()
    from vllm import LLM, SamplingParams

    from verl_rhyme.engine.model_drafter import speculation

    folder = Path(os.environ["GPU_CHECK_FOLDER"])
    settings: dict[str, Any] = {
        "max_model_len": 512,
        "max_num_seqs": max(ROWS),
        "skip_tokenizer_init": True,
        "enable_prefix_caching": False,
        "async_scheduling": False,
        "worker_extension_cls": f"{_MODULE}.Timed",
        "load_format": "dummy",
    }
    if arm != "stock":
        drafting = {"model": str(folder / "eagle3-head"), "weigh_cost": False, "max_tokens": CHAIN}
        settings["speculative_config"] = speculation(drafting["model"], CHAIN) | {
            "draft_load_config": {"load_format": "dummy"}
        }
        rhyme = {"drafting": drafting, "history_dir": str(folder / "history"), "namespace": "model_drafter"}
        settings["additional_config"] = {"rhyme": rhyme}
    llm = LLM(model=str(folder / "model"), **{**settings, **engines.settings(0.6)})
    if arm != "stock":
        llm.collective_rpc("install_sampler")
        llm.collective_rpc("attach_proposer")
        llm.collective_rpc("time_proposer")
    for rows in ROWS:
        prompts = [{"prompt_token_ids": [(row * 7 + i) % 1000 for i in range(64)]} for row in range(rows)]
        engine, seconds = llm.llm_engine, []
        params = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True, detokenize=False)
        for row, prompt in enumerate(prompts):
            engine.add_request(f"{rows}-{row}", prompt, params)
        while engine.get_num_unfinished_requests() == rows:
            began = time.perf_counter()
            engine.step()
            seconds.append(time.perf_counter() - began)
        steps = len(seconds)
        while engine.has_unfinished_requests():
            engine.step()
        row = {"arm": arm, "rows": rows, "step_ms": round(1e3 * median(seconds[WARM_UP:]), 3)}
        if arm != "stock":
            [taken] = llm.collective_rpc("proposer_milliseconds")
            [totals] = llm.collective_rpc("draft_totals")
            row |= {"drafter_ms": round(median(taken[WARM_UP:steps]), 3), "accepted_so_far": totals["accepted"]}
        report(**row)


def main() -> None:
    chosen = parse_arguments()
    if chosen.one:
        measure(chosen.one)
        return
    with tempfile.TemporaryDirectory() as top:
        model = Path(models.described("7B" if device().type == "cuda" else "tiny", Path(top) / "model"))
        write_head(model, Path(top) / "eagle3-head")
        engines.each(_MODULE, {arm: {"GPU_CHECK_FOLDER": top} for arm in ARMS}, report)


if __name__ == "__main__":
    main()
