"""Names of metrics (verl's where they exist) and pure functions that compute them."""

from __future__ import annotations

import math
import numbers
from collections.abc import Mapping
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt

from verl_rhyme.drafting.policy import SOURCES

# verl's names: verl/trainer/ppo/metric_utils.py and v1/trainer_base.py.
EPOCH = "training/epoch"  # counted from 0
REWARD_MEAN = "critic/score/mean"
REWARD_MEAN_AFTER_KL = "critic/rewards/mean"
TIMING = "timing_s/"
GEN_S = "timing_s/gen"
STEP_S = "timing_s/step"
GEN_MS_PER_TOKEN = "timing_per_token_ms/gen"
TOTAL_TOKENS = "perf/total_num_tokens"  # prompts and responses
PROMPT_LENGTH_MEAN = "prompt_length/mean"
RESPONSE_LENGTH_MEAN = "response_length/mean"
VERL_ENTROPY = "actor/entropy"  # aggregated by loss_agg_mode: per token with token-mean, verl's default

# Names of verl-rhyme. docs/metrics.md is made of these lines (``config/generate.py``): ``# unit: meaning``. A line
# without a constant is a metric that is named where it is computed.

# -- Drafts
SPEC_ACCEPT_RATE = "rollout/spec_accept_rate"  # share: accepted per draft token, mean of requests (verl's)
SPEC_ACCEPT_LENGTH = "rollout/spec_accept_length"  # tokens: of a verifying step, mean of requests (verl's)
SPEC_DRAFTED = "rollout/spec/drafted_tokens"  # tokens: drafted in the step
SPEC_ACCEPTED = "rollout/spec/accepted_tokens"  # tokens: accepted in the step
SPEC_VERIFY_STEPS = "rollout/spec/verify_steps"  # steps: that verified a draft
SPEC_REVERIFIED = "rollout/spec/reverified_tokens"  # tokens: accepted, from before an interruption
# "rollout/spec/drafted/SOURCE"  # tokens: by source: `history`, `siblings`, `own`, `others`; the first that proposes
# "rollout/spec/accepted/SOURCE"  # tokens: the same; no accepted `history` after epoch 1: see troubleshooting
#: As ``RequestRecord.by_source``: [verified, accepted] of each source.
SPEC_SOURCES = {source: [f"rollout/spec/{kind}/{source}" for kind in ("drafted", "accepted")] for source in SOURCES}
SPEC_ERRORS = "rollout/spec/errors"  # count: failures of drafter and history; read the warning
SPEC_DRAFT_S = "rollout/spec/draft_s"  # s: engines waited for drafts, summed; lower `drafting.max_tokens`
SPEC_WAITING = "rollout/spec/waiting"  # share: steps that waited for the tokens of the step before; 0 at rest
SPEC_ALARM = "rollout/spec/alarm"  # 0, 1: the last 4096 draft tokens were all rejected; see troubleshooting
ENTROPY = "rollout/entropy"  # nats: of the policy, by token; above 1 drafts gain little
BAD_LOGPROBS = "rollout/bad_logprobs"  # tokens: sampled with a NaN or infinite log-probability

# -- History
HISTORY = "rollout/history"
HISTORY_HIT_RATE = "rollout/history/hit_rate"  # share: requests whose prompt had a history
# "rollout/history/prompts"  # count: in the store
# "rollout/history/responses"  # count: in the store
# "rollout/history/tokens"  # count: in the store
# "rollout/history/epochs"  # count: most visits of a prompt
# "rollout/history/bytes"  # bytes: values of the store
# "rollout/history/file_bytes"  # bytes: its file
# "rollout/history/kept_share"  # share: prompts with a history, of those seen; raise `history.max_bytes`
# "rollout/history/evicted"  # prompts: dropped; raise `history.max_bytes`
# "rollout/history/shed_epochs"  # visits: dropped; raise `history.max_bytes`
# "rollout/history/unkept"  # responses: without room; raise `history.max_bytes`
# "rollout/history/dropped"  # responses: not recorded: full disk, bad tokens, late; free disk or cores
# "rollout/history/sent_bytes"  # bytes: fetched by other nodes
HISTORY_LOST = "rollout/history/lost_steps"  # steps, parts: not recorded; read the warnings
HISTORY_UNTRAINED = "rollout/history/untrained"  # responses: recorded, not trained
HISTORY_RESTARTS = "rollout/history/writer_restarts"  # count: since the start; read the warnings
HISTORY_ERRORS = "rollout/history/errors"  # count: since the start; read the warnings
HISTORY_UPDATE_S = "timing_s/history_update"  # s: recording

# -- Rollout, lengths, placement
ROLLOUT_S = "rollout/seconds"  # s: `timing_s/gen`, or the step if rollout overlaps training
REQUESTS = "rollout/requests"  # count: requests of the step
TRAINED_TOKENS = "rollout/trained_tokens"  # tokens: trained response tokens
USEFUL_TOKENS_PER_S = "rollout/useful_tokens_per_s"  # tokens/s: trained tokens per second of rollout
BUBBLE_RATIO = "rollout/bubble_ratio"  # share: idle request slots; not where engines continue during training
QUEUE_S_MEAN = "rollout/queue_s/mean"  # s: wait for a slot
QUEUE_S_MAX = "rollout/queue_s/max"  # s: the same, maximum
LENGTHS = "rollout/lengths/"
LENGTHS_P50 = "rollout/lengths/p50"  # tokens: of a request's response, median
LENGTHS_P90 = "rollout/lengths/p90"  # tokens: the same, 90th percentile
LENGTHS_P99 = "rollout/lengths/p99"  # tokens: the same, 99th percentile
LENGTHS_MAX = "rollout/lengths/max"  # tokens: the same, maximum
LENGTH_CORRELATION = "rollout/lengths/rank_correlation"  # -1 to 1: forecast against length
# "rollout/lengths/mean_ratio"  # ratio: expected over real length
# "rollout/lengths/seen"  # share: of responses with a forecast
# "rollout/lengths/ranked"  # share: of responses with a forecast by the ranker only
LENGTH_ERRORS = "rollout/lengths/forecast_errors"  # count: failed forecasts, logged above 0; report a bug
RANKER_FAILURES = "rollout/lengths/ranker_failures"  # count: failed calls of it, logged above 0; report a bug
PLACEMENT_MOVED = "rollout/placement/moved"  # samples: moved to another replica
PLACEMENT_ERRORS = "rollout/placement/errors"  # count: least loaded replica used instead; report a bug

# -- Weights (relay)
REPLICAS_BEHIND = "rollout/weights/replicas_behind"  # replicas: lacked the previous version; check the network
SLOW_LINK_MB = "rollout/weights/slow_link_mb"  # MB: sent between sites; keep `weights.pack=true`
DAMAGED_CHUNKS = "rollout/weights/damaged_chunks"  # chunks: fetched again; check the link
LOST_CHUNKS = "rollout/weights/lost_chunks"  # chunks: fetched again; check the link

# -- Staleness
STALENESS_MEAN = "training/staleness/mean"  # versions: of a group's oldest token
STALENESS_MAX = "training/staleness/max"  # versions: the same, maximum
TOKEN_STALENESS_MEAN = "training/staleness/tokens/mean"  # versions: of every trained token
TOKEN_STALENESS_MAX = "training/staleness/tokens/max"  # versions: the same, maximum
STALENESS_GROUPS = "training/staleness/groups"  # groups: of the step
VERL_STALENESS_MEAN = "training/off_policy/trajectory_staleness_worst/mean"  # versions: by trajectory (verl's)
VERL_STALENESS_MAX = "training/off_policy/trajectory_staleness_worst/max"  # versions: the same, maximum (verl's)

# -- Schedule (the pipeline)
DISCARDED_TOKENS = "rollout/samples/discarded_tokens"  # tokens: generated, not trained; lower `scheduling.in_flight`
INTERRUPTED = "rollout/samples/interrupted"  # samples: interrupted
STALE = "rollout/samples/stale"  # samples: finished, but too stale
FINISHED_LEFT = "rollout/samples/finished_left"  # samples: finished, for a later step
ABANDONED = "rollout/samples/abandoned_attempts"  # attempts: lost, or too late; look for dead workers, slow tools
FAILED_ATTEMPTS = "rollout/samples/failed_attempts"  # attempts: agent loop or reward raised; the sample starts again
UNREWARDED = "rollout/samples/unrewarded"  # samples: lost with a worker before their reward, regenerated
LOADED_PROMPTS = "rollout/prompts/loaded"  # prompts: loaded
DROPPED_PROMPTS = "rollout/prompts/dropped"  # prompts: failed or filtered
WAITING_MEAN = "rollout/prompts/waiting/mean"  # steps: that passed a prompt by
WAITING_MAX = "rollout/prompts/waiting/max"  # steps: the same, maximum; lower `scheduling.in_flight`
FAILED_PROMPTS = "training/rollout_failure/evicted_samples"  # prompts: of which a sample failed; fix reward or tool
FILTERED_GROUPS = "training/filter_groups/evicted_samples"  # groups: dropped for equal scores; choose other prompts
FILTERED_SCORE = "training/filter_groups/evicted_score/mean"  # score: of those groups
BATCH_ORDER = "training/order/by_length"  # -1 to 1: 1 sorted by length, 0 shuffled
MINI_BATCH_SPREAD = "training/order/mini_batch_length_ratio"  # ratio: longest to shortest mini-batch

# -- Streaming (separate engines)
EARLY_SHARE = "training/parts/early_share"  # share: processed before the batch was complete; lower `streaming.part`
PARTS = "training/parts/count"  # count: of the batch
AHEAD_S = "rollout/ahead_s"  # s: the complete batch waited for the trainer; fewer replicas
BEHIND_S = "rollout/behind_s"  # s: rollout slower than training; more replicas
REPLICA_ADVICE = "rollout/replicas/advice"  # -1, 0, 1: a replica less or more
REPLICAS_SERVING = "rollout/replicas/serving"  # replicas: serving (`streaming.elastic`)
REPLICA_MOVES = "rollout/replicas/moved_samples"  # samples: moved by a change of replicas
REPLICA_CHANGE_S = "rollout/replicas/change_s"  # s: of such a change

#: Share of the tokens below which drafts are hardly worth their cost.
LOW_YIELD = 0.1


def fillable_slots(request_slots: int, samples: int) -> int:
    """Return ``Q`` of :func:`bubble_ratio`: the request slots that a run can fill, the same for all its steps.

    ``request_slots`` are those of all engines (replicas * max_num_seqs); at most ``samples`` are in flight, with one
    request each. Slots that no schedule can fill cost no tokens.
    """
    return max(1, min(request_slots, samples))


def bubble_ratio(started: npt.ArrayLike, finished: npt.ArrayLike, slots: int) -> float:
    """Return the idle share of the request slots during rollout, in [0, 1]; 0.0 if no request ran.

    ``sum_k (Q - r_k) dt_k / (Q sum_k dt_k)``: ``Q`` slots, ``r_k`` of them running during the interval ``dt_k`` between
    two consecutive starts or ends (SortedRL, section 2). The span is [first start, last end]; an interval with more
    requests than slots counts as full. Read it together with :func:`useful_tokens_per_s`: wasted tokens fill slots,
    too.

    ``started`` and ``finished``, [requests], are seconds; requests with a non-finite time are ignored. An end before
    its start counts as the start: clocks of two nodes may differ by more than the length of a short request.
    """
    begin = np.asarray(started, dtype=np.float64)
    end = np.maximum(begin, np.asarray(finished, dtype=np.float64))
    known = np.isfinite(begin) & np.isfinite(end)
    begin, end = begin[known], end[known]
    if not len(begin) or end.max() == begin.min():
        return 0.0
    times = np.concatenate([begin, end])
    order = np.argsort(times)
    running = np.cumsum(np.repeat([1, -1], len(begin))[order])[:-1]
    interval = np.diff(times[order])
    busy = float(np.dot(np.clip(running, 0, slots), interval))
    return min(max(1.0 - busy / (slots * float(end.max() - begin.min())), 0.0), 1.0)


def useful_tokens_per_s(trained_tokens: float, rollout_s: float) -> float:
    """Return trained response tokens per second of rollout; 0.0 if no time passed."""
    return trained_tokens / rollout_s if rollout_s > 0 else 0.0


def staleness_metrics(groups: npt.ArrayLike, requests: npt.ArrayLike, tokens: npt.ArrayLike) -> dict[str, float]:
    """Return ``training/staleness/*`` of a training step: policy versions between tokens and the policy they train.

    ``groups``, [groups], is the staleness of each trained group's oldest token; ``requests``, [requests], that of each
    trained request, whose ``tokens`` have one version. Metrics without data are left out.
    """
    of_groups, of_requests = np.asarray(groups, dtype=np.float64), np.asarray(requests, dtype=np.float64)
    weights = np.asarray(tokens, dtype=np.float64)
    metrics: dict[str, float] = {}
    if len(of_groups):
        mean, greatest = float(of_groups.mean()), float(of_groups.max())
        metrics = {STALENESS_MEAN: mean, STALENESS_MAX: greatest, STALENESS_GROUPS: float(len(of_groups))}
    if weights.sum() > 0:
        mean, greatest = float(np.average(of_requests, weights=weights)), float(of_requests[weights > 0].max())
        metrics |= {TOKEN_STALENESS_MEAN: mean, TOKEN_STALENESS_MAX: greatest}
    return metrics


def accept_rate(drafted: npt.ArrayLike, accepted: npt.ArrayLike) -> float:
    """Return verl's ``rollout/spec_accept_rate``: the mean over requests of accepted/drafted, 0 without drafts."""
    draft, accept = np.asarray(drafted, dtype=np.float64), np.asarray(accepted, dtype=np.float64)
    return float(np.mean(np.divide(accept, draft, out=np.zeros_like(draft), where=draft > 0)))


def accept_length(accepted: npt.ArrayLike, verify_steps: npt.ArrayLike) -> float:
    """Return ``rollout/spec_accept_length``: the mean over requests of 1 + accepted/verify steps, 0 without steps."""
    accept, verify = np.asarray(accepted, dtype=np.float64), np.asarray(verify_steps, dtype=np.float64)
    return float(np.mean(np.where(verify > 0, 1.0 + accept / np.maximum(verify, 1), 0.0)))


#: Columns of drafter statistics: those of a whole engine, since the last request that carried them.
DRAFTER = ("draft_errors", "draft_seconds", "engine_steps", "waiting_steps")


def drafter_metrics(totals: Mapping[str, float]) -> dict[str, float]:
    return {
        SPEC_ERRORS: float(totals["draft_errors"]),
        SPEC_DRAFT_S: float(totals["draft_seconds"]),
        SPEC_WAITING: totals["waiting_steps"] / max(1.0, totals["engine_steps"]),
    }


def step_metrics(requests: Mapping[str, npt.NDArray[Any]], slots: int | None, rollout_s: float) -> dict[str, float]:
    """Return the metrics of one step's rollout of ``rollout_s`` seconds (verl's ``timing_s/gen``) from its requests.

    ``requests``, at least one, are columns of ``events.REQUESTS``, [requests], without validation. ``slots`` is Q of
    :func:`bubble_ratio`, ``None`` for no ratio. ``rollout/spec_accept_*`` are verl's means over requests; the totals
    below ``rollout/spec/`` are for means over tokens.
    """
    lengths = requests["response_tokens"].astype(np.float64)
    p50, p90, p99 = np.quantile(lengths, [0.5, 0.9, 0.99])
    trained = lengths[requests["trained"].astype(bool)].sum()
    drafted, accepted, verify = (requests[n] for n in ("drafted_tokens", "accepted_tokens", "verify_steps"))
    metrics: dict[str, float] = {
        REQUESTS: len(lengths),
        LENGTHS_P50: p50,
        LENGTHS_P90: p90,
        LENGTHS_P99: p99,
        LENGTHS_MAX: lengths.max(),
        TRAINED_TOKENS: trained,
        USEFUL_TOKENS_PER_S: useful_tokens_per_s(trained, rollout_s),
        SPEC_DRAFTED: drafted.sum(),
        SPEC_ACCEPTED: accepted.sum(),
        SPEC_VERIFY_STEPS: verify.sum(),
        SPEC_ACCEPT_RATE: accept_rate(drafted, accepted),
        SPEC_ACCEPT_LENGTH: accept_length(accepted, verify),
        SPEC_REVERIFIED: requests["reverified_tokens"].sum(),
        **dict(zip(chain(*SPEC_SOURCES.values()), requests["by_source"].sum(axis=0).ravel(), strict=True)),
        **drafter_metrics({name: requests[name].sum() for name in DRAFTER}),
        HISTORY_HIT_RATE: requests["history_hit"].astype(bool).mean(),
    }
    if slots is not None:
        metrics[BUBBLE_RATIO] = bubble_ratio(requests["started_at"], requests["finished_at"], slots)
    queue = requests["started_at"].astype(np.float64) - requests["queued_at"].astype(np.float64)
    queue = queue[np.isfinite(queue)].clip(min=0.0)
    if len(queue):
        metrics |= {QUEUE_S_MEAN: queue.mean(), QUEUE_S_MAX: queue.max()}
    return {name: float(value) for name, value in metrics.items()}


def response_tokens(metrics: Mapping[str, Any]) -> float | None:
    """Derive a step's response tokens from verl's metrics, which do not log them; ``None`` if unknown."""
    seconds, per_token = finite(metrics, GEN_S), finite(metrics, GEN_MS_PER_TOKEN)
    if seconds and per_token:
        return float(round(seconds * 1000.0 / per_token))
    total, prompt, response = (finite(metrics, n) for n in (TOTAL_TOKENS, PROMPT_LENGTH_MEAN, RESPONSE_LENGTH_MEAN))
    if total is not None and prompt is not None and response is not None and prompt + response > 0:
        return float(round(total * response / (prompt + response)))
    return finite(metrics, TRAINED_TOKENS)


def shares(counts: Mapping[str, Any]) -> str:
    """Return the share of each source with at least 1%, as ``history 62%, siblings 30%``; empty without tokens."""
    known = {source: count for source, count in counts.items() if count}
    total = sum(known.values())
    return ", ".join(f"{source} {count / total:.0%}" for source, count in known.items() if count >= 0.01 * total)


def low_yield(accepted: float | None, tokens: float | None, nats: float | None) -> str | None:
    """Return a note on drafts that yield few of a run's response tokens, with the policy's entropy (nats per token);
    ``None`` for other drafts or missing values.
    """
    if accepted is None or not tokens or accepted >= LOW_YIELD * tokens:
        return None
    at = "" if nats is None else f" at an entropy of {nats:.2f} nats per token"
    return f"drafts yielded {accepted / tokens:.0%} of the tokens{at}"


def rollout_s(metrics: Mapping[str, Any]) -> float | None:
    """Return the seconds of rollout in a step: the whole step if rollout continues while the actor trains."""
    return finite(metrics, ROLLOUT_S, GEN_S)


def finite(metrics: Mapping[str, Any], *names: str) -> float | None:
    """Return the first of the named metrics that is a finite number; ``None`` without one."""
    for name in names:
        value = metrics.get(name)
        if isinstance(value, numbers.Real) and math.isfinite(value):
            return float(value)
    return None
