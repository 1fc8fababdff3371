"""What does not go together, why, and what to do instead: the one table, and the one list of systems.

Start-up (:mod:`verl_rhyme.startup`), the preflight and, of the list, the run scripts (``recipes/settings.sh``) read
them; ``docs/combinations.md`` shows them.  What excludes itself within our own tree is refused where that is read
(:mod:`verl_rhyme.config`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from verl_rhyme.config import CONFIG_PATH, RhymeConfig

#: What ``+rhyme=histospec`` and ``+rhyme=sorted`` set as :data:`MANAGER`.
DRAFTING_MANAGER = "verl_rhyme.workers.agent_loop.RhymeAgentLoopManager"
SORTED_MANAGER = "verl_rhyme.workers.agent_loop.SessionAgentLoopManager"
MANAGER = "actor_rollout_ref.rollout.agent.agent_loop_manager_class"

_ROLLOUT = "actor_rollout_ref.rollout"
_MODE = "trainer.v1.trainer_mode"
_LIST = Path(__file__).with_name("conf") / "systems.txt"


@dataclass(frozen=True)
class System:
    """One value of the run scripts' ``RHYME``.

    Attributes:
        name: As in ``RHYME=name`` and, but for ``off``, ``+rhyme=name``.
        ready: ``False`` where it is planned and not there yet.
        modes: The run scripts' ``MODE`` that it works with; ``None`` for any.
        what: In a few words.
    """

    name: str
    ready: bool
    modes: tuple[str, ...] | None
    what: str


@functools.cache
def systems() -> Mapping[str, System]:
    """All of ``conf/systems.txt`` by name, in its order."""
    found = {}
    for line in _LIST.read_text().splitlines():
        if line and not line.startswith("#"):
            name, state, modes, what = line.split(maxsplit=3)
            allowed = () if modes == "-" else tuple(modes.split(","))
            found[name] = System(name, state == "ready", None if modes == "any" else allowed, what)
    return found


@dataclass(frozen=True)
class Combination:
    """A row of the table.

    Attributes:
        keys: What it looks at: keys of verl's config; ``rhyme.`` stands for ours, read as typed, with its defaults.
        refused: Whether these values, in the order of ``keys``, are refused; ``None`` for what is not set.
        reason: Why.
        remedy: What to do instead.
        rhyme: ``False`` for what is refused without rhyme (no tree, or ``enable=false``).
    """

    keys: tuple[str, ...]
    refused: Callable[..., bool]
    reason: str
    remedy: str
    rhyme: bool = True


@dataclass(frozen=True)
class Refusal:
    """What of a config is refused, in one line, and how to mend it, in another."""

    detail: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.detail}; {self.remedy}"


TABLE = (
    Combination(
        (f"{_ROLLOUT}.name",),
        lambda engine: engine != "vllm",
        "rhyme works with vllm only",
        f"set {_ROLLOUT}.name=vllm",
    ),
    Combination(
        (f"{_ROLLOUT}.disaggregation.enabled",),
        bool,
        "rhyme does not work with prefill and decoding apart",
        "drop it",
    ),
    Combination(
        ("trainer.use_v1",),
        lambda v1: v1 is not None and not v1,
        "rhyme needs verl's V1 trainer",
        "drop it",
    ),
    Combination(
        (f"{_ROLLOUT}.engine_kwargs.vllm.speculative_config", "rhyme.drafting.enable"),
        lambda theirs, ours: bool(theirs and ours),
        "an engine drafts in one way",
        f"drop the first, or set {CONFIG_PATH}.drafting.enable=false",
    ),
    # vLLM answers a question to all workers with the first engine's answer (DPLBAsyncMPClient.call_utility_async): that
    # another one runs without our proposer or sampler would go unseen, and its counts would be lost. Coupled sampling,
    # too, is refused without drafting (config.py).
    Combination(
        (f"{_ROLLOUT}.data_parallel_size", "rhyme.drafting.enable"),
        lambda size, drafting: int(size or 1) > 1 and drafting,
        "vLLM lets us see the first of a replica's engines only",
        f"set {_ROLLOUT}.data_parallel_size=1: verl then makes that many times the replicas of the same GPUs; or set "
        f"{CONFIG_PATH}.enable=false (a mixture of experts that needs it for its experts)",
    ),
    Combination(
        (_MODE, "rhyme.sorting.mode"),
        lambda trainer, sorting: (trainer == "rhyme_sorted") != (sorting is not None),
        "they contradict each other; +rhyme=sorted sets both",
        f"drop the override of one, or set {CONFIG_PATH}.sorting.mode=null for another trainer mode",
    ),
    Combination(
        (f"{_ROLLOUT}.enable_rollout_routing_replay", "rhyme.sorting.mode"),
        lambda replay, sorting: bool(replay) and sorting == "partial",
        "the experts of a response that several policies made cannot be replayed",
        f"set {_ROLLOUT}.enable_rollout_routing_replay=false, or {CONFIG_PATH}.sorting.mode=on_policy",
    ),
    Combination(
        (f"{_ROLLOUT}.calculate_log_probs", "rhyme.sorting.mode"),
        lambda logprobs, sorting: not logprobs and sorting == "partial",
        "partial mode needs the log-probabilities that tokens were made with",
        f"set {_ROLLOUT}.calculate_log_probs=true",
    ),
    Combination(
        ("trainer.v1.sampler.custom_sampler.path", "rhyme.sorting.mode"),
        lambda path, sorting: bool(path) and sorting is not None,
        "a sampler of your own is ignored by rhyme_sorted, whose scheduler decides what is sampled",
        "set trainer.v1.sampler.custom_sampler.path=null, or use another trainer mode",
    ),
    Combination(
        ("actor_rollout_ref.actor.shuffle", "rhyme.sorting.mode"),
        lambda shuffle, sorting: bool(shuffle) and sorting is not None,
        "shuffling undoes the order of rhyme_sorted",
        f"set actor_rollout_ref.actor.shuffle=false, and {CONFIG_PATH}.sorting.order=0 for a shuffled batch",
    ),
    Combination(
        (_MODE,),
        lambda mode: str(mode).startswith("rhyme_"),
        f"it needs {CONFIG_PATH}.enable=true, which +rhyme=sorted sets with it",
        "for stock verl drop +rhyme=sorted",
        rhyme=False,
    ),
    Combination(
        (MANAGER,),
        lambda manager: manager == SORTED_MANAGER,
        f"it needs {CONFIG_PATH}.enable=true, which +rhyme=sorted sets with it",
        "for stock verl drop +rhyme=sorted",
        rhyme=False,
    ),
)


def refusals(config: Any, rhyme: RhymeConfig | None) -> Iterator[Refusal]:
    """Those rows of :data:`TABLE` that a config meets; imports nothing.

    Args:
        config: verl's whole config.
        rhyme: Our tree in it; ``None`` without rhyme.
    """
    for row in TABLE:
        if row.rhyme != (rhyme is not None):
            continue
        values = [_value(config, rhyme, key) for key in row.keys]
        if row.refused(*values):
            told = " with ".join(_told(key, value) for key, value in zip(row.keys, values, strict=True))
            yield Refusal(f"{told}: {row.reason}", row.remedy)


def group_not_found(name: str) -> Refusal:
    """Of ``+rhyme=name`` that hydra took for a plain value: its config group was not there."""
    groups = [system.name for system in systems().values() if system.ready and system.name != "off"]
    use = " or ".join(f"+rhyme={group}" for group in groups)
    found = systems().get(name)
    if name in groups:
        remedy = "verl-rhyme is not installed beside verl (pip show verl-rhyme): install it there"
    elif found is not None and not found.ready:
        remedy = f"it does not exist yet; use {use}"
    else:
        remedy = f"there is no such group; use {use}, or nothing for stock verl"
    return Refusal(f"+rhyme={name} did not find its config group", remedy)


def _value(config: Any, rhyme: RhymeConfig | None, key: str) -> Any:
    prefix, _, ours = key.partition(".")
    if prefix != "rhyme":
        return OmegaConf.select(config, key, throw_on_missing=True)
    return functools.reduce(getattr, ours.split("."), rhyme)


def _told(key: str, value: Any) -> str:
    key = f"{CONFIG_PATH}{key.removeprefix('rhyme')}" if key.startswith("rhyme.") else key
    if OmegaConf.is_config(value):
        return key
    return f"{key}={str(value).lower() if isinstance(value, bool) else 'null' if value is None else value}"
