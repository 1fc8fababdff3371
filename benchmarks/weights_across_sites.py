"""Measure weight transfer over a slow link: time by encoding, and the cost of a cut.

    python -m benchmarks.weights_across_sites [--json] [--quick] [--megabytes 64]

``coding``: real weight updates in bf16, from the tiny world's Qwen2 after optimizer steps on its own responses. It
measures the relay's encodings (``delta``; ``packed`` without a previous version) and alternatives: positions and values
(the form of verl's delta engine, with and without zstandard), exclusive or of all words, zlib, and FSDP's float32
numbers. Ratios and seconds are per byte of bf16; seconds are of one core. ``checksum``: xxh3, likewise.
``transfer``: the same numbers through the product's sender and receiver in two network namespaces (``far_link.py``;
needs root), over a link with a bandwidth limit and 10 ms delay. ``cut``: the link is cut for two seconds in the middle
of an unpacked version.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import pyarrow as pa
import torch
import typer
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks import far_link
from benchmarks.far_link import TcpSource, Wire, sender, two_sites
from benchmarks.machine import print_row
from examples.tiny_world import puzzles
from examples.tiny_world.reward import compute_score
from examples.tiny_world.sampling import encode_prompt, sample
from verl_rhyme.weights.claims import claim
from verl_rhyme.weights.coding import decode, encode
from verl_rhyme.weights.folder import Folder
from verl_rhyme.weights.receiving import Receiver, newest_base
from verl_rhyme.weights.transfer import Chunk, digest, identity
from verl_rhyme.weights.writer import Writer

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, help=__doc__)

#: AdamW's learning rates: of the recipes for large models, ten times that, of the tiny world's recipe.
LEARNING_RATES = (1e-6, 1e-5, 3e-4)
STEPS, RESPONSES_A_STEP = 8, 4
MODEL = Path(__file__).parents[1] / "examples/tiny_world/models/qwen2"
GROUP, LONGEST = 8, 384
MBIT = 1e6
#: Replicas at the far site; without the relay each would fetch a copy.
REPLICAS = 8
PORT, CHUNK_BYTES, PART_BYTES = 9000, 1 << 20, 16 << 20
DELAY_S, CUT_S = 0.01, 2.0


# ---- real weight updates ----


def responses(prompts: int, seed: int) -> tuple[Any, list[list[int]], list[list[int]], np.ndarray]:
    """Return the model, prompts and responses of complete groups, and each response's GRPO advantage."""
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    chosen = [p for p in islice(puzzles.generate(seed, "train"), 4 * prompts) if len(p.names) <= 3][:prompts]
    encoded = [encode_prompt(tokenizer, puzzle.text()) for puzzle in chosen for _ in range(GROUP)]
    drawn = sample(model, tokenizer, encoded, seed=seed, max_tokens=LONGEST)
    truths = [puzzles.describe(puzzles.solutions(puzzle)[0], puzzle.names) for puzzle in chosen]
    scores = np.array([compute_score(None, r.text, truths[i // GROUP])["score"] for i, r in enumerate(drawn)])
    groups = scores.reshape(-1, GROUP)
    advantages = (groups - groups.mean(1, keepdims=True)) / (groups.std(1, ddof=1, keepdims=True) + 1e-6)
    return model, encoded, [r.tokens for r in drawn], advantages.ravel()


def updates(steps: int = STEPS) -> tuple[dict[float, list[np.ndarray]], dict[float, list[np.ndarray]]]:
    """Return the policy before and after each optimizer step, by learning rate.

    Returns:
        uint16 [parameters] in bf16 of all versions, and float32 [parameters] of the trained policy for the last two.

    The optimizer's float32 parameters start anywhere in the rounding interval of their bf16 numbers, as after many
    steps. If they started at the bf16 numbers, as in a run's first steps, hardly any bf16 number would change.
    """
    model, prompts, texts, advantages = responses(4, 0)
    start = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    versions, held = {}, {}
    for rate in LEARNING_RATES:
        model.load_state_dict(start)
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for parameter in model.parameters():
                spacing = (parameter.abs().clamp_min(1e-30).log2().floor() - 7).exp2()
                parameter.add_((torch.rand(parameter.shape, generator=generator) - 0.5) * spacing)
        optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
        versions[rate], held[rate] = [words(model)], [floats(model)]
        for step in range(steps):
            optimizer.zero_grad()
            for n in range(RESPONSES_A_STEP):
                row = (step * RESPONSES_A_STEP + n) % len(prompts)
                log_probs = model(torch.tensor([prompts[row] + texts[row]])).logits[0, len(prompts[row]) - 1 : -1]
                chosen = log_probs.log_softmax(-1).gather(1, torch.tensor(texts[row])[:, None])
                weight = advantages[row] if abs(advantages[row]) > 1e-3 else 0.3  # for a group with equal rewards
                (-weight * chosen.mean()).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            versions[rate].append(words(model))
            held[rate] = [held[rate][-1], floats(model)]
    return versions, held


def floats(model: Any) -> np.ndarray:
    return np.concatenate([p.detach().numpy().ravel() for p in model.parameters()])


def words(model: Any) -> np.ndarray:
    parts = [p.detach().to(torch.bfloat16).view(torch.int16).numpy().ravel() for p in model.parameters()]
    return np.concatenate(parts).view(np.uint16)


# ---- coding ----


def raw(words: np.ndarray) -> np.ndarray:
    return words.view(np.uint8)


def positions(old: np.ndarray, new: np.ndarray) -> bytes:
    places = np.flatnonzero(old != new).astype("<u4")
    return places.tobytes() + new[places].tobytes()


_ZSTD = pa.Codec("zstd", compression_level=1)
WAYS: dict[str, Callable[[np.ndarray, np.ndarray], Any]] = {
    "packed": lambda old, new: encode(raw(new)),
    "delta": lambda old, new: encode(raw(new), raw(old)),
    "positions_and_values": positions,
    "positions_and_values, zstd": lambda old, new: _ZSTD.compress(positions(old, new), asbytes=True),
    "exclusive_or, zstd": lambda old, new: _ZSTD.compress((old ^ new).tobytes(), asbytes=True),
    "exclusive_or, zlib": lambda old, new: zlib.compress((old ^ new).tobytes(), 1),
}


def coding(
    versions: dict[float, list[np.ndarray]], held: dict[float, list[np.ndarray]], repeats: int
) -> Iterator[dict[str, Any]]:
    some = np.random.default_rng(0).integers(0, 256, 16 << 20, dtype=np.uint8)
    _, seconds = timed(partial(digest, some.data), repeats)
    yield {"part": "checksum", "code_s_per_gb": round(seconds / some.nbytes * 1e9, 3)}
    for rate, seen in versions.items():
        old, new = seen[-2:]
        wide = {"delta of float32": lambda _, __, wide=held[rate]: encode(raw(wide[1]), raw(wide[0]))}
        for way, code in {**WAYS, **wide}.items():
            coded, seconds = timed(partial(code, old, new), repeats)
            row: dict[str, Any] = {
                "part": "coding",
                "learning_rate": rate,
                "changed": round(float((old != new).mean()), 4),
                "way": way,
                "ratio": round(new.nbytes / len(coded), 1),
                "code_s_per_gb": round(seconds / new.nbytes * 1e9, 2),
            }
            if way in ("packed", "delta"):
                made, seconds = timed(partial(decode, coded, new.nbytes, raw(old)), repeats)
                assert np.array_equal(made.view(np.uint16), new)
                row["decode_s_per_gb"] = round(seconds / new.nbytes * 1e9, 2)
            yield row


def timed(work: Callable[[], Any], repeats: int) -> tuple[Any, float]:
    """Return the result of ``work``, and the minimum CPU seconds over the repeats."""
    least = float("inf")
    for _ in range(repeats):
        began = time.process_time()
        made = work()
        least = min(least, time.process_time() - began)
    return made, least


# ---- over a link ----


def tiled(versions: list[np.ndarray], megabytes: float) -> list[dict[str, torch.Tensor]]:
    """Return the last two versions repeated to the requested size, each repeat in another order, so that no compressor
    finds the repetition.
    """
    count = max(1, round(megabytes * 1e6 / versions[0].nbytes))
    orders = [np.random.default_rng(n).permutation(len(versions[0])) for n in range(count)]
    return [
        {f"tile.{n}": torch.from_numpy(raw(each[order])).view(torch.bfloat16) for n, order in enumerate(orders)}
        for each in versions[-2:]
    ]


def write(folder: Folder, version: int, weights: dict[str, torch.Tensor]) -> int:
    """Write a version and return its size in bytes."""
    writer = Writer(folder, version, PART_BYTES, CHUNK_BYTES)
    for name, tensor in weights.items():
        writer.add(name, tensor)
    writer.close()
    return sum(part.bytes for part in folder.parts(version))


async def transfers(models: list[dict[str, torch.Tensor]], mbit: float, root: Path) -> list[dict[str, Any]]:
    there, rows = claim(root / f"there{mbit}"), []
    sizes = [write(there, version, weights) for version, weights in enumerate(models, 1)]
    with two_sites(mbit * MBIT) as (name, host), sender(name, there, host, PORT):
        wire = Wire(host, PORT, delay_s=DELAY_S)
        async with wire.running():
            for way, version in (("plain", 1), ("packed", 1), ("delta", 2)):
                here = claim(root / f"{way}{mbit}")
                if way == "delta":
                    write(here, 1, models[0])
                wire.bytes, began = 0, time.perf_counter()
                await fetch(here, there, version, wire, way != "plain")
                rows.append(
                    {
                        "part": "transfer",
                        "way": way,
                        "link_mbit_per_s": mbit,
                        "megabytes": round(sizes[version - 1] / 1e6, 1),
                        "slow_link_megabytes": round(wire.bytes / 1e6, 3),
                        "of_a_copy_for_each_replica": round(wire.bytes / sizes[version - 1] / REPLICAS, 5),
                        "replicas": REPLICAS,
                        "seconds": round(time.perf_counter() - began, 2),
                    }
                )
    return rows


async def cut(models: list[dict[str, torch.Tensor]], mbit: float, root: Path) -> dict[str, Any]:
    there, here = claim(root / "cut_there"), claim(root / "cut_here")
    size = write(there, 1, models[0])
    came: list[float] = []
    with two_sites(mbit * MBIT) as (name, host), sender(name, there, host, PORT):
        wire = Wire(host, PORT, delay_s=DELAY_S)
        async with wire.running():
            fetching = asyncio.create_task(fetch(here, there, 1, wire, False, came))
            while wire.bytes < size / 2:
                await asyncio.sleep(0.01)
            wire.cut()
            await asyncio.sleep(CUT_S)
            wire.mend()
            mended = time.perf_counter()
            await fetching
    assert identity(here.parts(1)) == identity(there.parts(1))
    return {
        "part": "cut",
        "link_mbit_per_s": mbit,
        "megabytes": round(size / 1e6, 1),
        "cut_s": CUT_S,
        "first_chunk_after_s": round(min(when for when in came if when > mended) - mended, 2),
        "sent_again_megabytes": round((wire.bytes - size) / 1e6, 2),
    }


async def fetch(
    here: Folder, there: Folder, version: int, wire: Wire, pack: bool, came: list[float] | None = None
) -> None:
    async def kept(chunk: Chunk) -> None:
        if came is not None:
            came.append(time.perf_counter())

    source, parts = TcpSource("127.0.0.1", wire.at), there.parts(version)
    receiver = Receiver(here, version, parts, kept)
    await receiver.fetch(source, newest_base(here, version), pack)


@app.command()
def main(
    as_json: Annotated[bool, typer.Option("--json", help="one JSON object per line")] = False,
    quick: Annotated[bool, typer.Option(help="few megabytes, one bandwidth")] = False,
    megabytes: Annotated[float, typer.Option(help="megabytes that cross the link")] = 64.0,
) -> None:
    """Measure each part and print its rows."""

    def show(row: dict[str, Any]) -> None:
        print_row({"benchmark": "weights_across_sites", **row}, as_json)

    versions, held = updates(3 if quick else STEPS)
    for row in coding(versions, held, 3 if quick else 15):
        show(row)
    if why := far_link.missing():
        raise typer.Exit(typer.echo(f"skipping the link: it {why}", err=True))
    models = tiled(versions[LEARNING_RATES[0]], 8 if quick else megabytes)
    with tempfile.TemporaryDirectory(dir="/dev/shm") as root:
        for mbit in (400,) if quick else (100, 1000):
            for row in asyncio.run(transfers(models, mbit, Path(root))):
                show(row)
        show(asyncio.run(cut(models, 100, Path(root))))


if __name__ == "__main__":
    app()
