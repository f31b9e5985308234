"""CPU kernels in C++, compiled at first use, each with a torch reference."""
