"""The base of every process: clock, configuration, life cycle, RPC, logs and metrics. Knows no service."""

import os

# gRPC reads it when it is first imported. Otherwise each failed handshake of a neighbour is a line in the log.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")
