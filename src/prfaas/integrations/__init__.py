"""Engines and servers that prfaas plugs into; each behind its own extra."""
