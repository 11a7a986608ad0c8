"""Other systems that SYMPHONY compares with: their published decisions as pure classes, for the simulator only."""
