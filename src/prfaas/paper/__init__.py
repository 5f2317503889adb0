"""What arXiv 2604.15039 published, and what can be derived from it."""
