"""How a tree grows: which node gets children, how children are drawn, and what acceptance was observed."""
