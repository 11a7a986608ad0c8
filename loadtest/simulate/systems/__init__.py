"""Other people's systems, as far as SYMPHONY compares with them: their published decisions as pure classes, in the simulator only."""
