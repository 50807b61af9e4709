"""Tests on all ranks at once."""
