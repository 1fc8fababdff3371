"""Our warnings reach the log of a run, whatever else was imported."""

from __future__ import annotations

import logging


def keep_audible() -> None:
    """Give this package's loggers a handler of their own, once in a process.

    vLLM imports a package (model_hosting_container_standards) that lifts root logger and handlers to ERROR; verl keeps
    its own loggers audible in the same way.
    """
    logger = logging.getLogger("verl_rhyme")
    if logger.handlers:
        return
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(levelname)s:%(asctime)s:%(name)s:%(message)s"))
    logger.addHandler(handler)
    logger.setLevel(logging.WARNING)
    logger.propagate = False
