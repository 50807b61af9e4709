"""Tests in one process."""
