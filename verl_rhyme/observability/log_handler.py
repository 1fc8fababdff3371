"""Log handler that keeps the package's warnings visible."""

from __future__ import annotations

import logging


def add_log_handler() -> None:
    """Add a handler to the ``verl_rhyme`` logger, as verl does to its own: vLLM imports a package
    (model_hosting_container_standards) that raises the root logger and its handlers to ERROR.
    """
    logger = logging.getLogger("verl_rhyme")
    if logger.handlers:
        return
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(levelname)s:%(asctime)s:%(name)s:%(message)s"))
    logger.addHandler(handler)
    logger.setLevel(logging.WARNING)
    logger.propagate = False
