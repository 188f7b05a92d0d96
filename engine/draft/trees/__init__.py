"""Tree growth: strategies that choose nodes, sampling of children, and calibration from observed acceptance."""
