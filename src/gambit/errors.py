"""The errors Gambit raises on purpose; never a wrapper around every foreign exception."""


class GambitError(Exception):
    """Root of all errors a caller may want to catch."""


class UserError(GambitError):
    """The user's input is wrong; the message names the value and the fix (CLI exit code 2)."""


class EngineFailure(GambitError):  # noqa: N818 - it reports a failure, the user made no error
    """Something the user did not get wrong broke underneath (CLI exit code 1)."""
