"""What the tests stand on: worlds of ranks, processes with a hard end, a guard against leaks."""
