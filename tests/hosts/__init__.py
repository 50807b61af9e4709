"""Tests on two emulated hosts with a slow link between them."""
