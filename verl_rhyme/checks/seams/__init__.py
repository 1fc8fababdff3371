"""Seams: objects of verl and vLLM that verl-rhyme relies on, with their expected shapes.

``verl-rhyme doctor`` and ``tests/contract/test_seams.py`` check each seam against the installed packages. To add one,
append a :class:`~verl_rhyme.checks.seam_check.Seam` to the list of its file, with its target, the feature that depends
on it, and the part of the shape that verl-rhyme uses.
"""

from verl_rhyme.checks.seams import verl_rollout, verl_trainer, verl_update, vllm

SEAMS = (*verl_trainer.SEAMS, *verl_update.SEAMS, *verl_rollout.SEAMS, *vllm.SEAMS)
