"""Shape of a run: the few sizes from which plan file and cluster file are made.

What it does not give is assumed: lengths of responses, and seconds of a step's fixed work (the constants).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from omegaconf import MISSING

from verl_rhyme.config.checks import nearest
from verl_rhyme.planning import profile, roofline
from verl_rhyme.planning.architecture import Architecture
from verl_rhyme.planning.sites import Model, Pool
from verl_rhyme.planning.times import Training, Work, rollout
from verl_rhyme.planning.typed_yaml import ClusterError, refuse, typed
from verl_rhyme.planning.workload import Lengths

#: What errors name in place of a file.
SOURCE = Path("shape")
#: Lengths as shares of the limit, by percentile: those of examples/simulate/dapo32b.yaml.
PERCENTILES = {50.0: 0.122, 90.0: 0.44, 99.0: 0.88}
#: Lowest acceptance lengths by entropy (nats a token), of first and of later epochs: docs/choosing.md, replays. Below
#: 0.25 nats they stay; 1 at 4 nats is assumed.
ACCEPTANCE = ((0.25, 2.0, 4.3), (0.4, 1.7, 2.4), (0.9, 1.5, 1.9), (2.2, 1.2, 1.3), (4.0, 1.0, 1.0))
#: Verified draft tokens per gained token, those of the trace ``roads``.
OVERHEAD = 2.77
#: Seconds of a training step in addition to its tokens, and bytes a second of a copy of the weights.
UPDATE, COPIED = 5.0, 13e9
#: Bytes of a GPU's memory for activations and buffers of training.
RESERVE = 20e9
#: Seconds from a response's end to its reward.
REWARD = 0.5
#: Samples of a batch that are simulated in one piece.
MOST = 2048


@dataclass
class Shape:
    """``gpu=h100 gpus=8 model=Qwen/Qwen3-8B batch=128 samples=16 response=8192``."""

    gpu: str = MISSING  # a data sheet's name
    gpus: int = MISSING  # for rollout and training together
    model: str = MISSING  # a published name, or a config.json or its folder
    batch: int = MISSING  # prompts of a training step
    samples: int = MISSING  # of each prompt
    response: int = MISSING  # most tokens of a response
    mean: float | None = None  # tokens of a response; None: by PERCENTILES
    prompt: int = 512  # tokens
    entropy: float = 0.4  # nats per token
    tp: int | None = None  # GPUs of a replica; None: those with which stock verl is fastest
    node: int = 8  # GPUs of a node

    @classmethod
    def parse(cls, pairs: Sequence[str], given: Mapping[str, Any] | None = None) -> Shape:
        """Return the shape of ``KEY=VALUE`` arguments, which win over those of a command. Raises ClusterError."""
        tree = dict(given or {})
        for pair in pairs:
            key, equals, value = pair.partition("=")
            if not equals or not value:
                raise ClusterError(f"{SOURCE}: write {pair!r} as KEY=VALUE, such as gpus=8")
            if key not in cls.__dataclass_fields__:
                names = [*cls.__dataclass_fields__]
                raise ClusterError(f"{SOURCE}: no key {key}{nearest(key, names) or '.'} Choose {', '.join(names)}")
            tree[key] = value
        required = [name for name, field in cls.__dataclass_fields__.items() if field.default == MISSING]
        if missing := [name for name in required if name not in tree]:
            example = "gpu=h100 gpus=8 model=Qwen/Qwen3-8B batch=128 samples=16 response=8192"
            if given is not None:
                example = "gpu=h100 -- python -m verl.trainer.main_ppo ..."
            raise ClusterError(f"{SOURCE}: {', '.join(missing)} missing: for example {example}")
        found: Shape = typed(cls, tree, SOURCE)
        found.gpu = next((name for name in roofline.GPUS if name.upper() == found.gpu.upper()), found.gpu)
        found._check()
        return found

    def _check(self) -> None:
        profile.gpu(self.gpu, f"{SOURCE}: gpu")
        counts = {name: getattr(self, name) for name in ("gpus", "batch", "samples", "response", "prompt", "node")}
        refuse(*((size < 1, f"{SOURCE}: {name} must be at least 1, not {size}") for name, size in counts.items()))
        refuse(
            (
                self.gpus > self.node and self.gpus % self.node,
                f"{SOURCE}: gpus={self.gpus} are not whole nodes of node={self.node} GPUs",
            ),
            (not self.entropy > 0, f"{SOURCE}: entropy must be above 0 nats per token, not {self.entropy}"),
            (
                self.mean is not None and not 1 <= self.mean <= 0.9 * self.response,
                f"{SOURCE}: mean must be from 1 to {round(0.9 * self.response)} (0.9 x response), "
                f"not {self.mean or 0:g}",
            ),
            (
                self.tp is not None and (self.tp < 1 or self.gpus % self.tp or self.node % self.tp),
                f"{SOURCE}: tp={self.tp} must divide gpus={self.gpus} and node={self.node}",
            ),
        )

    @property
    def architecture(self) -> Architecture:
        return profile.model(self.model, SOURCE)

    @property
    def percentiles(self) -> dict[float, float]:
        """Response tokens by percentile, with the given mean."""

        def scaled(factor: float) -> dict[float, float]:
            return {percent: factor * share * self.response for percent, share in PERCENTILES.items()}

        if self.mean is None:
            return scaled(1.0)
        factors = np.geomspace(1e-3, 20, 50)  # the limit cuts what is longer, hence no closed form
        means = [Lengths(scaled(factor), self.response).typical().mean() for factor in factors]
        return scaled(float(np.exp(np.interp(np.log(self.mean), np.log(means), np.log(factors)))))

    @property
    def mean_tokens(self) -> float:
        return float(Lengths(self.percentiles, self.response).typical().mean())

    @property
    def acceptance(self) -> tuple[float, float]:
        """Tokens per decoding step with drafts, in the first epoch and later ones."""
        entropies, first, later = zip(*ACCEPTANCE, strict=True)
        at = np.log(self.entropy)
        return tuple(round(float(np.interp(at, np.log(entropies), values)), 2) for values in (first, later))  # type: ignore[return-value]

    @property
    def replica_gpus(self) -> int:
        """Those with the shortest rollout of stock verl. Raises ClusterError if no replica holds a request."""
        if self.tp is not None:
            return self.tp
        longest, model, sheet = self.prompt + self.response, self.architecture, roofline.GPUS[self.gpu]
        sizes = [tp for tp in (1, 2, 4, 8, 16) if not (model.heads % tp or self.gpus % tp or self.node % tp)]
        costs = {tp: roofline.replica(model, sheet, tp) for tp in sizes}
        fitting = [tp for tp in sizes if costs[tp].room >= longest]
        if not fitting:
            raise ClusterError(
                f"{SOURCE}: a request of {longest} tokens does not fit into a replica of at most {max(sizes)} "
                f"{self.gpu}: raise gpus, or lower response"
            )
        lengths = Lengths(self.percentiles, self.response).typical()
        work = Work(lengths, self.batch * self.samples, self.samples, self.prompt)
        return min(fitting, key=lambda tp: float(rollout(costs[tp], self.gpus / tp, work)))

    @property
    def copy_gpus(self) -> int:
        """GPUs of a copy of the training weights: the fewest that hold them on half of the GPUs, else on more."""
        model, memory = Model(self.architecture.parameters), roofline.GPUS[self.gpu].memory
        unit = self.replica_gpus if self.gpus <= self.node else self.node  # the least for rollout
        half = max(unit, self.gpus // 2 // unit * unit)
        for share in (half, max(half, self.gpus - unit), self.gpus):
            for size in [*(2**i for i in range(20)), share]:
                pool = Pool("", "", share, self.node, memory, training=Training(1.0, copy_gpus=size, reserve=RESERVE))
                if not share % size and not pool.check_training(model, share):
                    return size
        raise ClusterError(
            f"{SOURCE}: training {self.model} with Adam, without offload, does not fit into {self.gpus} {self.gpu}: "
            "raise gpus, or set training.copy_gpus and training.reserve in a file (examples/plan)"
        )

    @property
    def copied_s(self) -> float:
        """Seconds of a copy of the weights."""
        return 2 * self.architecture.parameters / COPIED

    def plan_file(self, max_staleness: int | None, acceptance: float = 1.0) -> dict[str, Any]:
        training = {"update": UPDATE, "copy_gpus": self.copy_gpus, "reserve": RESERVE}
        kind = {"gpu": self.gpu, "tp": [self.replica_gpus], "gpus_per_node": self.node, "training": training}
        batch = {"prompts": self.batch, "samples": self.samples, "prompt_tokens": self.prompt}
        return {
            "model": self.model,
            "kinds": [kind],
            "sites": [{"name": "here", "kind": self.gpu, "gpus": self.gpus}],
            "batch": {**batch, "response_limit": self.response, "percentiles": self.percentiles},
            "drafts": {"acceptance": acceptance, "overhead": OVERHEAD},
            "max_staleness": max_staleness,
            "sync": 2 * self.copied_s,
            "copy": self.copied_s,
        }

    def slices(self, rollout_gpus: int) -> int:
        """Return equal parts of the run, of which one is simulated; larger ones take minutes."""
        parts, replicas = 1, rollout_gpus // self.replica_gpus
        while (
            self.batch * self.samples > MOST * parts
            and replicas >= 2 * parts
            and not (self.batch % (2 * parts) or replicas % (2 * parts))
        ):
            parts *= 2
        return parts

    def cluster_file(self, rollout_gpus: int, train_gpus: int, parts: int, epochs: int, steps: int) -> dict[str, Any]:
        """Return one of ``parts`` slices, with epochs of ``steps`` training steps."""
        tp, batch = self.replica_gpus, self.batch // parts
        workload = {"prompts": steps * batch, "samples": self.samples, "epochs": epochs}
        lengths = {"response_limit": self.response, "percentiles": self.percentiles}
        times = {"update": UPDATE, "sync": 2 * self.copied_s, "copy": self.copied_s, "reward": REWARD}
        token = parts * roofline.training_token(self.architecture, roofline.GPUS[self.gpu]) / train_gpus
        return {
            "model": self.model,
            "replicas": [{"count": max(1, rollout_gpus // tp // parts), "gpu": self.gpu, "tp": tp}],
            "workload": {**workload, "prompt_tokens": self.prompt, **lengths},
            "batch_prompts": batch,
            "training": {"token": token, **times},
        }
