"""What an operator meets: configuration, command line, placement on Ray, benchmarks."""
