"""A rollout, and reports of its attempts, by their names."""

import json

from verl_rhyme.scheduling.attempts import Attempt, AttemptReport
from verl_rhyme.scheduling.rollout import Rollout
from verl_rhyme.scheduling.rules import Rules

#: SortedRL's four batches in flight, on-policy and partial.
ON_POLICY = {"max_staleness": 0, "in_flight": 4, "refill": "when_empty"}
PARTIAL = {**ON_POLICY, "max_staleness": 1}

A0, A1, A2, A3 = (Attempt("a", number) for number in range(4))
B0, B1 = Attempt("b", 0), Attempt("b", 1)


def rollout(mode=ON_POLICY, prompts=(("a", 2),), filters=None, start=True, **rules):
    made = Rollout(Rules(1, 2, **{**mode, **rules}), filters)
    made.publish(0, None)
    made.add_prompts(prompts)
    if start:
        made.fill()
    return made


def restored(made, known, version=0, prompts=("a",), state=None, added=(), left=9, rules=None, **options):
    """Return the rollout of a restarted coordinator, and the prompts whose data are gone."""
    again = Rollout(rules or made.rules, generation=1, **options)
    state = json.loads(json.dumps(made.state_dict() if state is None else state))
    return again, again.restore(state, version, left, known, set(prompts), added)


def record(attempt, tokens, version=0):
    record = {"id": f"{attempt.name}/{tokens}", "response_tokens": tokens, "policy_version_end": version}
    return {**record, "started_at": 0.0, "finished_at": 1.0}


def _report(status):
    def report(attempt, tokens=5, version=0, records=None, **fields):
        made = [record(attempt, tokens, version)] if tokens else []
        first = version if tokens else None
        return AttemptReport(attempt, status, tokens, first, made if records is None else records, **fields)

    return report


generated, interrupted, failed = map(_report, ("generated", "interrupted", "failed"))


def finished(attempt, *scores, **fields):
    return AttemptReport(attempt, "finished", scores=list(scores), **fields)


def stored(attempt, *scores, tokens=5):
    """A finished attempt's report with its trajectories."""
    return generated(attempt, tokens)._replace(status="finished", scores=list(scores))


def send(made, *reports):
    for report in reports:
        made.ended(report)


def through(made, *attempts):
    for attempt in attempts:
        send(made, generated(attempt), finished(attempt))


def states(made, uid="a"):
    return [sample.state for sample in made.scheduler.ledger.prompt(uid).samples]
