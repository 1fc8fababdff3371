"""The names and definitions that our report shares with verl are still verl's."""

from __future__ import annotations

import re
from fnmatch import fnmatch
from pathlib import Path

import numpy as np
import torch
from verl import DataProto
from verl.trainer.ppo import metric_utils, ray_trainer
from verl.utils import tracking

from verl_rhyme.history.store import HistoryStore
from verl_rhyme.history_writer.history_writer import STORE_COUNTS
from verl_rhyme.observability import batches, steps
from verl_rhyme.observability import metrics as m
from verl_rhyme.observability.events import REQUESTS
from verl_rhyme.observability.progress import LOGGER_VARIABLE, MetricsFollower
from verl_rhyme.scheduling.expectations import Expectations
from verl_rhyme.trainer import balance, layout, pipeline, ranking, recorder, reserve
from verl_rhyme.weights import manager

ROOT = Path(__file__).parents[2]
#: Ours in a table are spelt in full, or as the last part of the name before: `waiting/mean`, `max`.
METRIC_TABLES = ("docs/metrics.md",)


def test_acceptance_is_defined_as_verl_does() -> None:
    rng = np.random.default_rng(0)
    drafted = rng.integers(0, 50, 200)
    accepted = (drafted * rng.random(200)).astype(int)
    verify = np.where(drafted > 0, rng.integers(1, 20, 200), 0)
    theirs = ray_trainer.compute_spec_decode_metrics(drafted, accepted, verify)
    columns = {"drafted_tokens": drafted, "accepted_tokens": accepted, "verify_steps": verify}
    ours = m.step_metrics(columns, None, 1.0)
    assert set(theirs) == {m.SPEC_ACCEPT_RATE, m.SPEC_ACCEPT_LENGTH}
    for name, value in theirs.items():
        np.testing.assert_allclose(ours[name], value)


def test_verl_logs_the_names_we_read(tmp_path, monkeypatch) -> None:
    lengths = torch.tensor([3.0, 5.0])
    batch = DataProto.from_dict(
        tensors={
            "prompts": torch.zeros(2, 4),
            "responses": torch.zeros(2, 5),
            "attention_mask": torch.ones(2, 9),
            "response_mask": torch.ones(2, 5),
            "prompt_length": torch.tensor([4.0, 4.0]),
            "response_length": lengths,
            **{name: torch.ones(2, 5) for name in ("token_level_scores", "token_level_rewards")},
            **{name: torch.ones(2, 5) for name in ("advantages", "returns")},
        },
        meta_info={"global_token_num": [7, 9]},
    )
    timing = {"gen": 2.0, "step": 4.0}
    data = {
        **metric_utils.compute_data_metrics(batch, use_critic=False),
        **metric_utils.compute_timing_metrics(batch, timing),
        **metric_utils.compute_throughout_metrics(batch, timing, 1),
        m.EPOCH: 0,
    }
    read = {m.REWARD_MEAN, m.REWARD_MEAN_AFTER_KL, m.GEN_S, m.STEP_S, m.GEN_MS_PER_TOKEN, m.TOTAL_TOKENS}
    assert read | {m.PROMPT_LENGTH_MEAN, m.RESPONSE_LENGTH_MEAN} <= set(data)
    assert m.response_tokens(data) == 8
    del data[m.GEN_MS_PER_TOKEN]
    assert m.response_tokens(data) == 8

    path = tmp_path / "metrics.jsonl"
    monkeypatch.setenv(LOGGER_VARIABLE, str(path))
    logger = tracking.FileLogger("project", "experiment")
    follower = MetricsFollower(path)
    logger.log(data, step=3)
    assert [step for step, _ in follower.poll()] == [3]
    logger.finish()
    assert steps.from_metrics(path)[3][m.REWARD_MEAN] == 5.0


def test_trainer_still_logs_epoch_and_staleness() -> None:
    import inspect

    from verl.trainer.ppo.v1.trainer_base import PPOTrainer

    source = inspect.getsource(PPOTrainer._compute_metrics)
    assert f'"{m.EPOCH}"' in source
    assert f'"{m.VERL_STALENESS_MEAN}"' in source
    assert f'"{m.VERL_STALENESS_MAX}"' in source


def documented(file: str) -> list[str]:
    """Metric names in the first column of a file's table below "What to read"."""
    table = (ROOT / file).read_text().partition("# What to read\n")[2].partition("\n#")[0]
    found: list[str] = []
    for row in re.findall(r"^\| (`[^|]+) \|", table, re.M):
        for name in re.findall(r"`([^`]+)`", row):
            found.append(name if "/" in name else f"{found[-1].rpartition('/')[0]}/{name}")
    assert found
    return found


def emitted(folder: Path) -> set[str]:
    """All that a step of ours can log, verl's staleness beside it."""
    columns = {column.name: np.zeros(1) for column in REQUESTS} | {"head_updates": np.ones(1)}
    step = m.step_metrics(columns, slots=1, rollout_s=1.0)
    step |= m.staleness_metrics([0], [0], [1])
    sources = [
        Path(module.__file__).read_text()
        for module in (recorder, pipeline, layout, balance, ranking, reserve, batches, manager)
    ]
    named = {getattr(m, name) for source in sources for name in re.findall(r"\bnames\.([A-Z]\w+)", source)}
    expectations = Expectations(100)
    expectations.hand({"u": "a prompt"})
    expectations.generated("u", 0, 9)
    expectations.keep(lambda uid: False)
    named |= {m.LENGTHS + name for name in expectations.measures()}
    store = HistoryStore(folder / "history", "", 1 << 20, 1)
    kept = {f"{m.HISTORY}/{name}" for name in (*STORE_COUNTS, *store.stats())}
    store.close()
    return set(step) | (named - {m.HISTORY, m.LENGTHS}) | kept | {m.VERL_STALENESS_MEAN, m.VERL_STALENESS_MAX}


def test_the_documents_name_what_is_logged_and_all_of_it(tmp_path) -> None:
    known = emitted(tmp_path)
    names = [name for file in METRIC_TABLES for name in documented(file)]
    assert [name for name in names if not any(fnmatch(metric, name) for metric in known)] == []
    told = [name for name in names if not name.endswith("/*")]
    assert {metric for metric in known if not any(fnmatch(metric, name) for name in told)} == set()


def test_every_metric_named_anywhere_is_logged(tmp_path) -> None:
    """In the documents' text, and in what the scripts print."""
    known = emitted(tmp_path)
    files = [ROOT / "README.md", *(ROOT / "docs").glob("*.md"), ROOT / "CHANGELOG.md", ROOT / "recipes" / "common.sh"]
    for file in files:
        groups = "rollout/spec|rollout/history|training/sorted|training/staleness"
        named = re.findall(rf"\b((?:{groups})[_/][a-z_/]*[a-z])\b", file.read_text())
        wrong = {
            name for name in named if name not in known and not any(metric.startswith(f"{name}/") for metric in known)
        }
        assert wrong == set(), file
