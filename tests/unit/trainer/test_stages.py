"""Parts of an update batch: each runs once, and parts of another batch are dropped."""

import functools
import time
from copy import deepcopy
from types import SimpleNamespace

import pytest
import torch
from omegaconf import OmegaConf
from transfer_queue import KVBatchMeta

from verl_rhyme.actor.actor import PART
from verl_rhyme.checks.preflight.compose import compose
from verl_rhyme.checks.streaming import find_unsupported_option
from verl_rhyme.observability import metrics as names
from verl_rhyme.processes.messages import Part
from verl_rhyme.trainer import stages as stages_module
from verl_rhyme.trainer.stages import Stages

ACTOR = "actor_rollout_ref.actor."


@functools.cache
def composed():
    changes = ["algorithm.adv_estimator=grpo", "data.train_batch_size=4", "actor_rollout_ref.rollout.n=2"]
    made = compose([*changes, f"{ACTOR}ppo_mini_batch_size=4", f"{ACTOR}use_dynamic_bsz=true"])
    OmegaConf.set_struct(made, False)
    return made


class Workers:
    """Workers of the actor that keep their calls."""

    def __init__(self):
        self.called, self.why = [], [None, None]

    def find_unsupported_feature(self):
        return self.why

    def drop_update(self):
        self.called.append("drop")

    def finish_update(self):
        self.called.append("finish")
        time.sleep(0.05)
        return [None, {"mfu": [0.5], "pg_loss": [1.0, 3.0]}]


class Trainer:
    """The part of the pipeline that :class:`Stages` uses."""

    use_reference_policy, actor_ranks = True, 1
    tokenizer = SimpleNamespace(eos_token_id=0)

    def __init__(self):
        self.config, self.timing_raw, self.stages = deepcopy(composed()), {}, []
        self.actor_rollout_wg = Workers()
        self.loaded = 0

    def _stage(name):
        def stage(self, batch, metrics):
            assert (PART in batch.extra_info) == (name == "update_actor")
            self.stages.append((name, sorted(batch.keys)))
            metrics["tokens"] = sum(tag["seq_len"] for tag in batch.tags) / len(batch.keys)
            if name == "old_log_prob":
                metrics["actor/entropy"] = float(batch.tags[0]["response_len"])
            return batch

        return stage

    def load_prompts(self):
        self.loaded += 1

    _compute_old_log_prob = _stage("old_log_prob")
    _compute_ref_log_prob = _stage("ref")
    _compute_advantage = _stage("adv")
    _update_actor = _stage("update_actor")

    def _get_required_batch_multiple(self, ranks):
        return ranks


STAGES = ["old_log_prob", "ref", "adv", "update_actor"]


@pytest.fixture
def trainer(queue):
    return Trainer()


@pytest.fixture
def queue(monkeypatch):
    """The queue's ``response_mask`` by key, where it is not one token."""
    masks = {}

    def get(keys, partition_id, select_fields):
        assert select_fields == ["response_mask"]
        tensors = [torch.tensor(masks.get(key, [1])) for key in keys]
        return {"response_mask": torch.nested.as_nested_tensor(tensors, layout=torch.jagged)}

    monkeypatch.setattr(stages_module.tq, "kv_batch_get", get)
    return masks


@pytest.fixture
def stages(trainer):
    return Stages(trainer, streams=True)


@pytest.fixture
def waiting(trainer):
    """Stages whose gradients wait for the whole batch."""
    trainer.config.actor_rollout_ref.actor.ppo_epochs = 2
    return Stages(trainer, streams=True)


@pytest.fixture
def multiples(monkeypatch):
    """Numbers of rows to which parts are padded."""
    seen = []
    monkeypatch.setattr(stages_module, "upsample_batch_to_divisible_size", lambda b, m, eos: seen.append(m) or b)
    return seen


def part(keys, length=10):
    return Part(list(keys), [{"seq_len": length + i, "response_len": length} for i in range(len(keys))])


def batch(keys, length=10):
    return SimpleNamespace(keys=list(keys), tags=[{"seq_len": 10, "response_len": length} for _ in keys])


def test_parts_are_padded_for_ranks_micro_batches_and_an_interleaved_pipeline(trainer, monkeypatch, multiples, waiting):
    trainer.actor_ranks = 2
    waiting.run_part(part("ab"))
    config = trainer.config.actor_rollout_ref
    config.actor.use_dynamic_bsz, config.actor.ppo_micro_batch_size_per_gpu = False, 4
    waiting.run_part(part("cd"))
    config.rollout.log_prob_use_dynamic_bsz, config.rollout.log_prob_micro_batch_size_per_gpu = False, 6
    waiting.run_part(part("ef"))
    config.actor.megatron = {"pipeline_model_parallel_size": 3, "virtual_pipeline_model_parallel_size": 2}
    waiting.run_part(part("gh"))
    config.actor.megatron.override_transformer_config = {"microbatch_group_size_per_vp_stage": 5}
    waiting.run_part(part("ij"))
    assert multiples == [2, 2 * 4, 2 * 12, 2 * 3 * 12, 2 * 5 * 12]
    monkeypatch.setattr(Trainer, "_get_required_batch_multiple", lambda self, ranks: 133)
    waiting.finish(batch("abcdefghijkl"), {})
    assert multiples[-1] == 2 * 2 * 5 * 12, "not a multiple of ranks and micro-batches with the 121 of the mini-batches"


def test_each_trajectory_runs_once(trainer, stages):
    metrics = {}
    stages.run_part(part("ab"))
    stages.run_part(part("abcd"))  # sent again after a restart of the coordinator
    stages.run_part(part("ab"))
    whole = stages.finish(batch("abcdef"), metrics)
    assert trainer.stages == [(stage, list(keys)) for keys in ("ab", "cd", "ef") for stage in STAGES]
    assert (sorted(whole.keys), len(whole)) == (list("abcdef"), 6)
    assert trainer.actor_rollout_wg.called == ["finish"]
    assert (metrics[names.EARLY_SHARE], metrics[names.PARTS]) == (4 / 6, 3)
    assert metrics["actor/pg_loss"] == 2
    assert metrics["perf/mfu/actor"] == 0.5
    assert trainer.timing_raw["update_actor"] >= 0.05, "the optimizer's step is not timed"
    assert metrics["tokens"] == pytest.approx((10.5 + 12.5 + 10) / 3)


@pytest.mark.parametrize(("early", "share"), [("", 0), ("abcd", 1)])
def test_batch_without_parts_or_rest(trainer, stages, early, share):
    metrics = {}
    for _ in range(2):  # one batch after another
        stages.run_part(part(early))
        assert sorted(stages.finish(batch("abcd"), metrics).keys) == list("abcd")
        assert metrics[names.EARLY_SHARE] == share
    assert trainer.actor_rollout_wg.called == ["finish", "finish"]


@pytest.mark.parametrize(("rest", "padding"), [("mnop", 0), ("mno", 1), ("", 4), (None, 0)])
def test_waiting_batch_keeps_no_more_padding_than_verl_would_add(trainer, waiting, monkeypatch, rest, padding):
    """Padding of parts for ranks would otherwise be further mini-batches, with fewer trajectories in each."""
    cleared, added = [], iter(range(1000))

    def upsample(batch, multiple, eos):
        more = -len(batch.keys) % multiple
        keys = [*batch.keys, *(f"pad{next(added)}" for _ in range(more))]
        tags = [*batch.tags, *([{"seq_len": 2, "response_len": 1, "is_padding": True}] * more)]
        return KVBatchMeta(partition_id="train", keys=keys, tags=tags)

    monkeypatch.setattr(stages_module, "upsample_batch_to_divisible_size", upsample)
    monkeypatch.setattr(stages_module.tq, "kv_clear", lambda keys, partition_id: cleared.extend(keys))
    monkeypatch.setattr(Trainer, "_get_required_batch_multiple", lambda self, ranks: 16)
    trainer.actor_ranks = 4
    if rest is not None:
        waiting.run_part(part("abcdef"))
        waiting.run_part(part("ghijkl"))
    whole = waiting.finish(batch("abcdefghijkl" + ("mnop" if rest is None else rest)), {})
    assert len(whole.keys) == len(whole.tags) == 16
    assert sum(tag.get("is_padding", False) for tag in whole.tags) == padding
    kept = {key for key in whole.keys if key.startswith("pad")}
    ran = [{*keys} for stage, keys in trainer.stages if stage == "old_log_prob"]
    assert {*whole.keys} <= set().union(*ran)
    assert all(len(keys) % 4 == 0 for keys in ran)
    assert {*cleared} == {key for keys in ran for key in keys if key.startswith("pad")} - kept
    assert len(trainer.stages) == 2 * {None: 1, "": 2}.get(rest, 3), "a stage ran again"


def test_waiting_batch_is_padded_though_its_parts_cover_all_of_it(trainer, waiting, monkeypatch, multiples):
    """verl's padding of the mini-batches would have no log-probs."""
    monkeypatch.setattr(Trainer, "_get_required_batch_multiple", lambda self, ranks: 6)
    waiting.run_part(part("ab"))
    waiting.run_part(part("cd"))
    assert sorted(waiting.finish(batch("abcd"), {}).keys) == list("abcd")
    assert multiples == [2, 2, 6]
    assert [stage for stage, _ in trainer.stages] == STAGES[:2] * 3, "more than the stages before gradients"
    assert trainer.loaded >= 3, "a filter may drop groups during the stages of a part, which take minutes"
    assert trainer.actor_rollout_wg.called == []


def test_parts_of_another_batch_are_dropped(trainer, stages, caplog):
    metrics = {}
    stages.run_part(part("ax"))
    whole = stages.finish(batch("abcd"), metrics)
    assert trainer.actor_rollout_wg.called == ["drop", "finish"]
    assert sorted(whole.keys) == list("abcd")
    assert trainer.stages[-1] == ("update_actor", list("abcd"))
    assert metrics[names.EARLY_SHARE] == 0
    assert "differs from its parts" in caplog.text


@pytest.mark.parametrize(("why", "called"), [([None, None], []), ([None, "aux"], ["drop"])])
def test_engine_that_cannot_accumulate_is_detected_at_the_start(trainer, stages, caplog, why, called):
    trainer.actor_rollout_wg.why = why
    stages.check_workers()
    assert trainer.actor_rollout_wg.called == called
    assert stages.updates == (not called) == ("aux" not in caplog.text)


def test_more_trajectories_than_a_mini_batch_stop_streaming(trainer, stages, multiples):
    """If an agent loop returns several trajectories per sample, verl takes a step for each mini-batch."""
    stages.run_part(part("abcdef"))  # a mini-batch has 4 prompts x 2 samples
    assert trainer.actor_rollout_wg.called == []
    whole = stages.finish(batch("abcdefghij"), {})
    assert trainer.actor_rollout_wg.called == ["drop"]
    assert not stages.updates
    assert sorted(whole.keys) == list("abcdefghij")
    assert [stage for stage, _ in trainer.stages] == [*STAGES, "old_log_prob", "ref"]


@pytest.mark.parametrize(("mode", "entropy"), [("token-mean", (10 * 10 + 30 * 30) / 40), ("seq-mean-token-sum", 20)])
def test_entropy_is_averaged_like_the_loss(trainer, stages, queue, mode, entropy):
    trainer.config.actor_rollout_ref.actor.loss_agg_mode = mode
    queue |= dict.fromkeys("ab", [1] * 10) | dict.fromkeys("cd", [1] * 30)
    metrics = {}
    stages.run_part(part("ab", 10))
    stages.finish(batch("abcd", 30), metrics)
    assert metrics["actor/entropy"] == pytest.approx(entropy)


def test_means_over_tokens_weigh_the_policys_tokens_alone(trainer, stages, queue):
    """verl masks the answers of tools, which ``response_len`` counts."""
    trainer.config.actor_rollout_ref.actor.loss_agg_mode = "token-mean"
    queue |= {"a": [1] * 4 + [0] * 6, "b": [0] * 10, "c": [1] * 8 + [0] * 12, "d": [0] * 20, "e": [0] * 40}
    metrics = {}
    stages.run_part(part("ab", 10))  # its entropy is its response_len (Trainer)
    stages.run_part(part("cd", 20))
    stages.finish(batch("abcde", 40), metrics)
    assert metrics["actor/entropy"] == pytest.approx((10 * 4 + 20 * 8) / 12)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ([], None),
        (["algorithm.adv_estimator=gae"], "adv_estimator=gae"),
        ([f"{ACTOR}ppo_mini_batch_size=2"], "several mini-batches"),
        (["critic.enable=true"], "critic.enable=true"),
        ([f"{ACTOR}policy_loss.loss_mode=kl_cov"], "kl_cov"),
        ([f"{ACTOR}loss_agg_mode=seq-mean-token-sum-norm"], "without actor.loss_scale_factor"),
        ([f"{ACTOR}loss_agg_mode=seq-mean-token-sum-norm", f"{ACTOR}loss_scale_factor=9"], None),
        (["algorithm.use_kl_in_reward=true"], None),
        (["algorithm.use_kl_in_reward=true", "algorithm.kl_ctrl.type=adaptive"], "adaptive"),
    ],
)
def test_options_for_which_gradients_wait(changes, why):
    config = deepcopy(composed())
    config.merge_with_dotlist(changes)
    reason = find_unsupported_option(config)
    assert reason is None if why is None else why in reason
