"""Stand-in for sgl_kernel, of which the package index has CUDA builds only."""

from lockstep_stand_in import everything_below

__version__ = "0.4.7"

everything_below(__name__)
