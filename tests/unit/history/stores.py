"""Stores of small histories, and killed writers."""

import os

import numpy as np

from verl_rhyme.history import environment
from verl_rhyme.history.reader import HistoryReader
from verl_rhyme.history.record import PromptHistory, Trajectory
from verl_rhyme.history.store import HistoryStore

NAMESPACE = "tokenizer-a"


def key(i):
    return int(i).to_bytes(16, "big")


def trajectory(i, tokens, epoch=0, sample=0, reward=1.0, visit=-1):
    return Trajectory(key(i), np.array(tokens, np.int32), reward, 3, epoch, sample, visit=visit)


def value(tokens):
    return PromptHistory.build([trajectory(0, tokens)]).encode()


def open_store(path, max_bytes=8 << 20, epochs=2, **options):
    return HistoryStore(path, NAMESPACE, max_bytes, epochs, **options)


def responses(history):
    return [history.response(i).tolist() for i in range(len(history))]


def read(path, i=1, namespace=NAMESPACE):
    """Return the responses of a prompt; ``None`` without a history."""
    reader = HistoryReader(path, namespace)
    history = reader.get(key(i))
    reader.close()
    return None if history is None else responses(history)


def kill(store):
    """Leave a store as the death of its process does: the folder is signed, and its lock free."""
    environment.release(store._values.opened)
    os.close(store._lock)
    store._lock, store._closed = None, True


def failing(error):
    """Return a function that raises."""

    def fail(*arguments, **named):
        raise error

    return fail
