"""Layers, parameters, and the description of where a parameter's block lies."""
