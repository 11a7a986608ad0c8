"""A store whose wall clock is wrong by UPBEAT_TEST_WALL_DAYS days: `store_program.py --config FILE --node N`.

`store_program.py --forks` starts one for each line of its input, by forking itself, so that a start costs no imports.
A line is JSON: argv, env, log (a file). It prints a line for each start ({"pid"}) and each end ({"pid", "status"}, as
`Popen.returncode`).
"""

from __future__ import annotations

import json
import os
import select
import sys
import time
from typing import Any

_DAY_S, _LOOK_S = 86_400.0, 0.005
_true_time = time.time


def run() -> None:
    """The store."""
    shift_s = _DAY_S * float(os.environ.get("UPBEAT_TEST_WALL_DAYS", "0"))
    time.time = lambda: _true_time() + shift_s
    from kvstore.__main__ import main

    main()


def fork(request: dict[str, Any]) -> int:
    """Returns the store's pid."""
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        nothing = os.open(os.devnull, os.O_RDONLY)
        for there, here in ((nothing, 0), (log, 1), (log, 2)):
            os.dup2(there, here)
        os.environ.clear()
        os.environ.update(request["env"])
        sys.argv = ["kvstore", *request["argv"]]
        run()
        status = 0
    except SystemExit as e:
        status = e.code if isinstance(e.code, int) else int(e.code is not None)
    finally:
        os._exit(status)


def serve() -> None:
    """Until the input ends."""
    import kvstore.__main__  # noqa: F401 - what all forks have then

    def say(**what: int) -> None:
        os.write(1, (json.dumps(what) + "\n").encode())

    waiting = b""
    while True:
        if select.select([0], [], [], _LOOK_S)[0]:
            read = os.read(0, 1 << 16)
            if not read:
                return
            *lines, waiting = (waiting + read).split(b"\n")
            for line in lines:
                say(pid=fork(json.loads(line)))
        try:
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                say(pid=ended[0], status=os.waitstatus_to_exitcode(ended[1]))
        except ChildProcessError:
            continue


if __name__ == "__main__":
    serve() if sys.argv[1:] == ["--forks"] else run()
