"""Numbers the lines of a log and chains them by a hash, so that a changed, doubled or missing line is found."""

from __future__ import annotations

import json
from hashlib import blake2b

DIGEST_BYTES = 8
_LINE, _CHAIN = "line", "chain"
_CHAIN_MARK = f',"{_CHAIN}":"'


class BrokenChainError(ValueError):
    """A line that does not follow the one before it; says what is wrong with it."""


class Chain:
    """Links JSON objects, one a line: each carries its number and a hash over itself and all lines before it."""

    def __init__(self) -> None:
        self.num_lines = 0
        self._last = b""

    def link(self, text: str) -> str:
        """The object with its two fields; `text` is encoded without spaces."""
        self.num_lines += 1
        body = f'{text[:-1]},"{_LINE}":{self.num_lines}}}'
        return f'{body[:-1]}{_CHAIN_MARK}{self._advance(body)}"}}'

    def unlink(self, line: str, record: dict[str, object]) -> None:
        """Check a line against those before it, and take the two fields out of its `record`."""
        self.num_lines += 1
        number, digest = record.pop(_LINE, None), record.pop(_CHAIN, None)
        if number != self.num_lines:
            raise BrokenChainError(f"it is numbered {json.dumps(number)}: lines are missing, doubled or out of order")
        body, mark, _ = line.rpartition(_CHAIN_MARK)
        if not mark or self._advance(body + "}") != digest:
            raise BrokenChainError("it does not fit the lines before it: it, or one of them, was changed")

    def _advance(self, body: str) -> str:
        self._last = blake2b(self._last + body.encode(), digest_size=DIGEST_BYTES).digest()
        return self._last.hex()
