"""Greedy text of a gated delta net: vLLM's, ours without drafts, and vLLM's with drafts that come and go.

Drafts for models with recurrent layers are refused: by vLLM's metadata a request without drafts reads a stale state
after a step whose drafts were accepted (``tests/contract/test_recurrent_states.py``). Its CPU build verifies no drafts
of such models, so that only a GPU can show it on text.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.gpu_check import engines, models
from benchmarks.gpu_check.telling import asked, tell

ARMS: dict[str, dict[str, Any]] = {
    "stock": {},
    "stock, other batches": {"max_num_seqs": 3},  # how much of the text hangs on the kernels' shapes
    "ours, undrafted": {"worker_extension_cls": "verl_rhyme.workers.vllm.extension.RhymeWorkerMethods"},
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


def generate(arm: str, model: str, texts: Path) -> None:
    """Of one engine, into a file."""
    engines.prepare()
    from vllm import LLM, SamplingParams

    settings = {
        "dtype": "bfloat16",
        "mamba_ssm_cache_dtype": "float32",
        "max_model_len": 512,
        "max_num_seqs": ROWS,
        "skip_tokenizer_init": True,
    }
    llm = LLM(model=model, **{**settings, **engines.settings(0.3), "load_format": "auto", **ARMS[arm]})
    if arm.startswith("ours"):
        assert llm.collective_rpc("install_sampler") == [""]
    prompts = [{"prompt_token_ids": [(row + i * i) % ENTRIES for i in range(24)] * 2} for row in range(ROWS)]
    params = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True, detokenize=False)
    said = [list(output.outputs[0].token_ids) for output in llm.generate(prompts, params, use_tqdm=False)]
    (texts / f"{arm}.json").write_text(json.dumps(said))


def main() -> None:
    chosen = asked()
    if chosen.one:
        arm, model, texts = json.loads(chosen.one)
        generate(arm, model, Path(texts))
        return
    with tempfile.TemporaryDirectory() as top:
        model = models.delta_net(Path(top) / "model", ENTRIES)
        runs: dict[str, dict[str, str]] = {json.dumps([arm, model, top]): {} for arm in ARMS}
        engines.each("benchmarks.gpu_check.recurrent", runs, tell)
        texts = {arm: json.loads(file.read_text()) for arm in ARMS if (file := Path(top) / f"{arm}.json").exists()}
    for arm in [arm for arm in texts if arm != "stock" and "stock" in texts]:
        same = sum(ours == theirs for ours, theirs in zip(texts[arm], texts["stock"], strict=True))
        tell(arm=arm, rows=ROWS, tokens=TOKENS, as_stock=same)


if __name__ == "__main__":
    main()
