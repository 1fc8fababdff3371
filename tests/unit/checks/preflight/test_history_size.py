"""Size of a history on disk and in checkpoints."""

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from tests.unit.checks.preflight.world import R, complaints, only, preflight
from verl_rhyme.checks.preflight import history_size, machine_checks
from verl_rhyme.history import environment
from verl_rhyme.history.record import Trajectory
from verl_rhyme.history.store import HistoryStore


def history_store(found):
    return only(found, "history store")


def test_each_checkpoint_holds_a_copy_of_the_history(world, monkeypatch):
    """17k prompts x 16 x 8k tokens are more than the weights of a small model."""
    monkeypatch.setattr(history_size, "_count_prompts", lambda config: (17_398, 17_398))
    sizes = [f"{R}.n=16", "data.max_response_length=16384", f"{R}.custom.rhyme.history.max_bytes=400000000000"]
    monkeypatch.setattr(machine_checks, "free_disk", lambda folder: (folder, 24 << 30))
    assert ("checkpoints", "fail") not in complaints(preflight(world))
    assert "history" in complaints(preflight(world, *sizes))["checkpoints", "fail"]
    monkeypatch.setattr(machine_checks, "free_disk", lambda folder: (folder, 100 << 30))
    assert "history" in complaints(preflight(world, *sizes))["checkpoints", "warn"]
    monkeypatch.setattr(machine_checks, "free_disk", lambda folder: (folder, 1 << 40))
    assert ("checkpoints", "warn") not in complaints(preflight(world, *sizes))
    off = f"{R}.custom.rhyme.enable=false"
    monkeypatch.setattr(machine_checks, "free_disk", lambda folder: (folder, 24 << 30))
    assert ("checkpoints", "fail") not in complaints(preflight(world, *sizes, off))


def test_size_of_the_history_and_visits_kept(world, tmp_path):
    rows = {"prompt": [str(i) for i in range(17_398)], "data_source": ["x"] * 17_398}
    pq.write_table(pa.table(rows), tmp_path / "train.parquet")
    dapo = [*world, f"{R}.n=16", "data.max_response_length=20480", "trainer.total_epochs=10"]
    history = f"{R}.custom.rhyme.history"
    found = history_store(preflight(dapo, f"{R}.max_model_len=20992", f"{history}.max_bytes={20 << 30}"))
    assert found.status == "warn"
    assert "17398 prompts x 16 responses x 2560 to 10240 tokens (1/8 to 1/2 of max_response_length)" in found.detail
    per_epoch = 17_398 * 16 * (5.75 * 2560 + 27) / (1 << 30)
    assert f"= {4 * per_epoch:.1f} GiB to " in found.detail
    levels = 0.7 * 20 / per_epoch, 0.7 * 20 / (17_398 * 16 * (5.75 * 10240 + 27) / (1 << 30))
    assert levels[0] > 1 > levels[1]
    assert f"kept: {levels[0]:.1f} of 4 visits to {levels[1]:.0%} of the prompts" in found.detail
    assert "history.max_bytes" in found.remedy
    assert history_store(preflight(dapo, f"{history}.max_bytes=600000000000")).status == "ok"
    few = history_store(preflight(dapo, "data.train_max_samples=100"))
    assert few.status == "ok"
    assert "100 prompts" in few.detail
    assert "kept: all" in few.detail
    assert "(null: the smaller of half the free disk and half the free memory" in few.detail


def test_repeated_prompts_are_counted_once(world, tmp_path, monkeypatch):
    """verl's DAPO-Math file repeats prompts. If reading takes too long, the count is extrapolated."""
    order = np.random.default_rng(0).permutation(70_000) % 700
    prompts = [[{"role": role, "content": f"find {i}"} for role in ("system", "user")] for i in order]
    pq.write_table(pa.table({"prompt": prompts, "data_source": ["x"] * 70_000}), tmp_path / "train.parquet")
    once = preflight(world, "trainer.total_epochs=1")
    assert "700 prompts (in 70000 rows) x 8 responses" in history_store(once).detail
    assert "x 4 visits" in history_store(once).detail
    monkeypatch.setattr(history_size, "_COUNTING_S", 0.0)
    assert "1496 prompts (in 70000 rows)" in history_store(preflight(world)).detail, "700 of the first 32768 rows"
    monkeypatch.undo()
    pictures = {"prompt": prompts, "data_source": ["x"] * 70_000, "images": [[{"bytes": b"x"}]] * 70_000}
    pq.write_table(pa.table(pictures), tmp_path / "train.parquet")
    assert "70000 prompts x 8 responses" in history_store(preflight(world)).detail, "images are not compared"


def test_the_history_needs_disk_for_its_rewrite(world, monkeypatch):
    bound = f"{R}.custom.rhyme.history.max_bytes={10 << 30}"
    for free, short in ((11, True), (16, True), (18, False)):
        monkeypatch.setattr(machine_checks, "free_disk", lambda folder, free=free: (folder, free << 30))
        found = [check for check in preflight(world, bound).checks if check.name == "history store"]
        assert any("free disk space" in check.remedy for check in found) == short
        assert "17.0 GiB while it is rewritten" in found[0].detail
    monkeypatch.setattr(machine_checks, "free_disk", lambda folder: (folder, 4 << 30))
    assert history_store(preflight(world)).status == "ok"


def test_a_rewrite_takes_the_disk_that_the_preflight_computes(tmp_path, monkeypatch):
    bound, peaks, publish = 2 << 20, [], environment.publish

    def watched(path, folder):
        peaks.append(sum(file.stat().st_blocks * 512 for file in path.glob("env-*/*")))
        publish(path, folder)

    monkeypatch.setattr(environment, "publish", watched)
    with HistoryStore(tmp_path / "h", "a", bound, epochs=1) as store:
        for step in range(20):
            new = [Trajectory(bytes([step % 2, i] * 8), np.arange(8000), 0.0, 0, step // 2, i) for i in range(18)]
            assert store.append(new, step).dropped == 0
    assert 1.5 * bound < max(peaks) < 1.02 * history_size.PEAK * bound
