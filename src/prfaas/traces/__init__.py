"""Readers of published request traces."""
