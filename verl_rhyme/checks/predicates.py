"""Conditions of the table of :mod:`verl_rhyme.checks.combinations`, and the keys that they read."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from omegaconf import OmegaConf

from verl_rhyme.config import SINGLE_ESTIMATORS, TOPOLOGIES, RhymeConfig
from verl_rhyme.drafting import recurrent
from verl_rhyme.planning import architecture
from verl_rhyme.scheduling.rules import Rules

ACTOR = "actor_rollout_ref.actor"
ROLLOUT = "actor_rollout_ref.rollout"
ENGINE = f"{ROLLOUT}.engine_kwargs.vllm"
MODE = "trainer.v1.trainer_mode"
CORRECTION = "algorithm.rollout_correction"
ESTIMATOR = "algorithm.adv_estimator"
FILTER = "algorithm.filter_groups.enable"
RESUME = "trainer.resume_mode"
PROMPT, RESPONSE = "data.max_prompt_length", "data.max_response_length"
MERGE = "actor_rollout_ref.model.lora.merge"
#: Rank of adapters, to FSDP and to Megatron.
RANK, MEGATRON_RANK = "actor_rollout_ref.model.lora_rank", "actor_rollout_ref.model.lora.rank"
#: Folder of an adapter to begin with, to FSDP and to Megatron.
ADAPTER, MEGATRON_ADAPTER = "actor_rollout_ref.model.lora_adapter_path", "actor_rollout_ref.model.lora.adapter_path"
STRATEGY = f"{ACTOR}.strategy"
SLOTS = f"{ROLLOUT}.max_num_seqs"

#: Values of ``policy_loss.loss_mode`` without a ratio to the sampling policy: only ``rollout_is_weights`` correct them.
#: All other losses of verl 0.9.1 take ``old_log_probs``.
RATIO_FREE_LOSSES = ("gpg",)


@dataclass(frozen=True)
class Run:
    """Configuration of a run, as the rows read it; ``rules`` are ``None`` also where options contradict each other."""

    config: Any
    rhyme: RhymeConfig | None
    rules: Rules | None

    def value(self, key: str) -> Any:
        """Return the value of ``key``, ``None`` if it is not set; the prefix ``rhyme.`` selects the rhyme tree."""
        prefix, _, ours = key.partition(".")
        if prefix == "rhyme":
            return functools.reduce(getattr, ours.split("."), self.rhyme)
        tree, _, option = key.rpartition(".")
        if tree != ENGINE:
            return OmegaConf.select(self.config, key, throw_on_missing=True)
        # verl passes them to vLLM's command line, which also accepts dashes, abbreviations and subkeys (``a.b``).
        given = OmegaConf.select(self.config, tree, throw_on_missing=True) or {}
        named = ((str(name).replace("-", "_").partition(".")[0], value) for name, value in given.items())
        return next((value for name, value in named if name and option.startswith(name)), None)

    @property
    def topology(self) -> str | None:
        """``"colocated"``, ``"separate"``, or ``None`` for a user's own trainer."""
        return TOPOLOGIES.get(str(self.value(MODE)))

    @property
    def megatron(self) -> bool:
        return str(self.value(STRATEGY)) == "megatron"

    @property
    def critic(self) -> bool:
        """Whether a critic is trained, by verl's rule."""
        enabled = self.value("critic.enable")
        return self.value(ESTIMATOR) == "gae" if enabled is None else bool(enabled)

    @property
    def drafting(self) -> bool:
        return self.rhyme is not None and self.rhyme.drafting.enable

    @property
    def pipeline(self) -> bool:
        return self.rhyme is not None and self.rhyme.pipeline

    @property
    def stale(self) -> bool:
        return self.rules is not None and self.rules.max_staleness > 0


def engine_drafter(run: Run) -> str | None:
    """Return the model's own drafter in the engines: ``drafting.model`` of a run that drafts, or verl's MTP."""
    own = run.rhyme.drafting.model if run.rhyme is not None and run.drafting else None
    mtp = run.value(f"{ROLLOUT}.mtp.enable") and run.value(f"{ROLLOUT}.mtp.enable_rollout")
    return own or ("mtp" if mtp else None)


def drafting_model(run: Run) -> str | None:
    """Return the same of a run that drafts."""
    return engine_drafter(run) if run.drafting else None


def several(size: Any, run: Run) -> bool:
    return int(size or 1) > 1


def differs_from(key: str) -> Callable[[Any, Run], bool]:
    return lambda value, run: value is not None and value != run.value(key)


def _fields(path: Any) -> dict[str, Any]:
    """Return a local ``config.json``; empty if there is none. Engines check the loaded model's layers as well."""
    file = architecture.find(str(path))
    try:
        return {} if file is None else architecture.read_json(file)
    except ValueError:  # the preflight's model check reports it
        return {}


def has_undrafted_layers(path: Any, run: Run) -> bool:
    return bool(recurrent.undrafted(_fields(path)))


def counts_no_states(ahead: bool | None, run: Run) -> bool:
    fields = _fields(run.value("actor_rollout_ref.model.path"))
    return ahead is not None and not ahead and bool(recurrent.recurrent(fields))


def hardly_loads_blocks(size: Any, run: Run) -> bool:
    """Whether engines hardly load the KV blocks that they store in host memory: vLLM leaves out blocks of drafters
    (vllm 46971, 52735), and keeps recurrent states for prefix caching only, which is off beside drafts.
    """
    fields = _fields(run.value("actor_rollout_ref.model.path"))
    return bool(size) and bool(engine_drafter(run) or recurrent.recurrent(fields))


def below_one_response(tokens: int, run: Run) -> bool:
    prompt, response = run.value(PROMPT), run.value(RESPONSE)
    return None not in (prompt, response) and tokens < int(prompt) + int(response)


def splits_groups(unit: str | None, run: Run) -> bool:
    """Whether trajectories are trained one by one although the estimator or filter compares a prompt's samples."""
    alone = run.rules is not None and run.rules.unit == "trajectory"
    return alone and (bool(run.value(FILTER)) or run.value(ESTIMATOR) not in SINGLE_ESTIMATORS)


def uncorrected(loss: str | None, run: Run) -> bool:
    if loss == "bypass_mode":  # verl's V1 trainer gives this loss a separate correction config
        own = run.value("actor_rollout_ref.actor.policy_loss.rollout_correction") or {}
        return own.get("loss_type") == "reinforce" and not (own.get("rollout_is") or own.get("rollout_rs"))
    kinds = [run.value(f"{CORRECTION}.{name}") for name in ("rollout_is", "rollout_rs")]
    return loss in RATIO_FREE_LOSSES and (bool(run.value(f"{CORRECTION}.bypass_mode")) or not any(kinds))


def resumes(run: Run) -> bool:
    return run.rhyme is not None and run.value(RESUME) in ("auto", "resume_path")


def loads_no_weights(parts: Any, run: Run) -> bool:
    """Whether a resume leaves the weights out; only Megatron loads ``hf_model``."""
    return parts is not None and "model" not in parts and not (run.megatron and "hf_model" in parts)


def trains_lora(run: Run) -> bool:
    return any(int(run.value(key) or 0) > 0 for key in (RANK, MEGATRON_RANK))


def other_rank(key: str, when: Callable[[Run], bool]) -> Callable[[Any, Run], bool]:
    """Whether an engine that reads only ``key`` finds no rank there."""
    return lambda rank, run: when(run) and int(rank or 0) > 0 and not int(run.value(key) or 0)


def unread_adapter(megatron: bool) -> Callable[[Any, Run], bool]:
    """Whether an adapter's folder is not read: the key is that of Megatron or of FSDP, and each reads its own alone,
    where it has a rank."""
    rank = MEGATRON_RANK if megatron else RANK
    return lambda folder, run: folder is not None and (run.megatron != megatron or not int(run.value(rank) or 0))


def adapters_in_engines(run: Run) -> bool:
    return run.topology != "separate" and trains_lora(run) and not run.value(MERGE)


def below_drafts(tokens: int | None, run: Run) -> bool:
    return int(tokens or 0) < 2 * int(run.value(SLOTS) or 0)
