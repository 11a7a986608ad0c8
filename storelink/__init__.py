"""What every engine beside a node's store needs: the link to it, its arena, and what to load and what to compute.

It runs inside other people's engines too: on Python 3.10, with grpcio, protobuf and blake3, and nothing else that is not Python's own
(docs/design/0027). It decides in `core/`; it logs to whatever log it is given.
"""
