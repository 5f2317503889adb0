"""Hybrid-attention kernels: for every operation a torch truth, and the fast forms beside it."""
