"""Stand-in for Triton: 500 MB on disk for kernels that a CPU server defines and never runs."""

from lockstep_stand_in import everything_below

__version__ = "3.9.0"


def cdiv(x: int, y: int) -> int:
    return -(-x // y)


def next_power_of_2(n: int) -> int:
    return 1 << (n - 1).bit_length() if n > 0 else 1


everything_below(__name__)
