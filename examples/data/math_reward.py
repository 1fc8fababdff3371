"""Reward for mathematics: ``reward.custom_reward_function.path=examples/data/math_reward.py``.

The answer is the last ``\\boxed{...}`` or ``Answer: ...`` line (for GSM8K also ``#### ...``), whichever ends later.
It is right when it is the same text, the same whole number, or the same mathematics by Math-Verify
(https://github.com/huggingface/Math-Verify): 1/2 is 0.5, sets have no order, units do not count.

verl calls rewards in threads, and Math-Verify's own time limit works in a main thread only; nor would it interrupt a
power of big integers. So answers are compared in a process of their own that the kernel ends when the time is up.
verl loads this file by its path: it imports nothing of its package and defines no dataclass.
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

#: Only so many last characters of a response are searched, as verl searches the last 300 of it.
TAIL = 2000
#: Longer answers are wrong; the longest in MATH-500 has 159 characters.
MAX_ANSWER = 300
#: Bytes of memory that comparing two answers may take.
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
# "Answer: the final answer is $42$." says 42; with numbers outside of the formula it is no single answer.
_SENTENCE = re.compile(r"[^$\d]*\$([^$]+)\$[\s.]*")
# A number and what it counts, but "3 or 4" is no number of fours.
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
    """Score one response; whatever the response is, it gets a score.

    Args:
        data_source: ``"openai/gsm8k"`` lets the answer follow ``####``; otherwise not used.
        solution_str: The decoded response.
        ground_truth: The right answer, as LaTeX or plain text.
        extra_info: Not used.
        wrong_score: Score of a wrong answer: 0, or -1 as in DAPO (https://arxiv.org/abs/2503.14476).
        time_limit: Seconds that comparing may take; what takes longer is wrong.

    Returns:
        ``score`` 1 when right, else ``wrong_score``; ``acc`` 1 when right, else 0; ``pred`` the answer as text, empty
        when there is none.

    Raises:
        RuntimeError: The process that compares answers cannot run; its own error is on standard error.
    """
    answer = extract_answer(str(solution_str), hashes=data_source == "openai/gsm8k")
    right = answer is not None and is_equal(str(ground_truth), answer, time_limit)
    return {"score": 1.0 if right else float(wrong_score), "acc": float(right), "pred": normalise(answer or "")}


def compute_dapo_score(data_source: Any, solution_str: Any, ground_truth: Any, *args: Any, **kwargs: Any) -> Any:
    """verl's own score of DAPO's rows (``data_source`` ``"math_dapo"``, AIME among them), as DAPO has it; of other rows
    ours, with -1 for a wrong answer: verl has none for most of them."""
    if data_source == "math_dapo":
        from verl.utils.reward_score import math_dapo

        return math_dapo.compute_score(solution_str, ground_truth)
    return compute_score(data_source, solution_str, ground_truth, *args, **{"wrong_score": -1.0, **kwargs})


def extract_answer(response: str, hashes: bool = False) -> str | None:
    """The last answer given after the thought, if any; ``hashes`` counts ``#### 42`` as one."""
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
    """The answer's text without what never matters: most spaces, dollars, per cent, units, thousands separators."""
    text = _NOTHING.sub("", answer.replace("{,}", ",")).strip().rstrip(".")
    text = _TEXT.sub(r" \1 ", text).strip().rstrip(".").strip()
    text = re.sub(r"\\[dt]frac(?![A-Za-z])", r"\\frac", text)
    if count := _COUNT.fullmatch(text):
        text = count[1]
    text = re.sub(r"\s+(?![A-Za-z])|(?<![A-Za-z])\s+", "", text)
    if re.fullmatch(r"[+-]?\d{1,3}(?:,\d{3})+(?:\.\d+)?", text):
        text = text.replace(",", "")
    return text[1:-1] if re.fullmatch(r"\([A-Za-z]\)", text) else text  # a choice, (C)


def is_equal(ground_truth: str, answer: str, time_limit: float = 5.0) -> bool:
    """Whether two answers mean the same; no if that takes longer than ``time_limit`` seconds."""
    if max(len(ground_truth), len(answer)) > MAX_ANSWER:
        return False
    truth, mine = normalise(ground_truth), normalise(answer)
    if not truth or not mine:
        return False
    if _INTEGER.fullmatch(truth) and _INTEGER.fullmatch(mine):
        return int(truth.partition(".")[0]) == int(mine.partition(".")[0])
    # Math-Verify would take a word for the product of its letters, and so an anagram for the word.
    if re.fullmatch(r"[A-Za-z]{3,}", truth) or _TEXT.fullmatch(ground_truth.strip()):
        return truth.casefold() == mine.casefold()
    if truth == mine:
        return True
    # Math-Verify knows what \text{} may hold.
    truth, mine = (_NOTHING.sub("", text).strip() for text in (ground_truth, answer))
    return _checker().is_equal(truth, mine, time_limit)


def _last_box(text: str) -> tuple[int, int] | None:
    """Start and end of what the last complete ``\\boxed{...}`` holds; linear in the text's length."""
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
    """A process that compares answers, one after another. Safe for threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[str] | None = None

    def is_equal(self, truth: str, answer: str, time_limit: float) -> bool:
        question = json.dumps([truth, answer, time_limit])
        with self._lock:
            try:
                return self._ask(question)
            except (OSError, ValueError):
                self.close()  # ended from outside, for want of memory perhaps
            try:
                return self._ask(question)
            except (OSError, ValueError) as error:
                self.close()
                raise RuntimeError(
                    f"the process that compares answers ends at once; see its error above, or run it: {_COMMAND}"
                ) from error

    def _ask(self, question: str) -> bool:
        if self._process is None:
            # Of its own session, Ctrl-C is not for it; it ends when its standard input does.
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
    """Answer questions, one a line. A worker that the kernel ends has answered no, and the next is forked at once."""
    import logging

    import math_verify

    logging.disable()
    math_verify.parse(r"\boxed{\frac{1}{2}}", parsing_timeout=None)  # the parser's tables are made at first use
    while True:
        worker = os.fork()
        if worker == 0:
            # Questions come one at a time, so no worker ever reads ahead of its own death.
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
    sys.stdout = sys.stderr  # what a library prints is no answer
    _serve(sys.stdin, answers)
