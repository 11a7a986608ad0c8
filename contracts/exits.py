"""Exit statuses of services that launchers understand."""

from __future__ import annotations

from typing import Final

#: Wrong usage or configuration.
WRONG_USAGE: Final = 2
#: The service asks to be started again; nothing went wrong.
START_AGAIN: Final = 75
#: The node has left the fleet: the service is not to be started again.
LEFT: Final = 76
