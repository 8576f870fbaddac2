"""Code that numba compiles at start-up, for work on which PyTorch's CPU operators stay far from what the CPU can do."""
