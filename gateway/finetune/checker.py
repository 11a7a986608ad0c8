"""`python -m gateway.finetune.checker`: checks training files. `gateway.finetune.checking` starts it."""

from __future__ import annotations

import json
from pathlib import Path

from contracts.errors import UpbeatError
from runtime.child import serve
from runtime.training_file import check_file


def answer(payload: bytes) -> bytes:
    """For the path of a file, JSON: `examples`, or `error`."""
    path = Path(json.loads(payload))
    try:
        return json.dumps({"examples": check_file(path)}).encode()
    except (UpbeatError, ValueError) as e:
        return json.dumps({"error": str(e)}).encode()
    except RecursionError:
        return json.dumps({"error": "a line is nested too deeply"}).encode()
    except MemoryError:
        return json.dumps({"error": "a line takes too much memory; split the example"}).encode()
    except OSError as e:
        return json.dumps({"gone": str(e.strerror)}).encode()


if __name__ == "__main__":
    serve(answer)
