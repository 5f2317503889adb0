"""Parts of `bench_kernels.py`: what is timed, against whom, and against which floor."""
