"""Map the weights of single experts: mbridge knows only Transformer Engine's grouped ones."""

from __future__ import annotations

import re
from typing import Any

from verl_rhyme.patches.conditions import megatron_runs_on_cpu
from verl_rhyme.patches.core import Patch, around

#: megatron-core's local layers keep each expert separate.
_LOCAL = re.compile(r"\.mlp\.experts\.local_experts\.(\d+)\.(linear_fc[12])\.weight$")


def _grouped_names(original: Any, self: Any, model: Any, consider_ep: bool = True) -> dict[str, str]:
    first = 0
    if consider_ep and self.mpu.ep_size > 1:
        first = self.mpu.ep_rank * self.config.num_moe_experts // self.mpu.ep_size

    def grouped(name: re.Match) -> str:
        return f".mlp.experts.{name[2]}.weight{first + int(name[1])}"

    return {local: _LOCAL.sub(grouped, name) for local, name in original(self, model, consider_ep).items()}


PATCH = Patch(
    name="mbridge_expert_names",
    target="mbridge.core.bridge:Bridge._weight_name_mapping_mcore_local_to_global",
    why="Megatron training on a CPU can neither load nor export the weights of experts",
    requires="mbridge==0.15.1",
    source_sha256="6e5d957776c8298848f16af46f80b941de6d303e25e74d1ba3bb9584ae746e8f",
    replace=around(_grouped_names),
    needed=megatron_runs_on_cpu,
)
