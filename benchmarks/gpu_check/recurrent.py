"""Compare greedy text of a gated delta net: stock vLLM's, ours without drafts, and vLLM's with occasional drafts.

The model itself gives the most probable token at each position: bf16 moves logits by tenths, a wrong state by units.

Drafts are refused for models with recurrent layers. With vLLM's metadata, a request without drafts reads a stale state
after a step whose drafts were accepted (``verl_rhyme/drafting/recurrent.py``). vLLM's CPU build verifies no drafts of
such models, so only a GPU shows the error in text.
"""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu_check import engines, models
from benchmarks.gpu_check.reporting import device, parse_arguments, report

ARMS: dict[str, dict[str, Any]] = {
    "stock": {},
    "ours, undrafted": {"worker_extension_cls": "verl_rhyme.engine.extension.RhymeWorkerMethods"},
    "drafts of vLLM's ngram": {
        "speculative_config": {
            "method": "ngram",
            "num_speculative_tokens": 4,
            "prompt_lookup_min": 2,
            "prompt_lookup_max": 4,
        }
    },
}
ENTRIES, ROWS, TOKENS = 32, 16, 128
PROMPTS = [[(row + i * i) % ENTRIES for i in range(24)] * 2 for row in range(ROWS)]


def generate(arm: str) -> None:
    """Generate with one engine into a file of its folder."""
    engines.prepare()
    from vllm import LLM, SamplingParams

    folder = Path(os.environ["GPU_CHECK_FOLDER"])
    settings = {
        "dtype": "bfloat16",
        "mamba_ssm_cache_dtype": "float32",
        "max_model_len": 512,
        "max_num_seqs": ROWS,
        "skip_tokenizer_init": True,
    }
    llm = LLM(model=str(folder / "model"), **{**settings, **engines.settings(0.3), "load_format": "auto", **ARMS[arm]})
    if arm.startswith("ours"):
        assert llm.collective_rpc("install_sampler") == [""]
    params = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True, detokenize=False)
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], params, use_tqdm=False)
    (folder / f"{arm}.json").write_text(json.dumps([list(output.outputs[0].token_ids) for output in outputs]))


def behind(model: Any, texts: list[list[int]]) -> torch.Tensor:
    """Return float32 [rows, tokens]: the highest logit minus the logit of the text's token."""
    rows = torch.tensor([prompt + text for prompt, text in zip(PROMPTS, texts, strict=True)], device=model.device)
    with torch.no_grad():
        logits = model(rows).logits[:, len(PROMPTS[0]) - 1 : -1].float()
    generated = rows[:, len(PROMPTS[0]) :, None]
    return (logits.max(-1).values - logits.gather(-1, generated)[..., 0]).cpu()


def main() -> None:
    chosen = parse_arguments()
    if chosen.one:
        generate(chosen.one)
        return
    from transformers import AutoModelForCausalLM

    with tempfile.TemporaryDirectory() as top:
        path = models.delta_net(Path(top) / "model", ENTRIES)
        engines.each("benchmarks.gpu_check.recurrent", {arm: {"GPU_CHECK_FOLDER": top} for arm in ARMS}, report)
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).to(device())
        for arm in ARMS:
            if (file := Path(top) / f"{arm}.json").exists():
                gaps = behind(model, json.loads(file.read_text()))
                far = int((gaps > 1).any(1).sum())
                report(arm=arm, rows=ROWS, tokens=TOKENS, most_behind=round(float(gaps.max()), 3), rows_over_1=far)


if __name__ == "__main__":
    main()
