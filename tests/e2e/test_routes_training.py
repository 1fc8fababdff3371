"""Routing replay (R3) in a training run of an agent that searches, whose turns and responses run over versions.

The training engine of a CPU replays nothing; what it gets of each token is what Megatron's would replay.
"""

import mixtures
import pytest
import test_agent_training as agents
import whole_run
from mixtures import Routers

from tests.conftest import ONLY_SLOW

pytestmark = [ONLY_SLOW, pytest.mark.timeout(1200), pytest.mark.whole_run, pytest.mark.xdist_group("routes-training")]


def test_trained_tokens_have_the_experts_of_the_weights_that_sampled_them(tmp_path, monkeypatch):
    model = mixtures.upcycle(agents.MODEL, tmp_path / "model")
    monkeypatch.setattr(agents, "MODEL", model)
    folder = tmp_path / "run"
    settings = {"MODEL": "agent", "PROMPTS": str(agents.PROMPTS), "RHYME": "full", "STALENESS": "1"}
    settings |= whole_run.steady("60", "watched_agent,reported_routes")
    changes = (
        f"actor_rollout_ref.model.path={model}",
        "actor_rollout_ref.rollout.enable_rollout_routing_replay=true",
        "actor_rollout_ref.actor.optim.lr=1e-3",
    )
    whole_run.finish(whole_run.start(folder, *agents.SMALL, *changes, epochs=1, **settings), folder)
    routers, several, wrong_of_last, turns = {}, 0, 0, []
    for row in agents.lines(folder / "trained.jsonl"):
        text, experts = row["prompts"] + row["responses"], row["routed_experts"]
        assert len(experts) == len(text)
        spans = [(len(row["prompts"]) + end, version) for _, end, version in agents.spans_of(row)]
        computed = [next((version for end, version in spans if i < end - 1), -1) for i in range(len(text) - 1)]
        versions = {version for _, version in spans}
        for version in versions:
            if version not in routers:
                routers[version] = Routers(agents.weights_of(folder, version))
            rows = [i for i, made in enumerate(computed) if made == version]
            assert not routers[version].wrong(text, experts[:-1], rows), (row["key"], version)
        several += len(versions) > 1
        turns.append(len(spans))
        known = [i for i, made in enumerate(computed) if made >= 0]
        wrong_of_last += routers[spans[-1][1]].wrong(text, experts[:-1], known)
    print(f"{len(turns)} samples, {several} over versions, {sum(turns)} requests, {wrong_of_last} routes of others")
    assert several
    assert wrong_of_last > 10, "the experts of the last weights alone would be wrong"
