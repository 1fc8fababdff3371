"""Why models with recurrent layers are not drafted for: which state vLLM's own metadata reads after accepted drafts.

Each request has a state for every token of its last step, in the columns of its block table; the true one is that of
the last accepted token. When a test here fails, vLLM has mended what it shows, and the refusal in
``verl_rhyme/drafting/recurrent.py`` may be looked at anew for that family: what stands in the way is each of them.
"""

import inspect
import re
from pathlib import Path

import pytest
import torch
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.models import registry
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends.gdn_attn import GDNAttentionMetadataBuilder
from vllm.v1.attention.backends.linear_attn import LinearAttentionMetadataBuilder
from vllm.v1.attention.backends.mamba1_attn import Mamba1AttentionMetadataBuilder
from vllm.v1.attention.backends.mamba2_attn import Mamba2AttentionMetadataBuilder
from vllm.v1.attention.backends.short_conv_attn import ShortConvAttentionMetadataBuilder
from vllm.v1.kv_cache_interface import MambaSpec
from vllm.v1.worker.gpu_input_batch import InputBatch
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from verl_rhyme.drafting.recurrent import recurrent

LONGEST, BLOCK = 3, 64
#: Block table of two requests: the states of their last step's 1 + LONGEST tokens.
STATES = torch.tensor([[10, 11, 12, 13], [20, 21, 22, 23]], dtype=torch.int32)
#: Tokens that their last step yielded, so that their states are these.
YIELDED, TRUE = [3, 2], [12, 21]


def engine_config(folder, model_type):
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    names = {"qwen3_next": "Qwen3NextForCausalLM", "mamba2": "Mamba2ForCausalLM"}
    CONFIG_MAPPING[model_type](architectures=[names[model_type]]).save_pretrained(folder)
    drafts = {"method": "ngram", "num_speculative_tokens": LONGEST, "prompt_lookup_max": 2}
    return EngineArgs(
        model=str(folder), skip_tokenizer_init=True, max_model_len=1024, dtype="bfloat16", speculative_config=drafts
    ).create_engine_config()


@pytest.fixture(scope="module", params=["none", "align"])
def builders(request, tmp_path_factory):
    """Of a gated delta net and of Mamba-2, in a cache mode without and with prefix caching."""
    made = {}
    for model_type, builder in (
        ("qwen3_next", GDNAttentionMetadataBuilder),
        ("mamba2", Mamba2AttentionMetadataBuilder),
    ):
        config = engine_config(tmp_path_factory.mktemp(model_type), model_type)
        config.cache_config.mamba_cache_mode = request.param
        spec = MambaSpec(
            block_size=BLOCK,
            shapes=((4,),),
            dtypes=(torch.bfloat16,),
            mamba_cache_mode=request.param,
            num_speculative_blocks=LONGEST,
        )
        made[builder] = builder(spec, ["layer"], config, torch.device("cpu"))
    return made


def built(builder, drafts):
    """Metadata of a step in which these requests verify so many drafts, given what the model runner gives.

    ``GPUModelRunner._build_attention_metadata`` passes counts of accepted tokens where any request has drafts, and -1
    drafts for one that has none (``_prepare_inputs``).
    """
    tokens = torch.tensor([1 + n for n in drafts])
    starts = torch.cat([torch.zeros(1), tokens.cumsum(0)]).to(torch.int32)
    lengths = torch.tensor([30, 40], dtype=torch.int32) + tokens.to(torch.int32)  # all in their first block
    common = CommonAttentionMetadata(
        query_start_loc=starts,
        query_start_loc_cpu=starts,
        seq_lens=lengths,
        seq_lens_cpu_upper_bound=lengths,
        num_reqs=2,
        num_actual_tokens=int(tokens.sum()),
        max_query_len=int(tokens.max()),
        max_seq_len=int(lengths.max()),
        block_table_tensor=STATES,
        slot_mapping=torch.zeros(int(tokens.sum()), dtype=torch.int64),
        is_prefilling=torch.zeros(2, dtype=torch.bool),
    )
    counts = {}
    if any(drafts):
        counts = {
            "num_accepted_tokens": torch.tensor(YIELDED, dtype=torch.int32),
            "num_decode_draft_tokens_cpu": torch.tensor([n or -1 for n in drafts], dtype=torch.int32),
        }
    return builder.build(0, common, **counts)


def read(metadata):
    """The state that each request goes on from, as the layers' kernels choose it from the metadata."""
    accepted = metadata.num_accepted_tokens
    if hasattr(metadata, "state_indices_tensor_d"):  # Mamba
        columns = metadata.state_indices_tensor_d
        return [int(columns[row, accepted[row] - 1 if accepted is not None else 0]) for row in range(len(columns))]
    if metadata.spec_sequence_masks is None:
        return metadata.non_spec_state_indices_tensor.tolist()
    drafted, plain = (
        iter(range(2)),
        iter(metadata.non_spec_state_indices_tensor.tolist() if accepted.numel() < 2 else ()),
    )
    columns, found = metadata.spec_state_indices_tensor, []
    for has_drafts in metadata.spec_sequence_masks.tolist():
        if has_drafts:
            row = next(drafted)
            found.append(int(columns[row, accepted[row] - 1]))
        else:
            found.append(next(plain))
    return found


def test_where_every_request_has_drafts_all_read_their_own_state(builders):
    assert {builder: read(built(builder_of, [2, 1])) for builder, builder_of in builders.items()} == dict.fromkeys(
        builders, TRUE
    )


def test_a_gated_delta_net_reads_a_stale_state_for_a_request_without_drafts(builders):
    builder = builders[GDNAttentionMetadataBuilder]
    assert read(built(builder, [0, 1])) == [10, 21] != TRUE
    assert read(built(builder, [0, 0])) == [10, 20] != TRUE


def test_mamba_2_reads_stale_states_in_a_step_without_drafts(builders):
    builder = builders[Mamba2AttentionMetadataBuilder]
    assert read(built(builder, [0, 1])) == TRUE
    assert read(built(builder, [0, 0])) == [10, 20] != TRUE


def test_mamba_1_short_convolutions_and_linear_attention_never_get_the_counts():
    source = inspect.getsource(GPUModelRunner._build_attention_metadata)
    assert "builder, (Mamba2AttentionMetadataBuilder, GDNAttentionMetadataBuilder)" in source
    given = (Mamba2AttentionMetadataBuilder, GDNAttentionMetadataBuilder)
    for builder in (
        Mamba1AttentionMetadataBuilder,
        ShortConvAttentionMetadataBuilder,
        LinearAttentionMetadataBuilder,
    ):
        assert not issubclass(builder, given)


def test_a_request_that_sits_out_a_step_loses_its_count():
    """A step's token budget may leave a running request out. The runner takes it out of its batch and adds it later as
    a new one, whose state would be in the first column. To draft at least one token always does not help.
    """
    assert "self.num_accepted_tokens_cpu[req_index] = 1" in inspect.getsource(InputBatch.add_request)
    source = inspect.getsource(GPUModelRunner._update_states)
    assert "unscheduled_req_ids = cached_req_ids - (scheduled_req_ids - resumed_req_ids)" in source


def marked(names=("IsHybrid", "HasInnerState", "IsAttentionFree")):
    """Architectures of vLLM's registry whose class has one of these interfaces, read from the source: importing all
    of them takes minutes."""
    bases = {}
    for file in Path(registry.__file__).parent.rglob("*.py"):
        for name, listed in re.findall(r"^class (\w+)\(([^)]*)\)", file.read_text(), re.MULTILINE):
            bases.setdefault(name, set()).update(re.findall(r"\w+", listed))

    def inherits(name, above=()):
        return name not in above and any(
            base in names or inherits(base, (*above, name)) for base in bases.get(name, ())
        )

    return {architecture for architecture, (_, name) in registry._VLLM_MODELS.items() if inherits(name)}


def test_every_recurrent_architecture_of_vllm_is_recognised_by_name_and_no_other():
    pooling = {"PrithviGeoSpatialMAE", "Terratorch"}  # without attention, and without tokens
    named = {name for name in registry._VLLM_MODELS if recurrent({"architectures": [name]})}
    drafts = {name for name in named if name.endswith(("MTP", "MTPModel"))}  # of such models, for themselves
    assert named - drafts == marked() - pooling
