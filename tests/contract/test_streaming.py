"""What of verl's losses and estimators lets an update come in parts, as ``trainer/stages.py`` names them."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
import transfer_queue as tq
from omegaconf import OmegaConf
from tensordict import TensorDict
from transfer_queue import KVBatchMeta
from verl.experimental.separation.engine_workers import DetachActorWorker
from verl.trainer.config import AlgoConfig
from verl.trainer.ppo import core_algos
from verl.trainer.ppo.padding_utils import upsample_batch_to_divisible_size
from verl.workers.config import PolicyLossConfig
from verl.workers.engine_workers import ActorRolloutRefWorker, TrainingWorker

from tests.e2e.engine_steps import actor_config
from verl_rhyme.actor.actor import StreamedActor, streamed
from verl_rhyme.actor.streamed_update import BY_TOKENS, find_unsupported_engine_option
from verl_rhyme.checks.combinations import LEGACY_ESTIMATORS
from verl_rhyme.checks.streaming import GROUP_ESTIMATORS, STREAMED_LOSSES
from verl_rhyme.trainer.pipeline import RhymePipelineColocated

#: Those that divide by sequences whatever they are told, or rank the tokens of a micro-batch.
OTHER_LOSSES = {"sapo", "geo_mean", "clip_cov", "kl_cov", "bypass_mode"}
#: Those that look at the whole batch.
OTHER_ESTIMATORS = {"gae", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "gpg"}
AGGREGATIONS = [BY_TOKENS, "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]
ROWS, WIDTH = 8, 12


def test_every_loss_and_estimator_of_verl_is_known():
    assert set(core_algos.POLICY_LOSS_REGISTRY) == {*STREAMED_LOSSES, *OTHER_LOSSES}
    known = {str(getattr(name, "value", name)) for name in core_algos.ADV_ESTIMATOR_REGISTRY}
    assert sorted(known) == sorted([*GROUP_ESTIMATORS, *OTHER_ESTIMATORS, *LEGACY_ESTIMATORS]), "each once"


def tensors(seed=0):
    random = torch.Generator().manual_seed(seed)
    mask = torch.arange(WIDTH) < torch.randint(1, WIDTH + 1, (ROWS, 1), generator=random)
    old, new = (-torch.rand(ROWS, WIDTH, generator=random) for _ in range(2))
    return old, new.requires_grad_(), torch.randn(ROWS, WIDTH, generator=random), mask


def loss(name, aggregation, rows, divisor, weighted):
    """Gradient of the loss of some rows, where the mini-batch is said to have so many tokens; ``weighted``: by
    importance sampling, as where stale tokens are trained."""
    settings = actor_config(loss_agg_mode=aggregation, policy_loss=PolicyLossConfig(dro_beta=0.1))
    info = {"dp_size": 1, "batch_num_tokens": divisor, "global_batch_size": ROWS, "loss_scale_factor": WIDTH}
    settings.global_batch_info.clear()
    settings.global_batch_info.update(info)
    old, new, advantages, mask = tensors()
    weights = 2 * torch.rand(ROWS, WIDTH, generator=torch.Generator().manual_seed(1))
    value, _ = core_algos.get_policy_loss_fn(name)(
        old_log_prob=old[rows],
        log_prob=new[rows],
        advantages=advantages[rows],
        response_mask=mask[rows],
        loss_agg_mode=aggregation,
        config=settings,
        rollout_is_weights=weights[rows] if weighted else None,
    )
    value.backward()
    return new.grad


@pytest.mark.parametrize("name", STREAMED_LOSSES)
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("weighted", [False, True])
def test_a_loss_is_the_sum_of_its_parts(name, aggregation, weighted):
    """Divided by what stands for the tokens, and scaled where that counts."""
    tokens, stand_in = int(tensors()[3].sum()), 5
    parts = [[6, 1], [2, 4, 5, 0], [3, 7]]
    share = stand_in / tokens if aggregation == BY_TOKENS else 1.0
    whole = loss(name, aggregation, list(range(ROWS)), tokens, weighted)
    assert whole.abs().sum() > 0
    torch.testing.assert_close(sum(loss(name, aggregation, part, stand_in, weighted) for part in parts) * share, whole)


@pytest.mark.parametrize("name", GROUP_ESTIMATORS)
def test_advantages_of_a_group_are_its_own(name):
    random = torch.Generator().manual_seed(3)
    rewards = torch.zeros(ROWS, WIDTH)
    rewards[:, -1] = torch.randn(ROWS, generator=random)
    columns = {
        "token_level_rewards": rewards,
        "response_mask": torch.ones(ROWS, WIDTH),
    }
    index = np.array([0, 0, 0, 0, 1, 1, 1, 1])

    estimate = core_algos.get_adv_estimator_fn(name)

    def advantages(rows):
        given = {key: column[rows].clone() for key, column in columns.items()}
        return estimate(**given, index=index[rows], config=AlgoConfig())[0]

    whole = advantages(list(range(ROWS)))
    assert whole.abs().sum() > 0
    torch.testing.assert_close(torch.cat([advantages([0, 1, 2, 3]), advantages([4, 5, 6, 7])]), whole)


def test_a_worker_of_ones_own_keeps_what_it_does():
    class Mine(DetachActorWorker):
        def update_actor(self, data):
            return "mine"

    ours = streamed(Mine)
    assert ours.__mro__[:3] == (ours, StreamedActor, Mine)
    assert streamed(ours) is ours
    assert issubclass(streamed(ActorRolloutRefWorker), StreamedActor)
    for name in ("update_actor", "finish_update", "drop_update", "find_unsupported_feature"):
        assert hasattr(getattr(ours, name), "attrs_3141562937"), "verl's worker groups do not see it"


def engine(options=(), **changes):
    """As much of verl's Megatron engine as is looked at, of a mixture of experts as Hugging Face describes it."""
    from megatron.core.transformer import TransformerConfig

    experts = {"num_moe_experts": 4, "moe_aux_loss_coeff": 0.001, "moe_router_load_balancing_type": "none"}
    made = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=1, **(experts | changes))
    settings = {"dynamic_context_parallel": False, "use_megatron_fsdp": False} | dict(options)
    return SimpleNamespace(
        tf_config=made,
        engine_config=SimpleNamespace(**settings),
        model_config=SimpleNamespace(mtp=SimpleNamespace(enable=False)),
        module=[SimpleNamespace(scale_gradients=None)],
    )


@pytest.mark.parametrize("kind", ["none", "aux_loss", "seq_aux_loss", "global_aux_loss", ["none", "aux_loss"]])
def test_experts_have_losses_of_their_own_where_megatrons_router_says_so(kind):
    from megatron.core.transformer.moe.router import TopKRouter

    coefficient = [0.0, 0.01] if isinstance(kind, list) else 0.01
    experts = engine(moe_router_load_balancing_type=kind, moe_aux_loss_coeff=coefficient)
    router = SimpleNamespace(routing_type=kind, config=experts.tf_config)
    router.get_aux_loss_coeff = lambda of: TopKRouter.get_aux_loss_coeff(router, of)
    assert bool(find_unsupported_engine_option(experts)) == TopKRouter.is_aux_loss_enabled(router)


@pytest.mark.parametrize(
    ("made", "why"),
    [
        (lambda: engine(), None),
        (lambda: engine(num_moe_experts=None), None),
        (lambda: engine(moe_z_loss_coeff=1e-3), "auxiliary losses"),
        (lambda: engine(calculate_per_token_loss=True), "context parallelism"),
        (lambda: engine([("use_megatron_fsdp", True)]), "use_megatron_fsdp"),
        (lambda: SimpleNamespace(), "neither FSDP nor Megatron"),
    ],
    ids=["experts", "dense", "z-loss", "tokens", "fsdp", "other"],
)
def test_an_engine_says_what_keeps_parts_from_it(made, why):
    found = find_unsupported_engine_option(made())
    assert found is None if why is None else why in found


def test_an_update_of_ones_own_is_not_passed_over():
    """A part would not go through it."""

    class Mine(ActorRolloutRefWorker):
        def update_actor(self, data):
            return "mine"

    class MyTraining(TrainingWorker):
        def train_batch(self, data):
            return "mine"

    def why(worker, training):
        made = object.__new__(streamed(worker))
        made.actor = object.__new__(training)
        made.actor.engine = engine()
        return made.find_unsupported_feature()

    assert why(DetachActorWorker, TrainingWorker) is None
    assert "update_actor overrides verl" in why(Mine, TrainingWorker)
    assert "train_batch overrides verl" in why(DetachActorWorker, MyTraining)


def of_length(lengths, value):
    rows = [torch.full((length,), value) for length in lengths]
    return torch.nested.as_nested_tensor(rows, layout=torch.jagged)


@pytest.mark.parametrize("estimator", ["grpo", "grpo_passk", "rloo", "opo", "gpg"])
def test_padding_of_verl_takes_no_part_in_advantages(queue, estimator):
    """verl gives all padding rows one prompt: a single one would end ``grpo_passk``, several have no number in ``opo``,
    and ``gpg`` counts them."""
    trainer = object.__new__(RhymePipelineColocated)
    algorithm = {"adv_estimator": estimator, "gamma": 1.0, "lam": 1.0, "use_kl_in_reward": False}
    rollout = {"rollout": {"n": 3}}
    trainer.config = OmegaConf.create({"algorithm": algorithm, "actor_rollout_ref": rollout})
    lengths = [2, 4, 3, 1, 2, 5]
    scores = of_length(lengths, 0.0)
    for row, score in zip(scores.unbind(), [1.0, 0.0, 0.5, 0.0, 2.0, 1.0], strict=True):
        row[-1] = score
    fields = {
        "uid": ["a"] * 3 + ["b"] * 3,
        "prompts": of_length([2] * 6, 1),
        "responses": of_length(lengths, 1),
        "response_mask": of_length(lengths, 1),
        "rm_scores": scores,
        "old_log_probs": of_length(lengths, -1.0),
        "rollout_log_probs": of_length(lengths, -1.0),
    }
    keys = [f"{uid}_{number}_0" for uid in "ab" for number in range(3)]
    tags = [{"seq_len": 2 + length, "response_len": length} for length in lengths]
    tq.kv_batch_put(keys=keys, partition_id="train", fields=TensorDict(fields, batch_size=6), tags=tags)
    advantages = []
    for multiple in (6, 7, 8):
        batch = KVBatchMeta(partition_id="train", keys=list(keys), tags=list(tags))
        batch = upsample_batch_to_divisible_size(batch, multiple, 0)
        padding = {"old_log_probs": torch.zeros(multiple - 6, 1)}  # as the stages before leave it
        if multiple > 6:
            tq.kv_batch_put(batch.keys[6:], "train", fields=TensorDict(padding, batch_size=multiple - 6))
        done = trainer._compute_advantage(batch, metrics={})
        assert (done.keys, len(done.tags)) == (batch.keys, multiple)
        rows = tq.kv_batch_get(done.keys, "train", select_fields=["advantages", "returns", "old_log_probs"])
        advantages.append([row.tolist() for row in rows["advantages"].unbind()])
        assert advantages[-1][:6] == advantages[0]
        assert all(row == [0.0] for row in advantages[-1][6:])
    assert any(value for row in advantages[0] for value in row)
