"""Groups without a gradient: all their trajectories have one score (DAPO, arXiv:2503.14476, section 3.2).

A low keep rate is costly, not wrong. The run ends only if the rate is effectively zero: at a rate of 1% fewer than one
of 10,000 runs of 5,000 steps ends so (``tests/unit/scheduling/test_group_filter.py`` computes it).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from verl_rhyme.scheduling.retries import RolloutError

#: Consecutive dropped groups that end a run; the same if every score since the start is equal (a broken reward).
NONE_KEPT, ONE_SCORE = 4096, 1024
#: Consecutive dropped groups after which, and after as many again, there is a warning.
WARNED = 256


class GroupFilter:
    """Filter of finished groups by the score ``metric``; with ``None`` all are kept."""

    def __init__(self, metric: str | None) -> None:
        self.metric = metric
        self.dropped: Counter[float] = Counter()  # groups since the last batch, by their common score
        self.warnings: list[str] = []  # to be logged
        self._in_a_row: Counter[float] = Counter()  # groups dropped since one was kept, by score
        self._ever_kept = False

    def keeps(self, scores: Sequence[Sequence[float]]) -> bool:
        """Count a group and return whether it is kept, by each sample's scores (kept if a sample's are unknown).

        Raises :class:`RolloutError` if too many consecutive groups were dropped.
        """
        if self.metric is None:
            return True
        flat = [score for of_sample in scores for score in of_sample]
        kept = not all(scores) or len(flat) < 2 or any(score != flat[0] for score in flat)
        if kept:
            self._ever_kept = True
            self._in_a_row.clear()
        else:
            self.dropped[flat[0]] += 1
            self._in_a_row[flat[0]] += 1
            self._end_hopeless()
        return kept

    def _end_hopeless(self) -> None:
        count = self._in_a_row.total()
        limit = ONE_SCORE if not self._ever_kept and len(self._in_a_row) == 1 else NONE_KEPT
        scores = ", ".join(f"{round(score, 4)} in {groups}" for score, groups in self._in_a_row.most_common(4))
        if count % WARNED == 0:
            self.warnings.append(
                f"algorithm.filter_groups dropped the last {count} groups: {scores}. The run ends after {limit}"
            )
        if count < limit:
            return
        raise RolloutError(
            f"algorithm.filter_groups dropped all {count} groups since it last kept one (metric {self.metric}, limit "
            f"{limit}): within each group all samples have the same score. The scores: {scores}. Check the reward "
            "function (reward.custom_reward_function) and algorithm.filter_groups.metric. If prompts are too easy or "
            "too hard, choose others or set algorithm.filter_groups.enable=false. Then start the same command: it "
            "resumes from the last checkpoint."
        )

    # ---- checkpoints: plain values for JSON ----

    def state_dict(self) -> dict[str, Any]:
        return {"in_a_row": list(self._in_a_row.items()), "ever_kept": self._ever_kept}

    def load_state_dict(self, state: dict[str, Any], dropped: Iterable[tuple[float, int]]) -> None:
        self.dropped.update(dict(dropped))
        self._in_a_row.update(dict(state.get("in_a_row", ())))
        self._ever_kept = state.get("ever_kept", True)  # a state of an earlier version is of a run that trained
