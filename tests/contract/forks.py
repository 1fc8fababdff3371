"""Serves :class:`conftest.Forks`: imports verl, with the plugin, once, and runs each request in a fork of itself.

A request is a line of JSON, the answer the exit status: ``{"code": ..., "arguments": [...], "cwd": ..., "env": {...},
"stdout": FILE, "stderr": FILE}``. Without ``code``, ``arguments`` are those of ``python -m verl.trainer.main_ppo``.
"""

import json
import os
import runpy
import sys
import traceback

import verl.trainer.main_ppo
import verl.trainer.ppo.v1  # noqa: F401


def run(request):
    """In the child, as Python runs a command; does not return."""
    os.chdir(request["cwd"])
    os.environ.update(request["env"])
    for descriptor, name in ((1, "stdout"), (2, "stderr")):
        os.dup2(os.open(request[name], os.O_WRONLY | os.O_CREAT, 0o600), descriptor)
    status = 0
    try:
        if request["code"] is not None:
            exec(compile(request["code"], "<request>", "exec"), {"__name__": "__main__"})
        else:
            sys.argv = ["main_ppo", *request["arguments"]]
            del sys.modules["verl.trainer.main_ppo"]
            runpy.run_module("verl.trainer.main_ppo", run_name="__main__", alter_sys=True)
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what verl prints is no answer
    print("ready", file=answers, flush=True)
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            run(json.loads(line))
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), file=answers, flush=True)
