"""What stands in a history: sizes, prompts, visits, rewards, and how much of it rhymes."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lmdb
import numpy as np

from verl_rhyme.history import environment, suffix_index
from verl_rhyme.history.record import CorruptRecord, PromptHistory

#: Tokens that must agree before a token counts as foreseen.
MATCH = 4
#: Prompts whose texts are compared; the others are only counted.
_COMPARED = 64


@dataclass
class Inspection:
    """One store or snapshot.

    Attributes:
        folder: Where it lies.
        namespace: Fingerprint of the vocabulary.
        bytes: Of its file.
        prompts, responses, tokens: Kept.
        corrupt: Prompts whose value is damaged.
        visits: Responses, tokens and mean reward of the prompts' latest visits (0), the visits before (1), and so on.
            Rewards that are not finite are left out of the mean; ``None`` where none is.
        reusable: Share of the latest visit's tokens that followed the same :data:`MATCH` tokens in an older response to
            the same prompt; ``None`` with a single visit.
    """

    folder: str
    namespace: str
    bytes: int
    prompts: int = 0
    responses: int = 0
    tokens: int = 0
    corrupt: int = 0
    visits: dict[int, dict[str, Any]] = field(default_factory=dict)
    reusable: float | None = None


def find(path: Path) -> Iterator[Path]:
    """Environments below a history folder, a checkpoint or a snapshot, by the numbers in their names; damaged ones set
    aside are left out.

    Raises:
        FileNotFoundError: There is none.
    """
    current = environment.current(path)
    if current is not None:
        yield current
        return
    found = [file.parent for file in path.rglob(environment.DATA_FILE) if "corrupt-" not in str(file.parent)]
    found.sort(key=lambda folder: re.sub("[0-9]+", lambda number: number[0].zfill(20), str(folder)))
    if not found:
        raise FileNotFoundError(f"{path} holds no history; give a history folder, or a checkpoint's global_step_N")
    yield from found


def inspect(folder: Path) -> Inspection:
    """Read one environment; a running writer is not disturbed.

    Raises:
        environment.Damaged: It is not sound.
    """
    rewards: dict[int, list[float]] = {}
    foreseen = compared = 0
    with _opened(folder) as (env, prompts, namespace):
        result = Inspection(str(folder), namespace, (folder / environment.DATA_FILE).stat().st_size)
        with env.begin(db=prompts, buffers=True) as txn:
            for _, value in txn.cursor():
                try:
                    history = PromptHistory.decode(bytearray(value))
                except CorruptRecord:
                    result.corrupt += 1
                    continue
                if result.prompts < _COMPARED:
                    seen, tokens = reusable(history)
                    foreseen, compared = foreseen + seen, compared + tokens
                result.prompts += 1
                result.responses += len(history)
                lengths = history.lengths
                result.tokens += int(lengths.sum())
                age = {visit: n for n, visit in enumerate(dict.fromkeys(reversed(history.visit.tolist())))}
                for visit, length, reward in zip(history.visit.tolist(), lengths.tolist(), history.reward, strict=True):
                    row = result.visits.setdefault(age[visit], {"responses": 0, "tokens": 0})
                    row["responses"] += 1
                    row["tokens"] += length
                    rewards.setdefault(age[visit], []).append(float(reward))
    for number, values in rewards.items():
        finite = [value for value in values if np.isfinite(value)]
        result.visits[number]["reward_mean"] = float(np.mean(finite)) if finite else None
    result.visits = dict(sorted(result.visits.items()))
    if compared:
        result.reusable = foreseen / compared
    return result


def lengths(folder: Path) -> dict[bytes, np.ndarray]:
    """Of each prompt, by its key, the tokens of its responses, oldest first: int32[m]; damaged ones are left out.

    Raises:
        environment.Damaged: The environment is not sound.
    """
    found: dict[bytes, np.ndarray] = {}
    with _opened(folder) as (env, prompts, _), env.begin(db=prompts, buffers=True) as txn:
        for key, value in txn.cursor():
            with contextlib.suppress(CorruptRecord):
                found[bytes(key)] = PromptHistory.decode(bytearray(value)).lengths
    return found


@contextlib.contextmanager
def _opened(folder: Path) -> Iterator[tuple[lmdb.Environment, Any, str]]:
    """A store's or snapshot's environment, its prompts and their namespace."""
    if (folder / "lock.mdb").exists():
        opened = environment.acquire(folder)
        try:
            yield opened.env, opened.prompts, opened.namespace()
        finally:
            environment.release(opened)
        return
    environment.check(folder)
    namespace = str(json.loads((folder / "meta.json").read_text())["namespace"])
    env = lmdb.open(str(folder), readonly=True, lock=False, max_dbs=3)
    try:
        yield env, env.open_db(b"prompts", create=False), namespace
    finally:
        env.close()


def reusable(history: PromptHistory) -> tuple[int, int]:
    """Tokens of the latest visit that older ones foresaw, and tokens looked at; see :class:`Inspection`."""
    if len(history) == 0:
        return 0, 0
    newest = int(history.visit[-1])
    older = [history.response(i) for i in range(len(history)) if history.visit[i] != newest]
    if not older:
        return 0, 0
    text, _ = suffix_index.join(older)
    index = _Text(text, suffix_index.build(text))
    foreseen = looked_at = 0
    for i in range(len(history)):
        if history.visit[i] != newest:
            continue
        response = history.response(i)
        for t in range(MATCH, len(response)):
            length, low, high = suffix_index.longest_match(index, response[t - MATCH : t], MATCH)
            foreseen += length == MATCH and bool((text[index.suffixes[low:high] + 1] == response[t]).any())
        looked_at += max(0, len(response) - MATCH)
    return foreseen, looked_at


@dataclass(frozen=True)
class _Text:
    tokens: np.ndarray
    suffixes: np.ndarray
