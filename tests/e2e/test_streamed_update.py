"""The optimizer's step of a mini-batch that comes in parts is the one that verl takes of all of it at once."""

import numpy as np
import pytest
from test_megatron import MODELS, run

pytestmark = pytest.mark.xdist_group("megatron_engine")

#: Rows of a mini-batch of 8, of unequal lengths, as they come; two data parallel ranks share each part.
UNEVEN = [[6, 1], [2, 4, 5, 0], [3, 7]]
ENGINES = {
    "fsdp": {"engine": "fsdp2"},
    "fsdp-dp2": {"engine": "fsdp2", "world": 2},
    "megatron": {"engine": "megatron"},
    "megatron-dp2": {"engine": "megatron", "world": 2},
    # reduced bucket by bucket, beside the backward pass
    "megatron-overlap": {
        "engine": "megatron",
        "world": 2,
        "options": {"override_ddp_config": {"overlap_grad_reduce": True, "bucket_size": 2000}},
    },
    "megatron-interleaved": {
        "engine": "megatron",
        "world": 2,
        "pp": 2,
        "options": {"virtual_pipeline_model_parallel_size": 2},
    },
    "megatron-tp2": {"engine": "megatron", "world": 2, "tp": 2},
    "megatron-pp2": {"engine": "megatron", "world": 2, "pp": 2},
}
#: Losses that are divided by tokens and by samples, with and without all their terms.
LOSSES = {
    "tokens": {"loss_agg_mode": "token-mean"},
    "sequences": {"loss_agg_mode": "seq-mean-token-mean", "by_tokens": False},
    "all terms": {"loss_agg_mode": "token-mean", "use_kl_loss": True, "entropy_coeff": 0.01},
    "gspo": {"loss_agg_mode": "seq-mean-token-sum", "by_tokens": False, "use_kl_loss": True},
}


def steps(world=1, **settings):
    return run(world, "streamed_steps", model=str(MODELS / "qwen2"), parts=UNEVEN, **settings)


def assert_same(told):
    whole, streamed = np.array(told["whole"]), np.array(told["streamed"])
    assert len(whole) == 10
    np.testing.assert_allclose(streamed[0], whole[0], rtol=1e-5)
    # Adam divides by the gradients' size: rounding of the smallest ones grows with every update.
    np.testing.assert_allclose(streamed, whole, rtol=1e-3, atol=1e-6)
    assert told["apart"] < 0.02 * told["moved"], "the weights went elsewhere"
    assert told["moved"] > 1e-3, "nothing was learnt"


@pytest.mark.parametrize("engine", ENGINES)
def test_ten_updates_in_parts_are_those_of_the_whole(engine):
    assert_same(steps(**ENGINES[engine], dynamic=engine.endswith("dp2")))


@pytest.mark.parametrize("loss", LOSSES)
def test_whatever_the_loss_is_divided_by(loss):
    assert_same(steps(engine="fsdp2", **LOSSES[loss]))


def test_a_wrong_scale_is_noticed():
    with pytest.raises(AssertionError):
        assert_same(steps(engine="fsdp2", loss_agg_mode="token-mean", by_tokens=False))
