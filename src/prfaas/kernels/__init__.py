"""Hybrid-attention kernels. None yet: engines bring their own, see README, "not yet"."""
