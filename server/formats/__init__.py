"""From pieces of text to the two wire formats."""
