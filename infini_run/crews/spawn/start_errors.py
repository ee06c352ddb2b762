"""What the system refuses a launch (a descriptor, memory), as a StartError that names the limit."""

from __future__ import annotations

import os
from contextlib import contextmanager

from infini_run.errors import InfiniRunError, StartError
from infini_run.options.keyword_errors import KeywordErrors
from infini_run.system.resource_limits import with_limit_hint

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping


def start_error(error: OSError) -> StartError:
    """Return the error of a launch that the system has refused something."""
    number = error.errno or 0
    return with_limit_hint(StartError(os.strerror(number), "preparing the workers", number))


@contextmanager
def as_start_errors(names: Mapping[str, str] | None = None) -> Iterator[None]:
    """Raise an OSError of the block as a StartError. Its errors name keywords in place of flags; `names` has those
    keywords that are not called as their flag, by the flag."""
    try:
        with KeywordErrors({}, names=names):
            yield
    except OSError as error:
        if isinstance(error, InfiniRunError):  # LaunchTimeout is an OSError, too
            raise
        raise start_error(error) from None
