"""The parts of the two-cluster demo: processes, the link between them, the work and the report."""
