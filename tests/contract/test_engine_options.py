"""Every option of vLLM's engine was looked at: refused, ours, or of no consequence for drafts, schedules and counts.

Does a new release's new option change what is sampled, which tokens a step holds, who schedules, or what of verl's keys
rhyme reads? ``git diff`` of ``vllm/engine/arg_utils.py`` shows it.
"""

import dataclasses
import hashlib

from vllm.engine.arg_utils import AsyncEngineArgs

from verl_rhyme.checks import combinations
from verl_rhyme.engine.server import RhymeHttpServer

PREFIX = "actor_rollout_ref.rollout.engine_kwargs.vllm."
FIELDS = {field.name for field in dataclasses.fields(AsyncEngineArgs)}
#: SHA-256 of the sorted names of the options that were looked at, of vLLM 0.24.0.
LOOKED_AT = "80475736016f916bb37143b05960e898ded0fdd37901bedb373a487151fda954"
#: Options that the table refuses; "config" is a file of options.
REFUSED = {
    option.key.removeprefix(PREFIX)
    for row in combinations.TABLE
    for option in row.options
    if option.key.startswith(PREFIX)
}


def test_each_option_of_vllm_was_looked_at():
    assert hashlib.sha256(" ".join(sorted(FIELDS)).encode()).hexdigest() == LOOKED_AT
    assert {"config"} == REFUSED - FIELDS


def test_no_other_option_is_taken_for_the_beginning_of_a_refused_one():
    assert not [(a, b) for a in FIELDS - REFUSED for b in REFUSED if b.startswith(a)]


def test_the_extension_is_ours_without_an_option_for_it():
    from verl_rhyme.engine.extension import RhymeWorkerExtension

    extension = RhymeHttpServer._get_worker_extension_cls(None)
    assert extension == f"{RhymeWorkerExtension.__module__}.{RhymeWorkerExtension.__name__}"
