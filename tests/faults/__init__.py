"""Faults on purpose: kills, storms and fuzzing, and the checks that nothing came of them."""
