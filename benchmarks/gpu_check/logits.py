"""Check whether a row's logits depend on the batch shape: bf16 kernels sum in another order for other shapes.

Some texts are decoded token by token with KV cache in batches of 1, 33 and 256 rows, and once more alone. At each
position the check compares the row's logits, the most probable token, and the token drawn with the noise of key and
position (as coupled sampling draws).
"""

from __future__ import annotations

import torch

from benchmarks.gpu_check import philox
from benchmarks.gpu_check.models import config, made
from benchmarks.gpu_check.reporting import device, quick, report

#: Number of compared texts, and their prompt tokens.
TEXTS, PROMPT = 8, 32


@torch.no_grad()
def decoded(model: object, tokens: torch.Tensor, rows: int) -> torch.Tensor:
    """Return bf16 [texts, steps, V] of the first rows in a batch of ``rows`` (1: each text alone).

    Args:
        model: Model of transformers.
        tokens: int64 [at least rows, PROMPT + steps].
        rows: Batch size.
    """
    if rows == 1:
        return torch.cat([_batch(model, tokens[i : i + 1]) for i in range(TEXTS)])
    return _batch(model, tokens[:rows])


def _batch(model: object, tokens: torch.Tensor) -> torch.Tensor:
    kept = min(TEXTS, len(tokens))
    out = model(input_ids=tokens[:, :PROMPT], use_cache=True, logits_to_keep=1)  # type: ignore[operator]
    logits = []
    for at in range(PROMPT, tokens.shape[1]):
        out = model(input_ids=tokens[:, at : at + 1], past_key_values=out.past_key_values, use_cache=True)  # type: ignore[operator]
        logits.append(out.logits[:kept, -1].clone())
    return torch.stack(logits, dim=1)


def compare(size: str, rows: int, alone: torch.Tensor, among: torch.Tensor) -> None:
    """Compare the logits of a batch with those alone, and print a row."""
    texts, steps, vocabulary = alone.shape
    differs = kept = drawn = 0
    peak = 0.0
    for text in range(texts):
        a, b = alone[text].float(), among[text].float()
        differs += int((a != b).any(-1).sum())
        kept += int((a.argmax(-1) == b.argmax(-1)).sum())
        keys = torch.full((steps,), text, device=a.device)
        noise = philox.gumbel(philox.words(keys, torch.arange(steps, device=a.device), vocabulary)).float()
        drawn += int(((a + noise).argmax(-1) == (b + noise).argmax(-1)).sum())
        peak += float(a.softmax(-1).max(-1).values.sum())
    count = texts * steps
    report(
        model=size,
        rows=rows,
        positions=count,
        any_logit_differs=round(differs / count, 4),
        argmax_differs=round(1 - kept / count, 4),
        draw_differs=round(1 - drawn / count, 4),
        largest_difference=round(float((alone.float() - among.float()).abs().max()), 4),
        likeliest_has=round(peak / count, 3),
    )


def main() -> None:
    at = device()
    sizes, widths, steps = (["tiny"], (33,), 4) if quick() else (["0.5B", "7B"], (1, 33, 256), 32)
    for size in sizes:
        model = made(size, at)
        generator = torch.Generator().manual_seed(1)
        shape = (max(*widths, TEXTS), PROMPT + steps)
        tokens = torch.randint(config(size).vocab_size, shape, generator=generator).to(at)
        alone = decoded(model, tokens, 1)
        for rows in widths:
            compare(size, rows, alone, decoded(model, tokens, rows))
        del model


if __name__ == "__main__":
    main()
