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


def test_records_are_filled_by_id_which_is_removed():
    servers = {"0/0": Server({"a": {"drafted_tokens": 5}}), "0/1": Server({"b": {"drafted_tokens": 7}})}
    filled = DraftCounts(lambda: servers).fill([record("b"), record("a"), record("c")])
    assert filled == [{"sample": 1, "drafted_tokens": drafted} for drafted in (7, 5, 0)]
    assert [server.calls for server in servers.values()] == [1, 1], "not one message per server"


def test_counts_are_kept_for_records_of_a_later_step():
    server = Server({"a": {"drafted_tokens": 5}, "b": {"drafted_tokens": 7}})
    counts = DraftCounts(lambda: {"0/0": server})
    assert counts.fill([record("a")])[0]["drafted_tokens"] == 5
    assert counts.fill([record("b")])[0]["drafted_tokens"] == 7
    assert not counts._counts


def test_silent_server_gets_no_second_request_and_its_late_answer_counts(caplog):
    server, other = Server({"a": {"drafted_tokens": 5}}, late=True), Server({"b": {"drafted_tokens": 7}})
    counts = DraftCounts(lambda: {"0/0": server, "0/1": other})
    assert [row["drafted_tokens"] for row in counts.fill([record("x"), record("b")])] == [0, 7]
    counts.fill([])
    assert (server.calls, other.calls) == (1, 2)
    assert len(caplog.records) == 1
    server.late = False
    assert counts.fill([record("a")])[0]["drafted_tokens"] == 5
    counts.fill([])
    assert server.calls == 2


def test_dead_server_loses_only_its_counts(caplog):
    dead, other = Server(draft_counts.ray.exceptions.RayActorError()), Server({"b": {"drafted_tokens": 7}})
    filled = DraftCounts(lambda: {"0/0": dead, "0/1": other}).fill([record("a"), record("b")])
    assert [row["drafted_tokens"] for row in filled] == [0, 7]
    assert len(caplog.records) == 1


def test_unclaimed_counts_are_bounded(monkeypatch):
    monkeypatch.setattr(draft_counts, "_MAX_KEPT", 3)
    server = Server({str(i): {"drafted_tokens": i} for i in range(10)})
    counts = DraftCounts(lambda: {"0/0": server})
    counts.fill([])
    assert list(counts._counts) == ["7", "8", "9"]
