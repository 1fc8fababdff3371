"""Errors in one line, and the cause of a failure in a log of many processes."""

from pathlib import Path

import pytest

from verl_rhyme.observability.errors import SHOWN_LINES, first_line, last_error, last_line


@pytest.mark.parametrize(
    ("text", "first", "last"), [("\nwhat\nTraceback\nwhy\n", "what", "why"), ("\n", "OSError", "OSError")]
)
def test_an_error_in_one_line(text, first, last):
    assert (first_line(OSError(text)), last_line(OSError(text))) == (first, last)


RAY_LOG = """\
\x1b[36m(TaskRunner pid=77)\x1b[0m starting
(WorkerDict pid=12) Traceback (most recent call last):
(TaskRunner pid=77) INFO some other line
(WorkerDict pid=12)   File "worker.py", line 9, in update
(WorkerDict pid=12)     raise OSError("disk")
(WorkerDict pid=12) OSError: disk
Error executing job with overrides: ['a=b']
Traceback (most recent call last):
  File "main_ppo.py", line 45, in main
    run_ppo(config)
ray.exceptions.RayTaskError(ValueError): ray::TaskRunner.run() (pid=77, ip=10.0.0.1)
  File "trainer.py", line 3, in run
    raise ValueError("train_batch_size must divide")
ValueError: train_batch_size must divide

Set the environment variable HYDRA_FULL_ERROR=1 for a complete stack trace.
(EngineCore pid=99) ERROR 11-20 10:00:00 [core.py:12] Traceback (most recent call last):
(EngineCore pid=99) ERROR 11-20 10:00:00 [core.py:12]   File "core.py", line 1, in step
(EngineCore pid=99) ERROR 11-20 10:00:00 [core.py:12] KeyboardInterrupt
(Other pid=5) Traceback (most recent call last):
(Other pid=5)   File "x.py", line 1, in f
(Other pid=5) ray.exceptions.ActorDiedError: The actor died unexpectedly [repeated 3x across cluster]
Exception ignored in: <function D.__del__>
Traceback (most recent call last):
  File "d.py", line 1, in __del__
TypeError: 'NoneType' object is not callable
"""


def test_last_error_is_the_cause_not_the_aftermath(tmp_path: Path) -> None:
    log = tmp_path / "train.log"
    log.write_text(RAY_LOG)
    lines = last_error(log)
    assert (lines[0], lines[-1]) == (
        "Traceback (most recent call last):",
        "ValueError: train_batch_size must divide",
    )
    assert 'File "trainer.py", line 3, in run' in lines[-3]
    # Only this run's part counts. It has no cause, so an error of the aftermath is shown.
    lines = last_error(log, begin=RAY_LOG.index("(EngineCore"))
    assert lines[-1].startswith("ray.exceptions.ActorDiedError")


FRAMES = ['  File "worker.py", line 9, in update', '    raise OSError("disk")']
RAYS = """\
Traceback (most recent call last):
ray.exceptions.RayTaskError(RolloutError): ray::Coordinator.enough() (pid=7)
  File "rollout.py", line 3, in _fail
verl_rhyme.scheduling.retries.RolloutError: no sample succeeds
an unrelated line
"""
HYDRAS = "Could not override 'x'.\nhydra.errors.ConfigCompositionException: no x\nKey 'x' is not in struct\n"
DEEP = "Traceback (most recent call last):\n" + '  File "a.py"\n' * 100 + "RecursionError: deep\n"


@pytest.mark.parametrize(
    ("text", "end"),
    [
        (RAYS, ["verl_rhyme.scheduling.retries.RolloutError: no sample succeeds"]),
        # lines of two processes
        ("".join(RAY_LOG.splitlines(True)[:6]), ["Traceback (most recent call last):", *FRAMES, "OSError: disk"]),
        ("".join(f"noise {i}\n" for i in range(50)), ["noise 49"]),
        (HYDRAS, ["hydra.errors.ConfigCompositionException: no x"]),
        (DEEP, ["...", *['  File "a.py"'] * (SHOWN_LINES - 2), "RecursionError: deep"]),
        ("", ["(the log is empty)"]),
    ],
)
def test_the_end_of_a_log(tmp_path: Path, text: str, end: list[str]) -> None:
    log = tmp_path / "train.log"
    log.write_text(text)
    assert last_error(log)[-len(end) :] == end
    assert "cannot read" in last_error(tmp_path / "nowhere")[0]
