"""Which engines schedule asynchronously, by vLLM's own config."""

import json

import pytest
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.core.sched.async_scheduler import AsyncScheduler

from verl_rhyme.drafting.bounds import engine_tokens
from verl_rhyme.engine.scheduler import DraftScheduler
from verl_rhyme.patches import apply_vllm
from verl_rhyme.processes.request import FIELD

PROPOSER = {
    "method": "custom_class",
    "model": "verl_rhyme.engine.proposer.HistoryProposer",
    "num_speculative_tokens": 4,
}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 2, "num_hidden_layers": 2}
    shape = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "vocab_size": 32, **sizes}
    (folder / "config.json").write_text(json.dumps({**shape, "max_position_embeddings": 64}))
    return str(folder)


def config(model, ours=True, drafts=True, **options):
    apply_vllm()
    if ours:
        options["additional_config"] = {FIELD: {"drafting": {}} if drafts else {}}
    if drafts:
        options["speculative_config"] = dict(PROPOSER)
    made = EngineArgs(model=model, skip_tokenizer_init=True, **options).create_engine_config()
    return made, made.scheduler_config


@pytest.mark.parametrize("drafts", [True, False])
def test_an_engine_of_ours_does(model, drafts):
    made, scheduler = config(model, drafts=drafts)
    assert scheduler.async_scheduling
    assert made.additional_config[FIELD]["synchronous"] == ""
    assert scheduler.get_scheduler_cls() is (DraftScheduler if drafts else AsyncScheduler)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"async_scheduling": False}, "async_scheduling=false"),
        ({"scheduler_cls": "vllm.v1.core.sched.scheduler.Scheduler"}, "scheduler_cls=vllm.v1.core.sched"),
        ({"pipeline_parallel_size": 2, "distributed_executor_backend": "mp"}, "pipeline_parallel_size=2"),
    ],
)
def test_it_says_why_it_does_not(model, options, reason, caplog_vllm):
    made, scheduler = config(model, drafts="pipeline_parallel_size" not in options, **options)
    assert not scheduler.async_scheduling
    assert scheduler.get_scheduler_cls() is not DraftScheduler
    assert made.additional_config[FIELD]["synchronous"].startswith(reason)
    assert f"because it has {reason}" in caplog_vllm.text


def test_other_engines_are_vllms(model):
    _, scheduler = config(model, ours=False)
    assert not scheduler.async_scheduling, "with drafts of a custom class"
    assert scheduler.scheduler_cls is None


def test_drafts_in_pipeline_stages_are_refused_before_a_worker_starts(model):
    """The first stage has no drafter: its worker would die, and the engine wait for it."""
    stages = {"pipeline_parallel_size": 2, "distributed_executor_backend": "mp"}
    with pytest.raises(ValueError, match="set pipeline_parallel_size=1, and tensor_parallel_size=2"):
        config(model, **stages)


@pytest.fixture
def caplog_vllm(caplog):
    """vLLM's loggers do not propagate to the root's handler."""
    import logging

    logger = logging.getLogger("vllm")
    logger.addHandler(caplog.handler)
    yield caplog
    logger.removeHandler(caplog.handler)


def test_adapters_need_room_for_drafts_of_all_requests(model):
    """vLLM's arguments ask for more than a step holds; :func:`engine_tokens` gives them what they ask for."""
    sizes = {"enable_lora": True, "max_num_seqs": 8, "max_num_batched_tokens": 40, "max_model_len": 32}
    assert PROPOSER["num_speculative_tokens"] == engine_tokens(
        32, recurrent=False, adapters=True, slots=8, step_tokens=40
    )
    config(model, **sizes)
    with pytest.raises(ValueError, match="Consider increasing max_num_batched_tokens"):
        config(model, **{**sizes, "max_num_batched_tokens": 39})
