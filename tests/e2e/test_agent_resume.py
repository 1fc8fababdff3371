"""An agent's training run is killed between two checkpoints while its samples call tools, and resumed."""

import json
import time
from collections import Counter
from itertools import groupby

import pytest
import whole_run
from test_agent_training import BATCH, LIMIT, PROMPTS, SAMPLES, SMALL, attempt_of, sample_of

from tests.conftest import ONLY_SLOW

pytestmark = [ONLY_SLOW, pytest.mark.timeout(1800), pytest.mark.whole_run]
#: Step of the checkpoint after which the run is killed, and how long after.
SAVED, LATER_S = 1, 2.0
#: Longest response for which a whole answer of the tool surely had room.
WHOLE = LIMIT - 24


def start(folder):
    settings = {"MODEL": "agent", "PROMPTS": str(PROMPTS), "RHYME": "full", "STALENESS": "1", "MODE": "separate_async"}
    settings["SEARCH_TAKES_S"] = "4"  # a checkpoint comes some ten seconds after the samples of its batch
    return whole_run.start(folder, *SMALL, epochs=1, **settings, **whole_run.steady("60", "watched_agent"))


def lines(folder, name):
    file = folder / f"{name}.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def answers_in(row):
    """Number of the tool's answers in a trained response."""
    return sum(not policy for policy, _ in groupby(row["response_mask"]))


def test_a_resumed_run_calls_no_tool_again_whose_answer_was_stored(tmp_path):
    process = start(tmp_path)
    whole_run.wait_for_step(process, tmp_path, SAVED)
    time.sleep(LATER_S)
    whole_run.kill_all(process)
    names = ("trained", "calls", "answers", "stored", "inherited")
    first = {name: lines(tmp_path, name) for name in names}
    checkpoints = tmp_path / "checkpoints"
    assert (checkpoints / "latest_checkpointed_iteration.txt").read_text() == str(SAVED)
    whole_run.finish(start(tmp_path), tmp_path)
    second = {name: lines(tmp_path, name)[len(first[name]) :] for name in names}

    trained = [row for row in first["trained"] if row["step"] <= SAVED] + second["trained"]
    of = {sample_of(attempt_of(row))[0]: row for row in trained}
    assert len(trained) == len(of) == PROMPTS * SAMPLES, "a sample was trained twice, or is lost"
    steps = Counter(row["step"] for row in trained)
    assert steps == dict.fromkeys(range(1, PROMPTS // BATCH + 1), BATCH * SAMPLES)

    before, again = (Counter(sample_of(row["attempt"])[0] for row in life["calls"]) for life in (first, second))
    kept = {}  # by sample: number of answers with which its first attempt after the resume began
    for row in second["inherited"]:
        kept.setdefault(sample_of(row["attempt"])[0], row["answers"])
    ended = (checkpoints / f"global_step_{SAVED}" / "actor" / "prompts_in_flight.json").stat().st_mtime
    begun = min(row["at"] for row in first["stored"])
    least, most = (
        Counter(sample_of(row["attempt"])[0] for row in first["answers"] if row["at"] < end) for end in (begun, ended)
    )
    whole = {sample: row for sample, row in of.items() if len(row["responses"]) < WHOLE}
    assert len(whole) > 0.9 * len(of)
    for sample, row in whole.items():
        if row["step"] <= SAVED:
            assert (before[sample], again[sample]) == (answers_in(row), 0)
        elif sample not in kept and not again[sample]:  # it had finished at the checkpoint, or called no tool
            assert most[sample] == answers_in(row)
        else:
            assert kept.get(sample, 0) + again[sample] == answers_in(row), "a call with a stored answer was repeated"
            assert least[sample] <= kept.get(sample, 0) <= most[sample], "an answer from before the checkpoint is lost"
    replayed = {sample: kept[sample] for sample in whole if kept.get(sample)}
    print(f"{sum(replayed.values())} answers of {len(replayed)} samples, {before.total()} and {again.total()} calls")
    assert replayed, "no sample was between two turns at the checkpoint: the test sees nothing"
    assert before.total() > most.total(), "no call came after the checkpoint"
