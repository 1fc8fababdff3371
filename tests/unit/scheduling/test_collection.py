"""The content of an update batch."""

from verl_rhyme.scheduling.collection import batch
from verl_rhyme.scheduling.ledger import Ledger
from verl_rhyme.scheduling.rules import Rules


def test_a_batch_has_the_samples_that_later_batches_cannot_hold_then_those_loaded_first():
    """The example of the module, with the oldest samples loaded last."""
    rules, ledger = Rules(4, 4, max_staleness=2, unit="trajectory"), Ledger("trajectory")
    for number, version in enumerate([7, 7, 7, 6, 6, 6, 6, 6, 5]):
        ledger.load(f"p{number}", 1)
        sample = ledger.move(f"p{number}", 0, "finished", restored=True)
        sample.tokens, sample.first_version = 10, version

    def taken(reserved=()):
        return [prompt.uid for prompt, _ in batch(rules, ledger, 7, "finished", reserved=reserved)]

    assert taken() == ["p8", "p3", "p0", "p1"]
    assert taken(reserved=["p6", "p2"]) == ["p8", "p6", "p2", "p0"]
