"""Runs of several seeds are compared seed by seed, and drawn with their spread."""

import pytest

from benchmarks import seeds


def summary(arm, *rewards, speed):
    epochs = [
        {
            "epoch": number,
            "reward_mean": reward,
            "rollout_s": 100 / speed,
            "useful_tokens_per_s": speed,
            "accept_length": speed,
            "accept_rate": None if arm == "off" else 0.5,
            "history_hit_rate": None if arm == "off" else 1.0,
            "bubble_ratio": None,
        }
        for number, reward in enumerate(rewards, 1)
    ]
    return {"arm": arm, "epochs": epochs}


OFF = [summary("off", 0.2, 0.3, speed=1.0), summary("off", 0.6, 0.7, speed=2.0)]
ON = [summary("histospec", 0.3, 0.3, speed=3.0), summary("histospec", 0.7, 0.5, speed=2.0)]


def test_arms_are_paired_by_seed():
    first, second = seeds.by_epoch(OFF, ON)
    assert (first["epoch"], second["epoch"]) == (1, 2)
    assert first["reward"]["off"] == {"mean": 0.4, "least": 0.2, "greatest": 0.6, "standard_error": 0.2}
    # the seeds differ by 0.4, the arms of a seed by 0.1
    assert first["reward_difference"] == {"mean": 0.1, "least": 0.1, "greatest": 0.1, "standard_error": 0.0}
    assert second["reward_difference"]["mean"] == pytest.approx(-0.1)
    assert second["reward_difference"]["standard_error"] == pytest.approx(0.1)
    assert first["tokens_per_s_ratio"]["mean"] == first["rollout_s_ratio"]["mean"] == 2.0  # not 5 / 3


def test_one_seed_has_no_standard_error():
    assert "standard_error" not in seeds.spread([1.0])
    assert seeds.spread([1.0, 3.0])["standard_error"] == pytest.approx(1.0)  # sqrt(2) / sqrt(2)


def test_an_arm_that_lacks_an_epoch_is_an_error():
    with pytest.raises(ValueError, match="shorter"):
        seeds.by_epoch(OFF, [ON[0], summary("histospec", 0.1, speed=1.0)])


def test_runs_of_one_arm_are_one_line_and_a_band(tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr(seeds.Figure, "savefig", lambda figure, path: drawn.append(figure))
    seeds.draw({"off": OFF, "histospec": ON}, tmp_path / "seeds.png")
    reward = drawn[0].axes[0]
    assert [line.get_label() for line in reward.lines] == ["off", "histospec"]
    assert list(reward.lines[0].get_ydata()) == [pytest.approx(0.4), pytest.approx(0.5)]
    low, high = reward.collections[0].get_datalim(reward.transData).intervaly
    assert (low, high) == (pytest.approx(0.2), pytest.approx(0.7))
