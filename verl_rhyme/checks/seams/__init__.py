"""Places of verl and vLLM that verl-rhyme leans on, and the shape it must have.

``verl-rhyme doctor`` and ``tests/contract/test_seams.py`` check each entry against what is installed. To add one,
append a :class:`~verl_rhyme.checks.seam_check.Seam` to the list of its file: where it is, what of ours stands on it,
and the part of its shape that we use.
"""

from verl_rhyme.checks.seams import verl_rollout, verl_trainer, verl_update, vllm

SEAMS = (*verl_trainer.SEAMS, *verl_update.SEAMS, *verl_rollout.SEAMS, *vllm.SEAMS)
