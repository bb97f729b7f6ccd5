"""The one error that Lockstep raises for bad input: it names the rank, what was found and expected, the next step."""

from __future__ import annotations


class LockstepError(Exception):
    """An error a person can act on.

    ``message`` is one sentence. ``host``/``rank`` say where, ``found`` and ``expected`` the two values that disagree,
    ``next_step`` what to do. All are rendered by ``str()``, one line each, empty ones left out.
    """

    def __init__(
        self,
        message: str,
        *,
        host: str | None = None,
        rank: int | None = None,
        found: object = None,
        expected: object = None,
        next_step: str | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.host = host
        self.rank = rank
        self.found = found
        self.expected = expected
        self.next_step = next_step

    def __str__(self) -> str:
        where = ", ".join(
            part for part in (self.host, None if self.rank is None else f"rank {self.rank}") if part is not None
        )
        lines = [f"{where}: {self.message}" if where else self.message]
        lines += [
            f"  {label}: {value}"
            for label, value in (("found", self.found), ("expected", self.expected), ("next step", self.next_step))
            if value is not None
        ]
        return "\n".join(lines)


class PlanRefused(LockstepError):  # noqa: N818 (a refusal is an answer, not a fault)
    """A launch that must not happen; ``rule`` is the id of the rule that says so."""

    def __init__(
        self,
        message: str,
        *,
        rule: str,
        found: object = None,
        expected: object = None,
        next_step: str | None = None,
    ) -> None:
        super().__init__(message, found=found, expected=expected, next_step=next_step)
        self.rule = rule
