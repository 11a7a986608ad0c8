"""`upbeat bench compare`: sends one load to several targets, in turn, with repeats (docs/bench.md)."""
