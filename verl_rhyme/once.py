"""Warnings that each process prints once."""

import logging

_PRINTED: set[tuple[str, str]] = set()


def warn_once(logger: logging.Logger, message: str, *args: object, exc_info: bool = False) -> None:
    """Log a warning the first time that this process's ``logger`` gets this ``message``, whatever its ``args``."""
    if (logger.name, message) not in _PRINTED:
        _PRINTED.add((logger.name, message))
        logger.warning(message, *args, exc_info=exc_info)
