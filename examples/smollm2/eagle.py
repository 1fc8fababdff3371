"""Train a drafter for SmolLM2 in EAGLE's form, and write it in vLLM's format.

    python -m examples.smollm2.eagle --out DIR/eagle-smollm2      # 20 minutes on two cores

The head has one Llama layer and a projection (EAGLE: Li et al. 2024, arXiv:2401.15077, section 3). From the hidden
state after a token and the embedding of the next one it predicts the hidden state after that one; the policy's output
layer turns it into a token. It learns from responses that the policy samples to tasks of the test split, so no trace of
``benchmarks/traces`` has its prompts. vLLM takes a folder for EAGLE if its path has "eagle-".
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from examples.smollm2 import data, model

#: Few-shot examples of a prompt, and its longest response in tokens: short solutions, and free text.
SETTINGS = ((2, 96), (0, 128))
TEMPERATURE = 0.8
#: Weight of the hidden state's error next to the cross-entropy; noise on the policy's hidden states.
_HIDDEN, _NOISE = 0.5, 0.1
#: Share of the positions, drawn for each batch, that are learnt from: the output layer takes most of the time.
_SHARE = 0.25
#: Texts of a batch, and the learning rate, which rises over so many texts and then falls with time.
_BATCH, _RATE, _RISE = 12, 1e-3, 400


def record(folder: Path, tasks: int, seed: int) -> list[tuple[list[int], int]]:
    """Return texts and lengths of their prompts, in tokens: two responses to each of ``tasks`` prompts per setting."""
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("TORCH_COMPILE_DISABLE", "1")
    from vllm import LLM, SamplingParams

    tokenizer = AutoTokenizer.from_pretrained(folder)
    llm = LLM(model=str(folder), dtype="float32", enforce_eager=True, max_model_len=512, max_num_seqs=32, seed=seed)
    made = data.tasks(seed, "test")
    prompts, options = [], []
    for shots, longest in SETTINGS:
        for _, (kind, task) in zip(range(tasks), made, strict=False):
            chat = tokenizer.apply_chat_template(data.chat(kind, task, shots), add_generation_prompt=True)
            prompts.append({"prompt_token_ids": list(chat["input_ids"] if hasattr(chat, "keys") else chat)})
            options.append(SamplingParams(temperature=TEMPERATURE, max_tokens=longest, n=2))
    outputs = llm.generate(prompts, options, use_tqdm=False)
    return [
        (list(output.prompt_token_ids) + list(response.token_ids), len(output.prompt_token_ids))
        for output in outputs
        for response in output.outputs
    ]


class Head(nn.Module):
    """A projection of [embedding, hidden state] and a Llama layer without an input norm."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.fc = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)
        self.layers = nn.ModuleList([LlamaDecoderLayer(config, 0)])
        self.layers[0].input_layernorm = nn.Identity()

    def forward(self, embedded: torch.Tensor, hidden: torch.Tensor, rotary: Any, mask: torch.Tensor) -> torch.Tensor:
        joined = self.fc(torch.cat([embedded, hidden], dim=-1))
        out = self.layers[0](joined, attention_mask=mask, position_embeddings=rotary)
        return out if isinstance(out, torch.Tensor) else out[0]


def train(folder: Path, texts: list[tuple[list[int], int]], seconds: float) -> Head:
    """Return a head trained on ``texts`` for so many seconds; a tenth of the texts is kept to measure."""
    policy = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa").eval()
    policy.requires_grad_(False)
    head = Head(policy.config)
    nn.init.zeros_(head.layers[0].mlp.down_proj.weight)
    optimizer = torch.optim.AdamW(head.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.01)
    rng = random.Random(0)
    rng.shuffle(texts)
    held, rest = texts[: len(texts) // 10], texts[len(texts) // 10 :]
    began = time.perf_counter()
    states = {id(each): _states(policy, each[0]) for each in texts}
    tokens = sum(len(text) - prompt for text, prompt in texts)
    print(f"{tokens} tokens of responses; hidden states: {time.perf_counter() - began:.0f} s", flush=True)
    began, epoch, seen = time.perf_counter(), 0, 0
    while (elapsed := time.perf_counter() - began) < seconds:
        rng.shuffle(rest)
        for first in range(0, len(rest), _BATCH):
            elapsed = time.perf_counter() - began
            seen += _BATCH
            optimizer.param_groups[0]["lr"] = _RATE * max(0.02, 1 - elapsed / seconds) * min(1, seen / _RISE)
            loss, _, _ = _loss(policy, head, rest[first : first + _BATCH], states, noise=True)
            loss.backward()
            nn.utils.clip_grad_norm_(head.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            if elapsed > seconds:
                break
        epoch += 1
        with torch.no_grad():
            loss, first_hits, second_hits = _loss(policy, head, held, states, noise=False)
        hits = f"{first_hits:.3f} of sampled tokens, {second_hits:.3f} from its own prediction"
        print(f"epoch {epoch}, {elapsed:.0f} s: loss {loss:.3f}; predicts {hits}", flush=True)
    return head


@torch.no_grad()
def _states(policy: Any, text: list[int]) -> torch.Tensor:
    return policy.model(torch.tensor([text])).last_hidden_state[0]


def _loss(
    policy: Any, head: Head, texts: list[tuple[list[int], int]], states: dict[int, torch.Tensor], noise: bool
) -> tuple[torch.Tensor, float, float]:
    """Return the loss, and the shares of sampled tokens that two steps of a draft predict.

    The second step takes the head's own hidden states, as a draft does.
    """
    length = max(len(text) for text, _ in texts)
    tokens = torch.zeros(len(texts), length, dtype=torch.long)
    hidden = torch.zeros(len(texts), length, policy.config.hidden_size)
    wanted = torch.zeros(len(texts), length, dtype=torch.bool)  # positions whose next hidden state samples a response
    for row, each in enumerate(texts):
        text, prompt = each
        tokens[row, : len(text)] = torch.tensor(text)
        hidden[row, : len(text)] = states[id(each)]
        wanted[row, max(0, prompt - 2) : len(text) - 2] = True
    embedded = policy.model.embed_tokens(tokens[:, 1:])
    given = hidden[:, :-1]
    if noise:
        given = given + _NOISE * (2 * torch.rand_like(given) - 1)
    width = length - 1
    rotary = policy.model.rotary_emb(embedded, torch.arange(width)[None])
    mask = torch.full((width, width), float("-inf")).triu(1)[None, None]
    first = head(embedded, given, rotary, mask)
    sampled, wanted = F.pad(tokens[:, 2:], (0, 1)), wanted[:, :-1]
    if noise:
        wanted = wanted & (torch.rand(wanted.shape) < _SHARE)
    loss, hits = _error(policy, first, hidden[:, 1:], sampled, wanted)
    # A draft's second token: the input is the head's prediction for the state before it.
    shifted = torch.cat([given[:, :1], first[:, :-1]], dim=1)
    second = head(embedded, shifted, rotary, mask)
    more, second_hits = _error(policy, second, hidden[:, 1:], sampled, wanted)
    return loss + 0.5 * more, hits, second_hits


def _error(
    policy: Any, made: torch.Tensor, true: torch.Tensor, sampled: torch.Tensor, wanted: torch.Tensor
) -> tuple[torch.Tensor, float]:
    made, true = made[wanted], true[wanted]
    with torch.no_grad():
        target = F.softmax(policy.lm_head(true) / TEMPERATURE, dim=-1)
    logits = policy.lm_head(made)
    hits = (logits.argmax(-1) == sampled[wanted]).float().mean().item()
    cross = -(target * F.log_softmax(logits / TEMPERATURE, dim=-1)).sum(-1).mean()
    return cross + _HIDDEN * F.smooth_l1_loss(made, true), hits


def write(head: Head, folder: Path, out: Path) -> None:
    """Write the head as vLLM's ``llama_eagle`` reads it; embedding and output layer are the policy's."""
    out.mkdir(parents=True, exist_ok=True)
    config = json.loads((folder / "config.json").read_text())
    config |= {"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 1}
    (out / "config.json").write_text(json.dumps(config))
    weights = {name: value.detach().to(torch.bfloat16).contiguous() for name, value in head.state_dict().items()}
    save_file(weights, out / "model.safetensors")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help='folder to write to; its path has "eagle-"')
    parser.add_argument("--tasks", type=int, default=160, help="prompts per setting")
    parser.add_argument("--seconds", type=float, default=600, help="time to train")
    parser.add_argument("--seed", type=int, default=7)
    args = parser.parse_args()
    if "eagle-" not in str(args.out):
        parser.error('--out needs "eagle-" in its path, by which vLLM knows the format')
    folder, began = model.folder(), time.perf_counter()
    texts = record(folder, args.tasks, args.seed)
    print(f"{len(texts)} responses in {time.perf_counter() - began:.0f} s", flush=True)
    write(train(folder, texts, args.seconds), folder, args.out)
    print(args.out)


if __name__ == "__main__":
    sys.exit(main())
