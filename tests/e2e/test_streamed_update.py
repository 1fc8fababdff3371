"""The optimizer's step of a mini-batch that comes in parts is the one that verl takes of all of it at once."""

import numpy as np
import pytest
from ranks import MODELS, run

from tests.conftest import ONLY_SLOW, examples

pytestmark = pytest.mark.xdist_group("megatron_engine")

#: Rows of a mini-batch of 8, of unequal lengths, as they come; two data parallel ranks share each part.
UNEVEN = [[6, 1], [2, 4, 5, 0], [3, 7]]
TOKENS = {"loss_agg_mode": "token-mean"}
#: Losses that are divided by tokens and by samples, with all their terms.
LOSSES = (
    {**TOKENS, "use_kl_loss": True, "entropy_coeff": 0.01},
    {"loss_agg_mode": "seq-mean-token-sum", "by_tokens": False, "use_kl_loss": True},
)
WRONG_SCALE = {**TOKENS, "by_tokens": False}
#: Each of two ranks, and with the loss that is divided by tokens.
ENGINES = {
    "megatron-pp2": {"engine": "megatron", "pp": 2, "options": {"virtual_pipeline_model_parallel_size": 2}},
    # reduced bucket by bucket, beside the backward pass
    "megatron-dp2": {
        "engine": "megatron",
        "options": {"override_ddp_config": {"overlap_grad_reduce": True, "bucket_size": 2000}},
        "dynamic": True,
    },
    "megatron-tp2": {"engine": "megatron", "tp": 2},
}
DAILY = ("megatron-pp2",)
STEPS = examples(5, slow=10)  # the weights move far beyond rounding


def steps(world, cases, **settings):
    model = str(MODELS / "qwen2")
    return run(world, "streamed_steps", model=model, parts=UNEVEN, cases=cases, steps=STEPS, **settings)


def assert_same(reported):
    whole, streamed = np.array(reported["whole"]), np.array(reported["streamed"])
    assert len(whole) == STEPS
    np.testing.assert_allclose(streamed[0], whole[0], rtol=1e-5)
    # Adam divides by the gradients' size: rounding of the smallest ones grows with every update.
    np.testing.assert_allclose(streamed, whole, rtol=1e-3, atol=1e-6)
    assert reported["apart"] < 0.02 * reported["moved"], "the weights went elsewhere"
    assert reported["moved"] > 1e-3, "nothing was learnt"


@pytest.mark.parametrize("engine", [name if name in DAILY else pytest.param(name, marks=ONLY_SLOW) for name in ENGINES])
def test_updates_in_parts_are_those_of_the_whole(engine):
    [reported] = steps(2, [TOKENS], **ENGINES[engine])
    assert_same(reported)


def test_whatever_the_loss_is_divided_by():
    *losses, wrong_scale = steps(2, [*LOSSES, WRONG_SCALE], engine="fsdp2", dynamic=True)
    for reported in losses:
        assert_same(reported)
    with pytest.raises(AssertionError):
        assert_same(wrong_scale)
