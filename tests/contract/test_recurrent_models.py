"""Every model of vLLM with recurrent layers is recognised, so that none is drafted for."""

import re
from pathlib import Path

from vllm.model_executor.models import registry

from verl_rhyme.drafting.recurrent import recurrent


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
