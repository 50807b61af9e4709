"""Communicators, meshes and the layers that compute in parallel."""
