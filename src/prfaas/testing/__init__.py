"""Conformance functions for third-party implementations; no test framework needed."""
