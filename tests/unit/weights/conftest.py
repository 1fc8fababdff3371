import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # shared module of these tests: relay_world.py


@pytest.fixture
def nodes(tmp_path, monkeypatch):
    """Relays of five nodes."""
    from verl_rhyme.weights import relay

    monkeypatch.setattr(relay, "add_log_handler", lambda: None)
    return [relay.Relay(str(tmp_path / str(n))) for n in range(5)]
