"""The check for objects that pickle, and mean something else in another process."""

from __future__ import annotations

# connections and duplicates of descriptors, which multiprocessing passes on by other means
OF_DESCRIPTORS = ("multiprocessing.connection", "multiprocessing.resource_sharer")


def check_portable(thing: object) -> None:
    """Reject what pickles as the number of a descriptor.

    Args:
        thing: any object.

    Raises:
        TypeError: it is a connection of multiprocessing, or a `DupFd`.
    """
    if type(thing).__module__ in OF_DESCRIPTORS and (hasattr(thing, "fileno") or hasattr(thing, "detach")):
        raise TypeError("its descriptor belongs to this process")
