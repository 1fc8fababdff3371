"""Make the small model of this task, and its data in verl's format.

python -m examples.countdown.make model --out DIR        # a Qwen2 of 0.9 M parameters; about ten minutes on one core
python -m examples.countdown.make data --out DIR --tasks 64 --seed 0
"""

from __future__ import annotations

from examples.tiny_world.small_task import SmallTask, main

from . import sums
from .reward import compute_score

NUMBERS = [str(n) for n in range(1, sums.LIMIT + 1)]
PHRASES = (*sums.TRY, *sums.LEFT, *sums.SMALL, *sums.BIG, *sums.BACK, *sums.MUSING, *sums.DONE, *sums.SIGNS)
TASK = SmallTask(
    source="rhyme/countdown",
    ability="arithmetic",
    phrases=(*PHRASES, "make from for = , .", *NUMBERS),
    weights={**dict.fromkeys(NUMBERS, 2.0), ".": 3.0, ",": 3.0},  # these two depend on whether a result is the goal
    draw=sums.draw,
    search=sums.search,
    score=compute_score,
    model={"arch": "qwen2"},
)

if __name__ == "__main__":
    main(__doc__, TASK)
