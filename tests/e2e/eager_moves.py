"""Imported by verl in every process of a run (``VERL_USE_EXTERNAL_MODULES``): samples move early and often."""

from verl_rhyme.scheduling import expectations
from verl_rhyme.workers import moving

moving._MOVE_S = 0.2  # responses of the tiny world take a second or two
expectations.LIKELY = 0.1  # nearly all get longer than that
