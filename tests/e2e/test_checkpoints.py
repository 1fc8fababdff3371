"""An engine starts from what another one has saved, or the combination of options is refused before the run."""

import numpy as np
import pytest
from ranks import MODELS, run

from tests.conftest import ONLY_SLOW
from tests.unit.configs import verl_config
from verl_rhyme.checks import combinations
from verl_rhyme.config import config_tree

pytestmark = [ONLY_SLOW, pytest.mark.xdist_group("megatron_engine")]  # versions are pinned: what verl restores is known

ALL = ["model", "optimizer", "extra"]
#: Saved and loaded contents, further options, whether all is restored, the weights or nothing, and whether the checks
#: refuse it.
CASES = [
    (["model"], ["model"], {}, "weights", False),
    (ALL, ["model"], {}, "weights", False),
    (["model"], ALL, {}, "nothing", True),
]
FSDP = [  # one checkpoint manager for FSDP and FSDP2; FSDP needs a GPU
    *CASES,
    (ALL, ALL, {}, "all", False),
    (["hf_model"], ["hf_model"], {}, "nothing", True),
    (["optimizer", "extra"], ["optimizer", "extra"], {}, "nothing", True),
    (ALL, ALL, {"async_save": True}, "all", True),  # verl's trainer does not mark it as the latest
]
MEGATRON = [
    (ALL, ALL, {"schedule": True}, "all", False),
    *CASES,
    (ALL, ALL, {}, "weights", False),  # its optimizer too, but not the schedule of the learning rate
    (["hf_model"], ["hf_model"], {}, "weights", False),
    (["hf_model"], ["model"], {}, "weights", False),
    # the optimizer's own copy of the weights, which here, in FP32, is the model's
    (["optimizer", "extra"], ["optimizer", "extra"], {}, "weights", True),
    (ALL, ALL, {"async_save": True}, "nothing", True),  # last: its results stay in Megatron's queue
]
#: Options of the engine; the others are those of the checkpoint.
ENGINE = ("schedule",)
ENGINES = {"fsdp2": FSDP, "megatron": MEGATRON}


def refused(engine, save, load, options):
    kept = {name: value for name, value in options.items() if name not in ENGINE}
    checkpoint = {"save_contents": save, "load_contents": load, **kept}
    changes = [f"actor_rollout_ref.actor.checkpoint.{name}={value}" for name, value in checkpoint.items()]
    config = verl_config(
        "histospec", f"actor_rollout_ref.actor.strategy={engine}", "trainer.resume_mode=auto", *changes
    )
    return bool(list(combinations.refusals(config, config_tree.from_verl(config))))


def restored(saved, loaded, new):
    """What was loaded, by the steps (loss, gradient norm, learning rate) after saving, after loading, and of a new
    engine."""
    if isinstance(loaded, str):  # an error
        return "nothing"
    if np.allclose(saved, loaded, rtol=1e-4):
        return "all"
    losses = [steps[0][0] for steps in (saved, loaded, new)]
    return "weights" if np.isclose(losses[1], losses[0], rtol=1e-4) and losses[1] != losses[2] else "nothing"


def test_an_engine_starts_from_what_was_saved_or_is_refused(tmp_path):
    cases = {
        engine: [
            {
                "save": save,
                "load": load,
                "options": {name: value for name, value in options.items() if name in ENGINE},
                "checkpoint": {name: value for name, value in options.items() if name not in ENGINE},
            }
            for save, load, options, *_ in each
        ]
        for engine, each in ENGINES.items()
    }
    found = run(1, "saved_steps", model=str(MODELS / "qwen2"), folder=str(tmp_path), cases=cases)
    for engine, each in ENGINES.items():
        expected = [wanted for *_, wanted, _ in each]
        assert [restored(*steps) for steps in found[engine]] == expected, (engine, found[engine])
        for save, load, options, _, wanted in each:
            assert refused(engine, save, load, options) == wanted, (engine, save, load, options)
