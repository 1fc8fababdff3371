"""Seams: objects of verl and vLLM that verl-rhyme relies on, with their expected shapes.

``test_seams.py`` checks each seam against the installed packages: versions are pinned, so that a seam breaks only with
an upgrade of verl or vLLM. To add one, add the part of the shape that verl-rhyme uses to the table of its file
(:data:`~tests.contract.seam_check.Shapes`).
"""

from tests.contract.seam_check import seams
from tests.contract.seams import verl_rollout, verl_trainer, vllm

SEAMS = tuple(seam for module in (verl_trainer, verl_rollout, vllm) for seam in seams(module.SEAMS))
