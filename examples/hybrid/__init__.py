"""A serving engine for one hybrid model, built from the kernels and the cache pool."""
