"""Stand-in for torchvision, which SGLang's multimodal code imports and a text model never calls."""

from lockstep_stand_in import everything_below

__version__ = "0.28.0"

everything_below(__name__)
