"""Workshop: the embedded models as they are shipped, weights, cards and calibration text."""
