"""The model's own drafter (``drafting.model``), from ``config.json``: what vLLM 0.24 makes of it, and what it refuses.

vLLM refuses them only while the engine starts, and a wrong width only in its kernels.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verl_rhyme.config.checks import CONFIG_PATH, Unusable
from verl_rhyme.planning import architecture

MTP = "mtp"
#: Kinds of drafters that rhyme joins, by vLLM's name.
METHODS = (MTP, "eagle", "eagle3", "draft_model")

_KEY = f"{CONFIG_PATH}.drafting.model"
#: Keys of the number of MTP layers, and families of which vLLM loads one where the key is missing, or always.
_MTP_LAYERS = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_modules")
_ONE, _ALWAYS_ONE = re.compile(r"longcat_?flash|step3p|minimax_?m3", re.I), re.compile(r"mimo_?v2", re.I)
#: Parts of a config with the sizes: of a multimodal model, of the formats of speculators and of EAGLE.
_NESTED = ("text_config", "transformer_layer_config", "model")
#: Keys of EAGLE-3 heads only.
_EAGLE3 = {"draft_vocab_size", "target_hidden_size", "eagle_config", "eagle_aux_hidden_state_layer_ids"}
#: Types of rope that vLLM does not scale the positions by.
_UNSCALED = ("su", "longrope", "llama3")


@dataclass(frozen=True)
class OwnDrafter:
    """The drafter that ``drafting.model`` names."""

    model: str  # as vLLM takes it: mtp, an absolute folder, a hub id or a URL
    method: str  # vLLM's, one of METHODS
    sizes: Mapping[str, Any]  # its config, of MTP the policy's; empty if it is not on this machine
    layers: int = 0  # of MTP

    def draft_tokens(self, wanted: int) -> int:
        """Return at most ``wanted``, such that vLLM's MTP layers take turns for whole rounds."""
        return wanted - wanted % self.layers if 0 < self.layers < wanted else wanted

    @property
    def positions(self) -> int | None:
        """The longest sequence that vLLM runs the drafter for; ``None`` if it has the policy's, or is unknown."""
        if self.method == MTP or not (known := self.sizes.get("max_position_embeddings")):
            return None
        rope = self.sizes.get("rope_parameters") or self.sizes.get("rope_scaling") or {}
        kind = rope.get("rope_type") or rope.get("type") or "default"
        if kind == "yarn":
            known = rope.get("original_max_position_embeddings") or known
        return int(known * (1 if kind in _UNSCALED else rope.get("factor") or 1))


def examine(model: str, policy: Mapping[str, Any]) -> OwnDrafter:
    """Return the drafter of a policy whose parsed ``config.json`` is ``policy``, empty if that is not known.

    Raises Unusable.
    """
    target = _sizes(policy)
    if model == MTP:
        layers = mtp_layers(policy)
        if policy and not layers:
            raise Unusable(
                f"{_KEY}=mtp, but the model has no MTP layers: its config.json sets none of {', '.join(_MTP_LAYERS)}",
                f"drop {_KEY} or actor_rollout_ref.model.mtp.enable_rollout=true",
            )
        return OwnDrafter(MTP, MTP, target, layers)
    file, remote = architecture.find(model), architecture.is_hub_id(model) or "://" in model
    if file is None and not remote:
        raise Unusable(
            f"{_KEY}={model}: no such folder, or no config.json in it",
            "set it to the folder or hub id (owner/name) of an EAGLE head or of a small model, to mtp or to null",
        )
    try:
        config = {} if file is None else architecture.read_json(file)
    except ValueError as error:
        raise Unusable(f"{_KEY}: {file}: {error}", "download the drafter again") from None
    # vLLM takes a name without "/" for that of a Python class
    path = model if remote or file is None else str(file.parent.absolute())
    found = OwnDrafter(path, _method(model, config), _sizes(config))
    _check_method(found)
    _check_sizes(found, target)
    return found


def mtp_layers(config: Mapping[str, Any]) -> int:
    """Return the MTP layers that vLLM 0.24 loads of a model (``n_predict``), 0 if it has none."""
    names = " ".join(map(str, (config.get("model_type"), *(config.get("architectures") or ()))))
    if _ALWAYS_ONE.search(names):
        return 1
    sizes = _sizes(config)
    given = next((sizes[key] for key in _MTP_LAYERS if sizes.get(key) is not None), None)
    return bool(_ONE.search(names)) if given is None else int(given)


def _sizes(config: Mapping[str, Any]) -> dict[str, Any]:
    nested: Mapping[str, Any] = next((config[key] for key in _NESTED if isinstance(config.get(key), Mapping)), {})
    return {**config, **nested}


def _method(model: str, config: Mapping[str, Any]) -> str:
    """Return vLLM's method: by the last part of the path, as vLLM does by the whole, or else by the config."""
    kinds = (config.get("model_type"), config.get("speculators_model_type"), *(config.get("architectures") or ()))
    name, signs = Path(model).name.lower(), " ".join(map(str, kinds)).lower()
    for other in ("dflash", "medusa", "mlp_speculator"):
        if other in name or other in signs:
            return other
    if "eagle3" in name or "eagle3" in signs or _EAGLE3 & {*config}:
        return "eagle3"
    # no small model has a single layer
    return "eagle" if "eagle-" in name or "eagle" in signs or config.get("num_hidden_layers") == 1 else "draft_model"


def _check_method(found: OwnDrafter) -> None:
    if found.method not in METHODS:
        raise Unusable(
            f"{_KEY}={found.model} is a drafter of the kind {found.method}",
            "give the folder of an EAGLE head or of a small model, or mtp",
        )
    sign = next((sign for sign in ("eagle-", "eagle3", "dflash") if sign in found.model.lower()), None)
    if found.method == "draft_model" and sign:
        raise Unusable(
            f"{_KEY}={found.model} is a small model, but vLLM takes any path with {sign!r} for another kind of drafter",
            "rename that folder, or link to the small model from another one",
        )


def _check_sizes(found: OwnDrafter, policy: Mapping[str, Any]) -> None:
    mine, head = found.sizes, found.method != "draft_model"
    pairs = {"vocabulary entries": (mine.get("vocab_size"), policy.get("vocab_size"))}
    if head:
        pairs["values of a hidden state"] = (
            mine.get("target_hidden_size") or mine.get("hidden_size"),
            policy.get("hidden_size"),
        )
    for what, (has, needed) in pairs.items():
        if has is not None and needed is not None and has != needed:
            raise Unusable(
                f"{_KEY}={found.model} has {has} {what}, and the model has {needed}",
                f"give {'an EAGLE head that was trained for this model' if head else 'a model of the same vocabulary'}"
                f", or drop {_KEY}",
            )
