"""Parts of `experiments.py`: what is simulated, under which policy, and how it is told."""
