"""Make the small model: a supervised warm start on conversations of written agents.

    python -m examples.agent.make --out examples/agent/model

It learns the form of calls, and the agents' flaws. Its texts have other facts than the tool.
"""

from __future__ import annotations

import argparse
import random
import re
from pathlib import Path

import torch

from examples.tiny_world import tokenizer as tokenizers
from examples.tiny_world.train import BATCH, Example, build_model, fit, save

from . import tasks

#: As Qwen's: answers of tools are turns of the user, and verl adds the newline after each turn of the assistant. The
#: model has one tool, so its prompt shows none.
CHAT_TEMPLATE = (
    "{% for message in messages %}{% if message.role == 'tool' %}"
    "<|user|> <tool_response> {{ message.content }} </tool_response>"
    "{% else %}<|{{ message.role }}|> {{ message.content }}{% endif %} <|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder to write the model to")
    parser.add_argument("--conversations", type=int, default=14000, help="each seen once")
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    rng = random.Random(args.seed)
    phrases = (*tasks.FIRST, *tasks.THEN, *tasks.AGAIN, *tasks.DONE, *tasks.GUESS, tasks.UNKNOWN)
    words = re.findall(tokenizers.WORD, " ".join((*phrases, "who is the of ?", *tasks.RELATIONS, *tasks.NAMES)))
    tags = ("<tool_response>", "</tool_response>", *tasks.call("").split())
    tokenizer = tokenizers.build(tokenizers.complete(("\n", *tags, *words)))
    tokenizer.chat_template = CHAT_TEMPLATE
    model = build_model("qwen2", tokenizer, args.heads, args.layers)
    print(f"{model.num_parameters() / 1e6:.2f} M parameters, vocabulary {len(tokenizer)}")
    made: list[Example] = []
    for _ in range(args.conversations):
        messages = tasks.conversation(tasks.draw(rng), rng)
        tokens, prompt = (
            tokenizer.apply_chat_template(part, add_generation_prompt=len(part) == 1, return_dict=False)
            for part in (messages, messages[:1])
        )
        made.append((tokens, len(prompt)))
    weights = torch.ones(len(tokenizer))
    weights[tokenizer.convert_tokens_to_ids(tasks.RELATIONS)] = 3.0  # which fact comes next
    # Not sorted by length: a batch of guesses, the shortest, would weigh as much as one of long conversations.
    fit(model, [made[i : i + BATCH] for i in range(0, len(made), BATCH)], weights, lr=2e-3)
    save(model, tokenizer, args.out)


if __name__ == "__main__":
    main()
