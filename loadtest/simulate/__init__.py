"""A fleet in virtual time: the scheduler's own core, nodes that only cost time, people who read, type and ask. See docs/simulator.md."""
