"""Requests as they arrive: values and arrival processes."""
