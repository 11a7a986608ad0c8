"""What every engine beside a node's store needs: the link to the store, its arena, and the choice to load or compute.

Other engines import it too, so it needs only Python 3.10, grpcio, protobuf and blake3 (docs/design/0027). Decisions are
in `core/`; the caller supplies the log.
"""
