"""Draft counts that arrive after the responses, from servers that answer late, never or with errors."""

import logging

import pytest

from verl_rhyme.trainer import draft_counts
from verl_rhyme.trainer.draft_counts import DraftCounts


class Server:
    """Handle of a rollout server; its answers are their own references. An exception in ``counts``: it died."""

    def __init__(self, counts=None, late=False):
        self.counts, self.late, self.calls = counts or {}, late, 0
        self.take_counts = self

    def remote(self):
        self.calls += 1
        return Answer(self)


class Answer:
    def __init__(self, server):
        self.server = server


@pytest.fixture(autouse=True)
def ray(monkeypatch, caplog):
    caplog.set_level(logging.WARNING)

    def wait(answers, num_returns, timeout):
        assert timeout is not None, "waits without a timeout"
        return [a for a in answers if not a.server.late], [a for a in answers if a.server.late]

    def get(answer):
        if isinstance(answer.server.counts, Exception):
            raise answer.server.counts
        counts, answer.server.counts = answer.server.counts, {}
        return counts

    monkeypatch.setattr(draft_counts.ray, "wait", wait)
    monkeypatch.setattr(draft_counts.ray, "get", get)


def record(id, drafted=0):
    return {"id": id, "sample": 1, "drafted_tokens": drafted}


def filled(counts, *ids):
    return [row["drafted_tokens"] for row in counts.fill([record(id) for id in ids])]


def test_records_are_filled_by_id_which_is_removed_also_those_of_a_later_step():
    servers = {"0/0": Server({"a": {"drafted_tokens": 5}, "d": {"drafted_tokens": 9}})}
    servers["0/1"] = Server({"b": {"drafted_tokens": 7}})
    counts = DraftCounts(lambda: servers)
    rows = counts.fill([record("b"), record("a"), record("c")])
    assert rows == [{"sample": 1, "drafted_tokens": drafted} for drafted in (7, 5, 0)]
    assert [server.calls for server in servers.values()] == [1, 1], "not one message per server"
    assert filled(counts, "d") == [9]
    assert not counts._counts


def test_silent_server_gets_no_second_request_and_its_late_answer_counts(caplog):
    server, other = Server({"a": {"drafted_tokens": 5}}, late=True), Server({"b": {"drafted_tokens": 7}})
    counts = DraftCounts(lambda: {"0/0": server, "0/1": other})
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
    dead, other = Server(draft_counts.ray.exceptions.RayActorError()), Server({"b": {"drafted_tokens": 7}})
    counts = DraftCounts(lambda: {"0/0": dead, "0/1": other})
    assert filled(counts, "a", "b") == [0, 7]
    assert len(caplog.records) == 1
    other.counts = {str(i): {"drafted_tokens": i} for i in range(10)}
    counts.fill([])
    assert list(counts._counts) == ["7", "8", "9"]
