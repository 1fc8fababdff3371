"""Imported by verl in every process of a run (``VERL_USE_EXTERNAL_MODULES``): writes each turn's noise, each
trained trajectory, and what checkpoints store and attempts begin with, to the run's folder."""

import json
import os
import time
from pathlib import Path

import transfer_queue as tq
import wrapt

from verl_rhyme.agent_loop.session import Session, Turn
from verl_rhyme.processes.request import FIELD

_FIELDS = ["prompts", "responses", "response_mask", "rollout_log_probs", "extra_fields"]
_REPLAY = "enable_rollout_routing_replay"


def write(file, row):
    with Path(os.environ["RUN_DIR"], file).open("a") as lines:
        lines.write(json.dumps(row) + "\n")


def _watch(owner, name, note):
    original = getattr(owner, name)

    def watched(*args, **kwargs):
        result = original(*args, **kwargs)
        note(result, *args)
        return result

    setattr(owner, name, watched)


def _drawn(noise, session, turn):
    write("noise.jsonl", {"attempt": session.name, "prompt": turn.prompt, "noise": noise})


def _trained(_, trainer, batch, *__):
    fields = [*_FIELDS, *(["routed_experts"] if trainer.config.actor_rollout_ref.rollout[_REPLAY] else [])]
    stored = tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=fields)
    for key, tag, *columns in zip(batch.keys, batch.tags, *(stored[name] for name in fields), strict=True):
        if not tag.get("is_padding", False):
            row = dict(zip(fields, columns, strict=True))
            extra = row.pop("extra_fields")
            lists = {name: column.tolist() for name, column in row.items()}
            write("trained.jsonl", {"key": key, "step": trainer.global_steps, "requests": extra[FIELD], **lists})


def _stored(*_):
    write("stored.jsonl", {"at": time.time()})


def _inherited(_, session, turns, records, partial):
    if partial:
        answers = sum(bool(answer) for turn in turns for _, answer in turn.answers)
        write("inherited.jsonl", {"attempt": session.name, "answers": answers})


_watch(Session, "noise_of", _drawn)
_watch(Session, "inherit", _inherited)
_watch(Turn, "to_dict", _stored)


@wrapt.when_imported("verl.trainer.ppo.v1.trainer_base")  # its import needs the platform, which verl registers later
def _watch_trainer(module):
    _watch(module.PPOTrainer, "_compute_old_log_prob", _trained)
