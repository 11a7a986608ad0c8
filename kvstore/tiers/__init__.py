"""Where bytes lie and how they move: the arena, files, blobs and other nodes."""
