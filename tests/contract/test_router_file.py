"""verl's own manager of engines makes our router, as the settings say, in each of verl's trainer modes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import ray
from verl.utils.config import omega_conf_to_dataclass
from verl.workers.rollout.llm_server import LLMServerManager
from verl.workers.rollout.router import GlobalRequestLoadBalancer

from verl_rhyme.checks.preflight.compose import compose
from verl_rhyme.config import CONFIG_PATH, ConfigError, config_tree
from verl_rhyme.router import router_file
from verl_rhyme.router.router import PlacementRouter

PLACED = f"{CONFIG_PATH}.placement.policy=histopipe"


class Replica:
    """A replica whose engine is not started."""

    def __init__(self, replica_rank: int, **_: Any) -> None:
        self.replica_rank = replica_rank
        self._server_handle, self._server_address = f"handle {replica_rank}", f"10.0.0.{replica_rank}:8000"

    async def init_hybrid(self, workers: Any) -> None: ...

    async def init_standalone(self) -> None: ...


class Manager(LLMServerManager):
    rollout_replica_class = Replica


def configured(folder: Any, *changes: str) -> Any:
    """Return a run's config after :func:`router_file.use`."""
    pool = ["actor_rollout_ref.rollout.nnodes=1", "actor_rollout_ref.rollout.n_gpus_per_node=4"]
    run = [f"trainer.default_local_dir={folder}", "actor_rollout_ref.rollout.name=vllm"]
    config = compose(
        ["+rhyme=histospec", *run, *pool, "actor_rollout_ref.rollout.tensor_model_parallel_size=1", *changes]
    )
    rhyme = config_tree.from_verl(config)
    assert rhyme is not None
    router_file.use(config, rhyme.placement)
    return config


@pytest.fixture(autouse=True)
def no_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    """Actors are objects of this process."""
    monkeypatch.setattr(ray, "remote", lambda cls: SimpleNamespace(remote=cls))


@pytest.mark.parametrize("manager", ["hybrid", "standalone", "empty"])
def test_verls_manager_makes_it(tmp_path: Any, manager: str) -> None:
    """As ``sync`` and ``colocate_async`` make it, and as ``separate_async`` does, twice."""
    config = configured(tmp_path, PLACED)
    assert omega_conf_to_dataclass(config.actor_rollout_ref.rollout).router_config_path == str(router_file.FILE)
    if manager == "empty":
        made = Manager.create_empty(config=config)
    else:
        workers = SimpleNamespace(world_size=4) if manager == "hybrid" else None
        made = Manager.create(config=config, worker_group=workers)
    router = made.global_load_balancer
    assert isinstance(router, PlacementRouter)
    assert router.get_all_servers() == made.get_addresses()
    assert len(made.get_addresses()) == (0 if manager == "empty" else 4)


def test_without_a_policy_it_is_verls(tmp_path: Any) -> None:
    config = configured(tmp_path)
    assert type(Manager.create(config=config).global_load_balancer) is GlobalRequestLoadBalancer


def test_what_replicas_cost_is_read_before_any_starts(tmp_path: Any) -> None:
    def cost(*changes: str) -> Any:
        planned = [f"{CONFIG_PATH}.placement.policy=longest_first", *changes]
        rhyme = config_tree.from_verl(compose(["+rhyme=sorted", "actor_rollout_ref.rollout.name=vllm", *planned]))
        assert rhyme is not None
        router_file.check(rhyme.placement)
        return router_file.measured(rhyme.placement)

    profile = f"{CONFIG_PATH}.placement.profile"
    assert cost() is None
    mine = tmp_path / "mine.yaml"
    mine.write_text("source: mine\nslots: 6\nroom: 1000\nstep: {base: 0.5}\n")
    assert cost(f"{profile}={mine}").cost.step.base == 0.5
    with pytest.raises(ConfigError, match=r"placement\.profile: /nope\.yaml cannot be read: No such file"):
        cost(f"{profile}=/nope.yaml")
    with pytest.raises(ConfigError, match=r"placement\.profile must be null without a policy"):
        cost(f"{profile}={mine}", f"{CONFIG_PATH}.placement.policy=null")
