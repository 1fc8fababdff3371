"""Build a word-level tokenizer for the closed vocabulary of the tiny world."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PretrainedConfig, PreTrainedTokenizerFast

from . import traces
from .puzzles import KIND, NAMES, OPERATORS

END, PAD, UNKNOWN = "<|im_end|>", "<|pad|>", "<|unknown|>"
ROLES = ("<|system|>", "<|user|>", "<|assistant|>")
TAGS = ("<think>", "</think>", "<answer>", "</answer>")
# No text has a line break, but verl needs it as one token: the unknown token.
WORD = r"<[^<>\s]+>|\w+|[^\w\s]|\n"
CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|> {{ message['content'] }} <|im_end|> {% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def vocabulary() -> list[str]:
    """Return every word in fixed order, special tokens first; reserved words fill a multiple of 32."""
    phrases: Iterable[str] = (
        *(*traces.SUPPOSE, *traces.MUSING, *traces.GUESS, *traces.DONE, *traces.SO, *traces.FITS, *traces.OPEN),
        *(*traces.CONTRADICTION, *traces.MARK.values(), *OPERATORS, *KIND.values(), *NAMES),
        f"says: is a not back: {traces.VOID} . , who is who?",
    )
    words = [word for phrase in phrases for word in re.findall(WORD, phrase.replace("{}", ""))]
    return complete(words)


def complete(words: Iterable[str]) -> list[str]:
    """Return a vocabulary of these words, in their order."""
    known = list(dict.fromkeys((PAD, END, UNKNOWN, *ROLES, *TAGS, *words)))
    return known + [f"<|reserved{i}|>" for i in range(-len(known) % 32)]


def build(words: list[str] | None = None) -> PreTrainedTokenizerFast:
    """Return the tokenizer with its chat template; ``decode`` returns text as in puzzles and traces.

    Args:
        words: Vocabulary; default: the tiny world's.
    """
    words = words or vocabulary()
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(WORD), behavior="removed", invert=True)
    # Words are joined by spaces; cleanup removes the space before . , ? ! and Replace the one before a colon.
    tokenizer.decoder = decoders.Sequence([decoders.WordPiece(prefix="##", cleanup=True), decoders.Replace(" :", ":")])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END,
        pad_token=PAD,
        unk_token=UNKNOWN,
        additional_special_tokens=[*ROLES, *(word for word in words if word.startswith("<|reserved"))],
        clean_up_tokenization_spaces=False,
        model_max_length=1024,
        padding_side="left",
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


def save(tokenizer: PreTrainedTokenizerFast, config: PretrainedConfig, out: str | Path) -> None:
    """Write a model folder's tokenizer files and ``config.json``.

    transformers 5 always gives a Qwen2 model a byte-level ``Qwen2Tokenizer``, except if ``tokenizer_config.json`` names
    no class and ``config.json`` does.
    """
    tokenizer.save_pretrained(out)
    path = Path(out) / "tokenizer_config.json"
    settings = json.loads(path.read_text())
    config.tokenizer_class = settings.pop("tokenizer_class")
    path.write_text(json.dumps(settings, indent=2) + "\n")
    config.save_pretrained(out)
