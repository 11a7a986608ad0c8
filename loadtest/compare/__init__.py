"""`upbeat bench compare`: one load on several targets, in turns on one machine, with repeats, medians and spread (docs/bench.md)."""
