"""`log_level=`: which logging records workers send to this process."""

from __future__ import annotations

import logging

from infini_run.errors import UsageError
from infini_run.value_types import MAX_INT

NO_RECORDS = -1


def read_log_level(asked: int | str | bool | None) -> int:
    """Return the least level of the records that workers send; NO_RECORDS: they send none.

    Args:
        asked: a level, as a number or a name; True: the root logger's; None: the same if that has handlers; False: no
            records.

    Raises:
        UsageError: it is none of these.
    """
    if asked is False or (asked is None and not logging.getLogger().handlers):
        return NO_RECORDS
    if asked is None or asked is True:
        return logging.getLogger().getEffectiveLevel()
    level = logging.getLevelName(asked) if isinstance(asked, str) else asked
    if not isinstance(level, int) or not 0 <= level <= MAX_INT:
        raise UsageError(f"log_level={asked!r}: expected a level ('INFO', 20), True, False, or None")
    return level
