"""The owner's side of the bare comparison: an arena registered with a bare NIXL UCX agent, until stdin ends."""

from __future__ import annotations

import base64
import json
import select
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from ground import arena, bare_agent


def main() -> None:
    size = int(sys.argv[1])
    with arena(size, "bare-peer") as memory:
        agent = bare_agent(f"bare-peer-{memory.address}", "UCX", memory)
        card = {"metadata": base64.b64encode(agent.get_agent_metadata()).decode(), "base": memory.address}
        print(json.dumps(card), flush=True)
        while not select.select([sys.stdin], [], [], 0.0005)[0]:
            agent.get_new_notifs()  # progress


if __name__ == "__main__":
    main()
