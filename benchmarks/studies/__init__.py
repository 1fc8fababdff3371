"""One-time studies; their reports are in ``docs/studies``."""
