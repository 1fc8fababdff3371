"""What vLLM would make of ``drafting.model``, from config.json alone; tests/contract/test_own_drafter.py asks vLLM."""

import json

import pytest

from verl_rhyme.config.checks import Unusable
from verl_rhyme.drafting.own_drafter import examine, mtp_layers

POLICY = {"model_type": "qwen2", "hidden_size": 3584, "vocab_size": 152064, "max_position_embeddings": 32768}
SMALL = {"model_type": "qwen2", "hidden_size": 896, "vocab_size": 152064, "num_hidden_layers": 24}
HEAD = {"model_type": "llama", "hidden_size": 3584, "vocab_size": 152064, "num_hidden_layers": 1}
EAGLE3 = HEAD | {"draft_vocab_size": 32000}


@pytest.fixture
def folder(tmp_path):
    def write(config, name="drafter"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "config.json").write_text(config if isinstance(config, str) else json.dumps(config))
        return str(tmp_path / name)

    return write


@pytest.mark.parametrize(
    ("config", "name", "method"),
    [
        (SMALL, "small", "draft_model"),
        (HEAD, "head", "eagle"),
        (HEAD, "eagle-heads/eagle3-head", "eagle3"),
        (EAGLE3, "head", "eagle3"),
        (HEAD | {"architectures": ["LlamaForCausalLMEagle3"]}, "head", "eagle3"),
        ({"speculators_model_type": "eagle3", "transformer_layer_config": HEAD}, "head", "eagle3"),
        ({"model_type": "eagle", "model": HEAD | {"num_hidden_layers": 2}}, "head", "eagle"),
        (HEAD | {"num_hidden_layers": 2}, "eagle-head", "eagle"),
        (HEAD | {"hidden_size": 1024, "target_hidden_size": 3584}, "eagle3", "eagle3"),
        ({"model_type": "llama"}, "small", "draft_model"),
    ],
)
def test_the_kind_of_a_drafter_does_not_depend_on_its_folders_name_alone(folder, config, name, method):
    path = folder(config, name)
    for policy in (POLICY, {}):
        found = examine(path, policy)
        assert (found.method, found.model) == (method, path)


@pytest.mark.parametrize(
    ("config", "name", "words"),
    [
        (SMALL | {"vocab_size": 151936}, "small", "has 151936 vocabulary entries, and the model has 152064"),
        (EAGLE3 | {"vocab_size": 151936}, "head", "has 151936 vocabulary entries"),
        (EAGLE3 | {"hidden_size": 4096}, "head", "has 4096 values of a hidden state, and the model has 3584"),
        (HEAD | {"hidden_size": 1024, "target_hidden_size": 4096}, "h", "has 4096 values of a hidden state"),
        ({"transformer_layer_config": HEAD | {"hidden_size": 8}}, "eagle3", "has 8 values of a hidden state"),
        (SMALL, "eagle-runs/small", "rename that folder"),
        ({"model_type": "medusa"}, "heads", "of the kind medusa"),
        ("{", "broken", "download the drafter again"),
    ],
)
def test_a_drafter_that_cannot_draft_for_the_model_is_refused(folder, config, name, words):
    with pytest.raises(Unusable, match=words):
        examine(folder(config, name), POLICY)


def test_a_folder_that_does_not_exist_and_a_hub_id_that_is_not_here(tmp_path):
    with pytest.raises(Unusable, match=r"no such folder, or no config\.json in it"):
        examine(str(tmp_path / "eagle-none"), POLICY)
    found = examine("nobody/EAGLE3-of-nothing", POLICY)
    assert (found.model, found.method, found.positions) == ("nobody/EAGLE3-of-nothing", "eagle3", None)


def test_a_relative_folder_is_made_absolute(folder, tmp_path, monkeypatch):
    """vLLM would take ``Qwen2.5-0.5B`` for the name of a Python class."""
    folder(SMALL, "Qwen2.5-0.5B")
    monkeypatch.chdir(tmp_path)
    assert examine("Qwen2.5-0.5B", POLICY).model == str(tmp_path / "Qwen2.5-0.5B")


def test_mtp_needs_layers_and_drafts_whole_rounds():
    with pytest.raises(Unusable, match=r"no MTP layers.*drop .*mtp\.enable_rollout"):
        examine("mtp", POLICY)
    with pytest.raises(Unusable, match="no MTP layers"):
        examine("mtp", POLICY | {"num_nextn_predict_layers": 0})
    assert examine("mtp", {}).draft_tokens(32) == 32, "the policy's config is not here"
    assert examine("mtp", POLICY | {"num_nextn_predict_layers": 1}).draft_tokens(32) == 32
    three = examine("mtp", POLICY | {"text_config": {"num_nextn_predict_layers": 3}})
    assert [three.draft_tokens(wanted) for wanted in (2, 3, 4, 32, 33)] == [2, 3, 3, 30, 33]
    assert mtp_layers({"text_config": {"mtp_num_hidden_layers": 1}}) == 1


@pytest.mark.parametrize(
    ("config", "positions"),
    [
        ({"max_position_embeddings": 2048}, 2048),
        ({}, None),
        ({"max_position_embeddings": 8192, "rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, 8192),
        ({"max_position_embeddings": 2048, "rope_scaling": {"type": "linear", "factor": 4.0}}, 8192),
        (
            {
                "max_position_embeddings": 40960,
                "rope_parameters": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768},
            },
            131072,
        ),
    ],
)
def test_positions_of_a_drafter(folder, config, positions):
    assert examine(folder(EAGLE3 | config), POLICY).positions == positions
