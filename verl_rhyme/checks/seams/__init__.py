"""Seams: objects of verl and vLLM that verl-rhyme relies on, with their expected shapes.

``verl-rhyme doctor`` and ``tests/contract/test_seams.py`` check each seam against the installed packages. To add one,
add the part of the shape that verl-rhyme uses to the table of its file (:data:`~verl_rhyme.checks.seam_check.Shapes`).
"""

from verl_rhyme.checks.seam_check import seams
from verl_rhyme.checks.seams import verl_rollout, verl_trainer, vllm

SEAMS = tuple(seam for module in (verl_trainer, verl_rollout, vllm) for seam in seams(module.SEAMS))
