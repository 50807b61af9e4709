"""Mixtures of experts: every token is computed by a few of many MLPs, spread over ranks."""
