"""Imported by verl in every process of a run (``VERL_USE_EXTERNAL_MODULES``): stopped engines wait for 3 s."""

from verl_rhyme.scheduling import scheduler

scheduler.STOP_WAIT_S = 3.0
