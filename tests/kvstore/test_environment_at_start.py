"""How a store begins, before there is a loop."""

from __future__ import annotations

import json
import os
import subprocess
import sys

STARTS = """
import json, os, sys
import kvstore.__main__ as program
from runtime import service
def run(main):
    main.close()
    print(json.dumps([os.environ.get("UCX_NET_DEVICES"), len(os.listdir("/proc/self/task"))]))
service.run = run
sys.argv = ["upbeat-kvstore", "--node", "0"]
program.main()
"""


def test_the_environment_is_written_before_any_thread_could_read_it() -> None:
    # numpy's threads read it once, when they start
    alone = dict.fromkeys(("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS"), "1")
    done = subprocess.run(
        [sys.executable, "-c", STARTS], env=os.environ | alone, capture_output=True, text=True, timeout=120, check=True
    )
    assert json.loads(done.stdout.splitlines()[-1]) == ["lo", 1]
