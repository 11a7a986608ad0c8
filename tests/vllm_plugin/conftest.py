"""Real stores for the connector's two sides."""

from tests.kvstore.conftest import make_stack

__all__ = ["make_stack"]
