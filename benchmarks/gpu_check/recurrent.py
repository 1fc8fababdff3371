"""Compare greedy text of a gated delta net: stock vLLM's, ours with drafts, and with drafts of vLLM's ngram.

The model itself gives the most probable token at each position: bf16 moves logits by tenths, a wrong state by units.
The history has each prompt's text with wrong tokens in it, so that drafts are accepted in part, and not in each step.
The patches of ``verl_rhyme/drafting/recurrent.py`` hold for vLLM's ngram, too; but a request that sits out a step
goes on rightly in our engines alone.
"""

from __future__ import annotations

import importlib.util
import json
import os
import tempfile
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu_check import engines, models
from benchmarks.gpu_check.reporting import device, parse_arguments, report

OURS = "ours, drafted"
#: The first one's text makes the history of the second.
ARMS: dict[str, dict[str, Any]] = {
    "stock": {},
    OURS: {},
    "ngram": {
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


def drafting(folder: Path) -> dict[str, Any]:
    """Return vLLM's options for drafts, and write the history."""
    import numpy as np

    from verl_rhyme.drafting.recurrent import MAX_TOKENS
    from verl_rhyme.history.keys import prompt_key
    from verl_rhyme.history.record import Trajectory
    from verl_rhyme.history.store import HistoryStore

    def wrong(text: list[int]) -> np.ndarray:
        return np.array([(t + 1) % ENTRIES if at % 9 == 5 else t for at, t in enumerate(text)], np.int32)

    texts = json.loads((folder / "stock.json").read_text())
    with HistoryStore(folder / "history", "recurrent", max_bytes=1 << 24, epochs=1) as store:
        store.append(
            [Trajectory(prompt_key(p), wrong(t), 1.0, 0, 0, 0) for p, t in zip(PROMPTS, texts, strict=True)], 1
        )
    options = {"max_tokens": MAX_TOKENS, "weigh_cost": False, "wait_for_history": True}
    return {
        "worker_extension_cls": "verl_rhyme.engine.extension.RhymeWorkerMethods",
        "speculative_config": {
            "method": "custom_class",
            "model": "verl_rhyme.engine.proposer.HistoryProposer",
            "num_speculative_tokens": MAX_TOKENS,
        },
        "additional_config": {
            "rhyme": {"drafting": options, "history_dir": str(folder / "history"), "namespace": "recurrent"}
        },
    }


def generate(arm: str) -> None:
    """Generate with one engine into a file of its folder."""
    engines.prepare()
    from vllm import LLM, SamplingParams

    folder = Path(os.environ["GPU_CHECK_FOLDER"])
    settings: dict[str, Any] = {
        "dtype": "bfloat16",
        "mamba_ssm_cache_dtype": "float32",
        "max_model_len": 512,
        "max_num_seqs": ROWS,
        "skip_tokenizer_init": True,
        "enable_prefix_caching": False,
    }
    if device().type == "cuda" and importlib.util.find_spec("flashinfer") is None:
        settings["gdn_prefill_backend"] = "triton"  # on Hopper vLLM takes flashinfer's unasked
    chosen = drafting(folder) if arm == OURS else ARMS[arm]
    llm = LLM(model=str(folder / "model"), **{**settings, **engines.settings(0.3), "load_format": "auto", **chosen})
    if arm == OURS:
        assert llm.collective_rpc("install_sampler") == [""]
        assert llm.collective_rpc("attach_proposer") == [True]
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
