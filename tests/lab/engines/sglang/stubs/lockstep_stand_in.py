"""What the stand-ins of packages that the CPU image leaves out are made of. The engine imports those packages at module
level everywhere and calls nothing of them on a CPU: any name resolves, and what is called for real says who it is.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
import types


class StandIn:
    """A name of a package that is not here: decorates functions and answers for its own names; indexed, it refuses."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __call__(self, *args: object, **kwargs: object) -> object:
        if len(args) == 1 and not kwargs and isinstance(args[0], types.FunctionType | type):
            return (
                StandIn(f"{args[0].__module__}.{args[0].__qualname__}")
                if isinstance(args[0], types.FunctionType)
                else args[0]
            )
        return StandIn(self._name)

    def __getitem__(self, grid: object) -> object:
        raise NotImplementedError(f"{self._name} needs a package that the lab's CPU image leaves out")

    def __getattr__(self, name: str) -> StandIn:
        if name.startswith("__"):
            raise AttributeError(name)
        return StandIn(f"{self._name}.{name}")

    def __bool__(self) -> bool:
        return False

    def _with(self, other: object) -> StandIn:
        return self

    __add__ = __radd__ = __mul__ = __rmul__ = __or__ = __ror__ = _with


class Package(types.ModuleType):
    """A module of which every name and every submodule exists."""

    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        if name[:1].isupper():
            value: object = type(name, (), {"__module__": self.__name__, "__init__": lambda self, *a, **k: None})
        else:
            value = StandIn(f"{self.__name__}.{name}")
        setattr(self, name, value)
        return value


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self, package: str) -> None:
        self._prefix = f"{package}."

    def find_spec(self, name: str, path: object = None, target: object = None) -> importlib.machinery.ModuleSpec | None:
        if not name.startswith(self._prefix):
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return Package(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        module.__path__ = []


def everything_below(package: str) -> None:
    """Make the module ``package`` answer for every name, and every submodule of it importable."""
    sys.modules[package].__class__ = Package
    sys.meta_path.append(_Finder(package))
