"""Where bytes are stored and how they move: the arena, files, blobs and other nodes."""
