"""Groups without a gradient: all their trajectories have one score (DAPO, arXiv:2503.14476, section 3.2)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

#: Minimum number of consecutive filtered groups that ends a run, however small a batch is. If the filter keeps one in
#: ten, one of seven runs of a million groups has such a sequence.
_UNIFORM_GROUPS = 128


class RolloutError(RuntimeError):
    """Training cannot continue: too many consecutive prompts failed or were filtered."""


class GroupFilter:
    """Filter of finished groups.

    Args:
        metric: Name of the score; ``None``: all groups are kept.
        batch_prompts: Prompts of an update batch.

    Attributes:
        dropped: Number of groups dropped since the last batch, by their common score.
    """

    def __init__(self, metric: str | None, batch_prompts: int) -> None:
        self.metric = metric
        self.dropped: Counter[float] = Counter()
        self._in_a_row: Counter[float] = Counter()  # groups dropped since one was kept, by score
        self._most_in_a_row = max(2 * batch_prompts, _UNIFORM_GROUPS)

    def keeps(self, scores: Sequence[Sequence[float]]) -> bool:
        """Return whether a group is kept, and count it.

        Args:
            scores: Scores of each sample's trajectories. A group is kept if those of a sample are unknown.

        Raises:
            RolloutError: Too many consecutive groups were dropped.
        """
        if self.metric is None:
            return True
        flat = [score for of_sample in scores for score in of_sample]
        if not all(scores) or len(flat) < 2 or any(score != flat[0] for score in flat):
            self._in_a_row.clear()
            return True
        self.dropped[flat[0]] += 1
        self._in_a_row[flat[0]] += 1
        if (count := self._in_a_row.total()) < self._most_in_a_row:
            return False
        listed = ", ".join(f"{round(score, 4)} in {groups}" for score, groups in self._in_a_row.most_common(4))
        raise RolloutError(
            f"algorithm.filter_groups dropped all {count} groups since it last kept one (metric {self.metric}): "
            f"within each group all samples have the same score. The scores: {listed}. Check the reward function "
            "(reward.custom_reward_function) and algorithm.filter_groups.metric. If prompts are too easy or too "
            "hard, choose others or set algorithm.filter_groups.enable=false. Then start the same command: it "
            "resumes from the last checkpoint."
        )
