"""Start, watch, kill and read training runs of ``recipes/run_tiny_cpu.sh``."""

import json
import os
import re
import signal
import subprocess
import time
from contextlib import suppress
from pathlib import Path

import psutil

from verl_rhyme.observability import events

ROOT = Path(__file__).parents[2]
RHYME = "actor_rollout_ref.rollout.custom.rhyme"
_FAILURE = re.compile(r"failed; its prompt is replaced|Traceback \(most recent call last\)")
#: Share of requests that must draft from their prompt's history. It is read beside the engine's steps: on a busy
#: machine the shortest responses are over before theirs has come.
MOSTLY = 0.9


def importing(modules, *folders):
    """Environment of a run that imports modules of this folder in each of its processes."""
    path = [str(ROOT / "tests" / "e2e"), *map(str, folders), os.environ.get("PYTHONPATH")]
    return {"VERL_USE_EXTERNAL_MODULES": modules, "PYTHONPATH": os.pathsep.join(filter(None, path))}


def steady(step_ms, modules="", **more):
    """The same of a run whose decoding steps take so many milliseconds at least (benchmarks/steady_step)."""
    return importing(modules, ROOT / "benchmarks" / "steady_step") | {"STEADY_STEP_MS": step_ms, **more}


#: A line of train.log.
REOPENED = "the coordinator died and is opened again"
#: Processes of a run by the titles that Ray and vLLM give them.
KINDS = {
    "coordinator": ("ray::Coordinator",),
    "agent loop worker": ("ray::SessionAgentLoopWorker",),
    "replica": ("ray::RhymeHttpServer", "VLLM::EngineCore"),
}


def processes(run_dir, kind):
    """Of this run: they have inherited its environment."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        if " ".join(process.info["cmdline"] or []).startswith(KINDS[kind]):
            with suppress(psutil.Error):
                if process.environ().get("RUN_DIR") == str(run_dir):
                    found.append(process)
    return found


_started: list[subprocess.Popen] = []


def start(run_dir, *overrides, epochs, **env):
    return start_recipe("tiny_cpu", run_dir, *overrides, EPOCHS=str(epochs), **{"PROMPTS": "16", **env})


def start_recipe(name, run_dir, *overrides, **env):
    process = subprocess.Popen(
        ["bash", str(ROOT / "recipes" / f"run_{name}.sh"), *overrides],
        env={**os.environ, "RUN_DIR": str(run_dir), **env},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    _started.append(process)
    return process


def kill_left():
    """Kill the runs that a failed test left: they would take the memory of the next ones."""
    while _started:
        if (process := _started.pop()).poll() is None:
            kill_all(process)


def finish(process, run_dir, timeout=900):
    try:
        output, _ = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGTERM)
        try:
            output, _ = process.communicate(timeout=60)
        except subprocess.TimeoutExpired:
            kill_all(process)
            output, _ = process.communicate(timeout=60)
        output += "\n(timed out)"
    assert process.returncode == 0, f"{_story(run_dir)}\n--- output\n{output[-3000:]}"
    return output


def _story(run_dir):
    """Of train.log what a reader who has nothing else needs: the first that failed, what Ray ended, the end."""
    log = run_dir / "train.log"
    lines = log.read_text(errors="replace").splitlines() if log.exists() else []
    first = next((n for n, line in enumerate(lines) if _FAILURE.search(line)), len(lines))
    ended = [line for line in lines if "OOM" in line or "memory pressure" in line or "died unexpectedly" in line]
    parts = {"what failed first": lines[first : first + 40], "deaths": ended[:5], "train.log": lines[-20:]}
    return "\n".join(f"--- {name}\n" + "\n".join(line[:300] for line in part) for name, part in parts.items())


def steps_of(run_dir):
    """(step, metrics) in the order they were logged, also before resumes."""
    file = run_dir / "metrics.jsonl"
    lines = file.read_text().splitlines() if file.exists() else []
    return [(line["step"], line["data"]) for line in map(json.loads, lines)]


def requests_of(run_dir):
    """Columns of the event log's requests."""
    return events.to_numpy(events.read_requests(run_dir / "checkpoints" / "events"))


def lengths_of(requests):
    """Generated tokens of each sample for training, over all its requests, by uid and number."""
    lengths, train = {}, ~requests["validate"]
    for uid, sample, count in zip(*(requests[n][train] for n in ("uid", "sample", "response_tokens")), strict=True):
        lengths[uid, sample] = lengths.get((uid, sample), 0) + count
    return lengths


def wait_for_step(process, run_dir, step, timeout=800, known=0):
    """Return once the step is logged, not counting the first ``known`` lines, which are of earlier starts.

    Raises:
        AssertionError: The run ended before.
        TimeoutError: It hangs, and was killed.
    """
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline and process.poll() is None:
        if any(found >= step for found, _ in steps_of(run_dir)[known:]):
            return
        time.sleep(0.2)
    error = AssertionError
    if process.poll() is None:
        kill_all(process)
        error = TimeoutError
    output = process.communicate(timeout=60)[0]
    raise error(f"no step {step}: {_story(run_dir)}\n--- output\n{output[-2000:]}")


def kill_all(process):
    """kill -9 of the whole run: everything that descends from the command, wherever it moved to."""
    family = [*psutil.Process(process.pid).children(recursive=True), psutil.Process(process.pid)]
    sessions = {os.getsid(p.pid) for p in family if p.is_running()}
    for victim in psutil.process_iter(["pid"]):
        try:
            if os.getsid(victim.pid) in sessions or victim in family:
                victim.kill()
        except (ProcessLookupError, psutil.NoSuchProcess, PermissionError):
            continue
    process.wait(timeout=30)
