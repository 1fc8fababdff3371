"""Train an EAGLE-3 drafter for SmolLM2, and write it in vLLM's format.

    python -m examples.smollm2.eagle --out DIR/eagle3-smollm2      # half an hour on two cores

From the policy's hidden states after a token and the embedding of the next one, the head predicts the token after that
one (EAGLE-3: Li et al. 2025, arXiv:2503.01840, section 3). It learns from responses that the policy samples to tasks of
the test split, so no trace of ``benchmarks/traces`` has its prompts. vLLM takes a folder for EAGLE-3 if its path has
"eagle3".
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import random
import sys
import time
from collections import Counter
from dataclasses import dataclass
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
#: Layers of the policy whose inputs the head reads, and the tokens it knows, which are the most frequent ones.
LAYERS, TOKENS = (9, 19, 29), 4096
#: Draft tokens to learn.
DEPTH = 3
#: Last tokens of a prompt to learn from; likeliest tokens to learn of each distribution.
_PROMPT, _LIKELY = 32, 32
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
    """EAGLE-3's head: a Llama layer over [embedding, hidden state], and an output layer for ``tokens`` only.

    The hidden state is a projection of the policy's after three of its layers, or the head's own of the token before.
    """

    def __init__(self, policy: Any, tokens: torch.Tensor) -> None:
        super().__init__()
        config = copy.deepcopy(policy.config)
        size = config.hidden_size
        self.fc = nn.Linear(len(LAYERS) * size, size, bias=False)
        self.layers = nn.ModuleList([LlamaDecoderLayer(config, 0)])
        self.layers[0].hidden_norm = type(policy.model.norm)(size, config.rms_norm_eps)
        for name in ("q_proj", "k_proj", "v_proj"):
            given = getattr(self.layers[0].self_attn, name)
            setattr(self.layers[0].self_attn, name, nn.Linear(2 * size, given.out_features, bias=False))
        self.norm = copy.deepcopy(policy.model.norm)
        self.lm_head = nn.Linear(size, len(tokens), bias=False)
        with torch.no_grad():  # it starts as the policy's last layers
            self.fc.weight.normal_(std=0.01)
            self.fc.weight[:, -size:] += torch.eye(size)
            self.lm_head.weight.copy_(policy.lm_head.weight[tokens])
            self.layers[0].mlp.down_proj.weight.zero_()
        self.requires_grad_(True)

    def forward(self, embedded: torch.Tensor, hidden: torch.Tensor, rotary: Any, mask: torch.Tensor) -> torch.Tensor:
        layer = self.layers[0]
        joined = torch.cat([layer.input_layernorm(embedded), layer.hidden_norm(hidden)], dim=-1)
        hidden = hidden + layer.self_attn(joined, position_embeddings=rotary, attention_mask=mask)[0]
        return hidden + layer.mlp(layer.post_attention_layernorm(hidden))


@dataclass
class Text:
    """A text to learn from: the end of a prompt and a response."""

    tokens: torch.Tensor  # int64[n]
    hidden: torch.Tensor  # float32[n, 3 D], of the policy after LAYERS
    begin: int  # first position whose next hidden state samples a token of the response
    likely: torch.Tensor  # int64[n - begin - 2, _LIKELY], likeliest next tokens of those states, in the head's order
    probability: torch.Tensor  # float32 of the same shape; 0 for tokens that the head does not have


@torch.no_grad()
def study(policy: Any, texts: list[tuple[list[int], int]], order: torch.Tensor) -> list[Text]:
    """Return what the policy computes for each text. ``order``: int64[vocabulary], the head's token, or -1."""
    kept: list[torch.Tensor] = []
    for layer in LAYERS:  # vLLM's numbers: the state before this layer
        policy.model.layers[layer].register_forward_pre_hook(lambda _, given, kept=kept: kept.append(given[0][0]))
    studied = []
    for text, prompt in texts:
        kept.clear()
        states = policy.model(torch.tensor([text])).last_hidden_state[0]
        first = max(0, prompt - _PROMPT)
        begin = max(0, prompt - 2 - first)
        probability, likely = F.softmax(policy.lm_head(states[first + begin + 1 : -1]) / TEMPERATURE, -1).topk(_LIKELY)
        likely = order[likely]
        probability = probability * (likely >= 0)
        tokens, hidden = torch.tensor(text[first:]), torch.cat(kept, dim=-1)[first:]
        studied.append(Text(tokens, hidden, begin, likely.clamp(min=0), probability))
    return studied


def train(policy: Any, texts: list[tuple[list[int], int]], seconds: float) -> tuple[Head, torch.Tensor]:
    """Return a head trained on ``texts`` for so many seconds, and its tokens. A tenth of the prompts measures it."""
    rng = random.Random(0)
    prompts = [tuple(text[:prompt]) for text, prompt in texts]
    measured = set(rng.sample(sorted(set(prompts)), len(set(prompts)) // 10))
    count = Counter(token for text, _ in texts for token in text)
    tokens = torch.tensor(sorted(token for token, _ in count.most_common(TOKENS)))
    order = torch.full((policy.config.vocab_size,), -1)
    order[tokens] = torch.arange(len(tokens))
    began = time.perf_counter()
    studied = study(policy, texts, order)
    sampled = sum(len(each.likely) for each in studied)
    print(f"{sampled} tokens of responses; hidden states: {time.perf_counter() - began:.0f} s", flush=True)
    held, rest = (
        [each for each, prompt in zip(studied, prompts, strict=True) if (prompt in measured) == holds]
        for holds in (True, False)
    )
    head = Head(policy, tokens)
    optimizer = torch.optim.AdamW(head.parameters(), lr=_RATE, betas=(0.9, 0.95), weight_decay=0.01)
    began, epoch, seen = time.perf_counter(), 0, 0
    while (elapsed := time.perf_counter() - began) < seconds:
        rng.shuffle(rest)
        for first in range(0, len(rest), _BATCH):
            elapsed = time.perf_counter() - began
            seen += _BATCH
            optimizer.param_groups[0]["lr"] = _RATE * max(0.02, 1 - elapsed / seconds) * min(1, seen / _RISE)
            loss, _ = _loss(policy, head, rest[first : first + _BATCH])
            loss.backward()
            nn.utils.clip_grad_norm_(head.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            if elapsed > seconds:
                break
        epoch += 1
        with torch.no_grad():
            loss, hits = _loss(policy, head, held)
        print(f"epoch {epoch}, {elapsed:.0f} s: loss {loss:.3f}; accepted: {hits}", flush=True)
    return head, tokens


def _loss(policy: Any, head: Head, texts: list[Text]) -> tuple[torch.Tensor, list[float]]:
    """Return the loss, and the probability of each of a draft's tokens, if those before were right.

    Later tokens take the head's own hidden states ("training-time test"), here for all tokens before them, too; a draft
    has the policy's for those before the draft, so figures of later tokens are approximate.
    """
    length = max(len(text.tokens) for text in texts)
    tokens = torch.zeros(len(texts), length, dtype=torch.long)
    hidden = torch.zeros(len(texts), length, texts[0].hidden.shape[1])
    wanted = torch.zeros(len(texts), length - 1, dtype=torch.bool)
    for row, text in enumerate(texts):
        tokens[row, : len(text.tokens)] = text.tokens
        hidden[row, : len(text.tokens)] = text.hidden
        wanted[row, text.begin : text.begin + len(text.likely)] = True
    likely, probability = (torch.cat([getattr(t, name) for t in texts]) for name in ("likely", "probability"))
    embedded, given = policy.model.embed_tokens(tokens[:, 1:]), head.fc(hidden[:, :-1])
    rotary = policy.model.rotary_emb(embedded, torch.arange(length - 1)[None])
    mask = torch.full((length - 1, length - 1), float("-inf")).triu(1)[None, None]
    loss, hits = torch.zeros(()), []
    for depth in range(DEPTH):
        made = head(embedded, given, rotary, mask)
        logits = head.lm_head(head.norm(made[wanted]))
        right = (likely == logits.argmax(-1, keepdim=True)) * probability
        hits.append(round(right.sum(-1).mean().item(), 3))
        logs = F.log_softmax(logits / TEMPERATURE, dim=-1).gather(-1, likely)
        loss = loss - 0.8**depth * (probability * logs).sum(-1).mean()
        given = torch.cat([given[:, :1], made[:, :-1]], dim=1)
    return loss, hits


def write(head: Head, tokens: torch.Tensor, folder: Path, out: Path) -> None:
    """Write the head as vLLM's ``llama_eagle3`` reads it; the embedding is the policy's."""
    out.mkdir(parents=True, exist_ok=True)
    config = json.loads((folder / "config.json").read_text())
    config |= {"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 1, "tie_word_embeddings": False}
    config |= {"draft_vocab_size": len(tokens), "eagle_aux_hidden_state_layer_ids": list(LAYERS)}
    (out / "config.json").write_text(json.dumps(config))
    weights = {name: value.detach().to(torch.bfloat16).contiguous() for name, value in head.state_dict().items()}
    weights["d2t"] = tokens - torch.arange(len(tokens))
    save_file(weights, out / "model.safetensors")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help='folder to write to; its path has "eagle3"')
    parser.add_argument("--tasks", type=int, default=160, help="prompts per setting")
    parser.add_argument("--seconds", type=float, default=600, help="time to train")
    parser.add_argument("--seed", type=int, default=7)
    args = parser.parse_args()
    if "eagle3" not in str(args.out):
        parser.error('--out needs "eagle3" in its path, by which vLLM knows the format')
    folder, began = model.folder(), time.perf_counter()
    texts = record(folder, args.tasks, args.seed)
    print(f"{len(texts)} responses in {time.perf_counter() - began:.0f} s", flush=True)
    policy = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa").eval()
    write(*train(policy.requires_grad_(False), texts, args.seconds), folder, args.out)
    print(args.out)


if __name__ == "__main__":
    sys.exit(main())
