"""Measurements: medians of interleaved repeats, beside the peer in the same run, as ratios."""
