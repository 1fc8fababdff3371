"""Reward function for mathematics: ``reward.custom_reward_function.path=examples/data/math_reward.py``.

The answer is the last ``\\boxed{...}`` or ``Answer: ...`` line (for GSM8K also ``#### ...``), whichever ends later. It
is right if it is the same text, the same integer, or mathematically equal by Math-Verify
(https://github.com/huggingface/Math-Verify): 1/2 equals 0.5, sets have no order, units do not count.

verl calls rewards in threads, but Math-Verify's time limit works only in a main thread and cannot interrupt a power of
large integers. So a separate process compares answers, and the kernel kills it at the time limit. verl loads this file
by its path, so the file imports nothing from its package and defines no dataclass.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import json
import os
import re
import resource
import signal
import subprocess
import sys
import threading
from typing import IO, Any

if importlib.util.find_spec("math_verify") is None:
    raise ImportError("examples/data/math_reward.py needs Math-Verify: pip install 'math-verify>=0.8'")

#: Number of last characters of a response that are searched; verl searches the last 300.
TAIL = 2000
#: Longer answers are wrong; the longest in MATH-500 has 159 characters.
MAX_ANSWER = 300
#: Maximum bytes of memory for a comparison.
MAX_MEMORY = 4 << 30

_TOKEN = re.compile(r"\\(?:boxed|fbox)\s*\{|\\.|[{}]", re.DOTALL)
_LINE = re.compile(r"\banswer\b[ \t*_]*[:：][\s*_]*([^\n]*)", re.IGNORECASE)
_HASHES = re.compile(r"####[ \t]*([^\n]*)")
_INTEGER = re.compile(r"[+-]?\d+(?:\.0*)?")
_TEXT = re.compile(r"\\(?:text|textbf|textit|textrm|mbox|mathrm|mathbf)\s*\{([^{}]*)\}")
_NOTHING = re.compile(
    r"(?<!\\)\\[!,;: ()\[\]]|\\(?:left|right|displaystyle|quad)(?![A-Za-z])|\\?[$%]|~"
    r"|\^\s*\{?\s*\\(?:circ|degree)(?![A-Za-z])\s*\}?"
)
# "Answer: the final answer is $42$." gives 42; with numbers outside of the formula there is no single answer.
_SENTENCE = re.compile(r"[^$\d]*\$([^$]+)\$[\s.]*")
# A number and its unit; but "3 or 4" is not a number with a unit.
_COUNT = re.compile(
    r"(?!.*\b(?:and|or|to|pi|mod|sqrt|plus|minus|times|over|hundred|thousand|million|billion|dozen|half|halves|thirds)\b)"
    r"([+-]?[\d.,/]*\d)(?:\s+[A-Za-z]{2,}(?:\s*\^\s*\{?[23]\}?)?){1,3}",
    re.IGNORECASE,
)


def compute_score(
    data_source: Any,
    solution_str: Any,
    ground_truth: Any,
    extra_info: Any = None,
    *,
    wrong_score: float = 0.0,
    time_limit: float = 5.0,
    **kwargs: Any,
) -> dict[str, Any]:
    """Return the score of one response; every response gets a score.

    Args:
        data_source: ``"openai/gsm8k"`` allows an answer after ``####``; other values are not used.
        solution_str: The decoded response.
        ground_truth: The right answer, as LaTeX or plain text.
        extra_info: Not used.
        wrong_score: Score of a wrong answer: 0, or -1 as in DAPO (https://arxiv.org/abs/2503.14476).
        time_limit: Time limit of the comparison in seconds; after it the answer counts as wrong.

    Returns:
        ``score``, 1 if right, else ``wrong_score``; ``acc``, 1 if right, else 0; ``pred``, the answer as text, or
        ``""`` without an answer.

    Raises:
        RuntimeError: The process that compares answers fails; its error is on standard error.
    """
    answer = extract_answer(str(solution_str), hashes=data_source == "openai/gsm8k")
    right = answer is not None and is_equal(str(ground_truth), answer, time_limit)
    return {"score": 1.0 if right else float(wrong_score), "acc": float(right), "pred": normalise(answer or "")}


def compute_dapo_score(data_source: Any, solution_str: Any, ground_truth: Any, *args: Any, **kwargs: Any) -> Any:
    """Return verl's score for DAPO's rows (``data_source`` ``"math_dapo"``, including AIME), and our score for others:
    verl has none for most of them. A wrong answer scores -1 there."""
    if data_source == "math_dapo":
        from verl.utils.reward_score import math_dapo

        return math_dapo.compute_score(solution_str, ground_truth)
    return compute_score(data_source, solution_str, ground_truth, *args, **{"wrong_score": -1.0, **kwargs})


def extract_answer(response: str, hashes: bool = False) -> str | None:
    """Return the last answer after the reasoning, or ``None``; ``hashes`` also accepts ``#### 42``."""
    tail = response.rpartition("</think>")[2][-TAIL:]
    lines = [*_LINE.finditer(tail), *(_HASHES.finditer(tail) if hashes else ())]
    line = max(lines, key=lambda match: match.start(1), default=None)
    box = _last_box(tail)
    if box is not None and (line is None or box[1] > line.start(1)):
        return tail[slice(*box)].strip()
    if line is None:
        return None
    sentence = _SENTENCE.fullmatch(line[1])
    return sentence[1].strip() if sentence else line[1].strip("*_ \t\r")


def normalise(answer: str) -> str:
    """Return the answer without most spaces, dollar and per cent signs, units and thousands separators."""
    text = _NOTHING.sub("", answer.replace("{,}", ",")).strip().rstrip(".")
    text = _TEXT.sub(r" \1 ", text).strip().rstrip(".").strip()
    text = re.sub(r"\\[dt]frac(?![A-Za-z])", r"\\frac", text)
    if count := _COUNT.fullmatch(text):
        text = count[1]
    text = re.sub(r"\s+(?![A-Za-z])|(?<![A-Za-z])\s+", "", text)
    if re.fullmatch(r"[+-]?\d{1,3}(?:,\d{3})+(?:\.\d+)?", text):
        text = text.replace(",", "")
    return text[1:-1] if re.fullmatch(r"\([A-Za-z]\)", text) else text  # a choice such as (C)


def is_equal(ground_truth: str, answer: str, time_limit: float = 5.0) -> bool:
    """Return whether two answers are equal; false if the comparison exceeds ``time_limit`` seconds."""
    if max(len(ground_truth), len(answer)) > MAX_ANSWER:
        return False
    truth, mine = normalise(ground_truth), normalise(answer)
    if not truth or not mine:
        return False
    if _INTEGER.fullmatch(truth) and _INTEGER.fullmatch(mine):
        return int(truth.partition(".")[0]) == int(mine.partition(".")[0])
    # Math-Verify reads a word as a product of letters, and so an anagram as equal.
    if re.fullmatch(r"[A-Za-z]{3,}", truth) or _TEXT.fullmatch(ground_truth.strip()):
        return truth.casefold() == mine.casefold()
    if truth == mine:
        return True
    # Math-Verify handles \text{} itself.
    truth, mine = (_NOTHING.sub("", text).strip() for text in (ground_truth, answer))
    return _checker().is_equal(truth, mine, time_limit)


def _last_box(text: str) -> tuple[int, int] | None:
    """Return start and end of the content of the last complete ``\\boxed{...}``, in linear time."""
    opened: list[int | None] = []
    last = None
    for token in _TOKEN.finditer(text):
        if token[0] == "}":
            start = opened.pop() if opened else None
            if start is not None:
                last = start, token.start()
        elif token[0] == "{":
            opened.append(None)
        elif token[0].endswith("{") and len(token[0]) > 2:
            opened.append(token.end())
    return last


_COMMAND = [sys.executable, os.path.abspath(__file__)]


class _Checker:
    """Process that compares answers one by one; thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[str] | None = None

    def is_equal(self, truth: str, answer: str, time_limit: float) -> bool:
        question = json.dumps([truth, answer, time_limit])
        with self._lock:
            try:
                return self._ask(question)
            except (OSError, ValueError):
                self.close()  # killed, perhaps for lack of memory
            try:
                return self._ask(question)
            except (OSError, ValueError) as error:
                self.close()
                raise RuntimeError(
                    f"the process that compares answers fails at its start; see its error above, or run it: {_COMMAND}"
                ) from error

    def _ask(self, question: str) -> bool:
        if self._process is None:
            # A separate session, so that Ctrl-C does not reach it; it ends with its standard input.
            self._process = subprocess.Popen(
                _COMMAND, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
            )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(question + "\n")
        self._process.stdin.flush()
        return bool(json.loads(self._process.stdout.readline()))

    def close(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None


@functools.cache
def _checker_of(pid: int) -> _Checker:
    return _Checker()


def _checker() -> _Checker:
    return _checker_of(os.getpid())  # a fork must not share its parent's pipes


def _serve(questions: IO[str], answers: IO[str]) -> None:
    """Serve comparisons, one per line. A killed worker counts as a false answer; the next worker is forked at once."""
    import logging

    import math_verify

    logging.disable()
    math_verify.parse(r"\boxed{\frac{1}{2}}", parsing_timeout=None)  # the first use builds the parser's tables
    while True:
        worker = os.fork()
        if worker == 0:
            # One comparison is pending at a time, so a worker never reads beyond the line that kills it.
            for line in questions:
                truth, answer, time_limit = json.loads(line)
                signal.setitimer(signal.ITIMER_REAL, time_limit)
                equal = _verify(truth, answer)
                signal.setitimer(signal.ITIMER_REAL, 0)
                print(json.dumps(equal), file=answers, flush=True)
            os._exit(0)
        _, status = os.waitpid(worker, 0)
        if status == 0:
            return
        print("false", file=answers, flush=True)


def _verify(truth: str, answer: str) -> bool:
    from math_verify import parse, verify

    try:
        parsed = [parse(f"\\boxed{{{text}}}", parsing_timeout=None) for text in (truth, answer)]
        return bool(verify(*parsed, timeout_seconds=None))
    except Exception:
        return False


if __name__ == "__main__":
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY, MAX_MEMORY))
    answers = os.fdopen(os.dup(1), "w")
    sys.stdout = sys.stderr  # keeps libraries' output out of the answers
    _serve(sys.stdin, answers)
