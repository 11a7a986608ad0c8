"""A fleet in virtual time: production cores of scheduler, workers and stores, with modelled durations and users. See
docs/simulator.md."""
