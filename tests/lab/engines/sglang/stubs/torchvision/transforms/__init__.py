"""Stand-in for torchvision: one enumeration whose members are asked for by value."""

import enum

from lockstep_stand_in import everything_below


class InterpolationMode(enum.Enum):
    NEAREST = "nearest"
    NEAREST_EXACT = "nearest-exact"
    BILINEAR = "bilinear"
    BICUBIC = "bicubic"
    BOX = "box"
    HAMMING = "hamming"
    LANCZOS = "lanczos"


everything_below(__name__)
