"""Make the small model of this task, and its data in verl's format.

python -m examples.roads.make model --out DIR        # a LLaMA of 1.7 M parameters; about twelve minutes on one core
python -m examples.roads.make data --out DIR --tasks 64 --seed 0
"""

from __future__ import annotations

from examples.tiny_world.small_task import SmallTask, main

from . import maps
from .reward import compute_score

PHRASES = (*maps.GO, *maps.LOOK, *maps.DEAD, *maps.BACK, *maps.DONE, *maps.MUSING, *maps.TOWNS)
TASK = SmallTask(
    source="rhyme/roads",
    ability="search",
    phrases=(*PHRASES, "roads : from to , ."),
    weights=dict.fromkeys(maps.TOWNS, 2.0),  # their choice decides the answer
    draw=lambda rng, _: maps.draw(rng),
    search=maps.search,
    score=compute_score,
    model={"arch": "llama", "heads": 5, "layers": 5},
)

if __name__ == "__main__":
    main(__doc__, TASK)
