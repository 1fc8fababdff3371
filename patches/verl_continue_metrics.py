"""Let verl's file logger continue the metrics of a resumed run."""

from verl_rhyme.patches.core import Patch, edited

PATCH = Patch(
    name="verl_continue_metrics",
    target="verl.utils.tracking:FileLogger.__init__",
    why="a resumed run truncates the metrics file of its earlier steps; the trainer calls the logger without an option "
    "for it",
    requires="verl==0.9.1",
    source_sha256="4b6d351976ced9bd64d7f3ad017b28556753a47f7d8451793c7866b2473a6022",
    # a run from the first step overwrites the file, as in verl
    replace=edited(
        ('open(self.filepath, "wb"', 'open(self.filepath, "ab" if getattr(FileLogger, "resumed", False) else "wb"')
    ),
)
