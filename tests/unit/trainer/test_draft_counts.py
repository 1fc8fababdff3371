"""Draft counts that arrive after the responses, from servers that answer late, never or with errors."""

import pytest

from verl_rhyme.trainer import draft_counts
from verl_rhyme.trainer.draft_counts import DraftCounts


class Server:
    """Handle of a rollout server, and its own answers. An exception in ``counts``: it died."""

    def __init__(self, counts=None, late=False):
        self.counts, self.late, self.calls = counts or {}, late, 0
        self.take_counts = self

    def remote(self):
        self.calls += 1
        return self


@pytest.fixture(autouse=True)
def ray(monkeypatch):
    def wait(servers, num_returns, timeout):
        assert timeout is not None, "waits without a timeout"
        return [server for server in servers if not server.late], []

    def get(server):
        if isinstance(server.counts, Exception):
            raise server.counts
        counts, server.counts = server.counts, {}
        return counts

    monkeypatch.setattr(draft_counts.ray, "wait", wait)
    monkeypatch.setattr(draft_counts.ray, "get", get)


def of(**drafted):
    return {id: {"drafted_tokens": count} for id, count in drafted.items()}


def filled(counts, *ids):
    return [row["drafted_tokens"] for row in counts.fill([{"id": id, "drafted_tokens": 0} for id in ids])]


def test_records_are_filled_by_id_which_is_removed_also_those_of_a_later_step():
    servers = {0: Server(of(a=5, d=9)), 1: Server(of(b=7))}
    counts = DraftCounts(lambda: servers)
    rows = counts.fill([{"id": id, "sample": 1, "drafted_tokens": 0} for id in "bac"])
    assert rows == [{"sample": 1, "drafted_tokens": drafted} for drafted in (7, 5, 0)]
    assert [server.calls for server in servers.values()] == [1, 1], "not one message per server"
    assert filled(counts, "d") == [9]
    assert not counts._counts


def test_silent_server_gets_no_second_request_and_its_late_answer_counts(caplog):
    server, other = Server(of(a=5), late=True), Server(of(b=7))
    counts = DraftCounts(lambda: {0: server, 1: other})
    assert filled(counts, "x", "b") == [0, 7]
    counts.fill([])
    assert (server.calls, other.calls) == (1, 2)
    assert len(caplog.records) == 1
    server.late = False
    assert filled(counts, "a") == [5]
    counts.fill([])
    assert server.calls == 2


def test_dead_server_loses_only_its_counts_and_unclaimed_ones_are_bounded(monkeypatch, caplog):
    monkeypatch.setattr(draft_counts, "_MAX_KEPT", 3)
    dead, other = Server(draft_counts.ray.exceptions.RayActorError()), Server(of(b=7))
    counts = DraftCounts(lambda: {0: dead, 1: other})
    assert filled(counts, "a", "b") == [0, 7]
    assert len(caplog.records) == 1
    other.counts = of(c=1, d=2, e=3, f=4, g=5)
    counts.fill([])
    assert list(counts._counts) == ["e", "f", "g"]
