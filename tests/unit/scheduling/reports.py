"""A rollout, and reports of its attempts."""

from verl_rhyme.scheduling.attempts import Ended
from verl_rhyme.scheduling.rollout import Rollout
from verl_rhyme.scheduling.rules import Rules

#: SortedRL's four batches in flight, on-policy and partial.
ON_POLICY = {"max_staleness": 0, "in_flight": 4, "refill": "when_empty"}
PARTIAL = {**ON_POLICY, "max_staleness": 1}


def rollout(mode=ON_POLICY, prompts=(("a", 2),), filters=None, start=True, **rules):
    made = Rollout(Rules(1, 2, **{**mode, **rules}), filters)
    made.publish(0, None)
    made.add_prompts(prompts)
    if start:
        made.fill()
    return made


def record(session, tokens, version=0):
    return {"id": f"{session}/{tokens}", "response_tokens": tokens, "policy_version_end": version}


def generated(session, tokens=5, version=0):
    return Ended(session, "generated", tokens, version, [record(session, tokens, version)])


def interrupted(session, tokens=3, version=0):
    return Ended(session, "interrupted", tokens, version, [record(session, tokens, version)])


def finished(session, *scores):
    return Ended(session, "finished", scores=list(scores))


def send(made, *ended):
    for report in ended:
        made.ended(report)


def states(made, uid="a"):
    return [sample.state for sample in made.scheduler.ledger.prompt(uid).samples]
