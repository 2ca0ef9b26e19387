"""Speed, measured: each figure is a ratio with both sides from one run."""
