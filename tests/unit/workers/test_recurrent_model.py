"""Engine options for recurrent models if the driver has no config.json: verl's server has the model's config."""

from types import SimpleNamespace

import pytest
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from verl_rhyme.config import ConfigError, config_tree
from verl_rhyme.engine.server import RhymeHttpServer


def options(model_type, drafting):
    """Return ``engine_kwargs`` as the server completes them."""
    server = object.__new__(RhymeHttpServer)
    server._rhyme = config_tree.parse({"drafting": {"enable": drafting}, "history": {"dir": "/history"}})
    server._node_id = "node"
    server.config = SimpleNamespace(
        checkpoint_engine=None, cudagraph_capture_sizes=None, max_num_seqs=8, max_num_batched_tokens=256
    )
    tokenizer = SimpleNamespace(get_vocab=lambda: {"a": 0}, name_or_path="t")
    server.model_config = SimpleNamespace(hf_config=CONFIG_MAPPING[model_type](), tokenizer=tokenizer)
    engine_kwargs = {}
    server._preprocess_engine_kwargs(engine_kwargs)
    return engine_kwargs


def test_server_refuses_to_draft_for_a_recurrent_model():
    with pytest.raises(ConfigError, match=r"layer_types: linear_attention.*drafting\.enable=false"):
        options("qwen3_next", drafting=True)


def test_server_serves_a_recurrent_model_without_drafts_and_drafts_for_others():
    assert "speculative_config" not in options("qwen3_next", drafting=False)
    assert options("qwen3", drafting=True)["speculative_config"]["num_speculative_tokens"] == 32
