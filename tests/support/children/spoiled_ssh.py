"""An ssh whose input a test can spoil: what is written to a FIFO goes to the other side, too.

argv: the real ssh; the FIFO; a host; the words for ssh. An ssh to another host, or that starts when there is
FIFO.off, is left as it is.
"""

import os
import select
import sys

real, fifo, host, *words = sys.argv[1:]
if any(host in word for word in words) and not os.path.exists(f"{fifo}.off"):
    (reader, writer), source, other = os.pipe(), os.dup(0), os.open(fifo, os.O_RDWR)
    if not os.fork():
        os.close(reader)
        poll = select.poll()
        for fd, events in ((source, select.POLLIN), (other, select.POLLIN), (writer, 0)):
            poll.register(fd, events)
        while writer not in (ready := [fd for fd, _ in poll.poll()]):  # else ssh has ended
            for fd in ready:
                data = os.read(fd, 4096)
                if not data:
                    os._exit(0)
                os.write(writer, data)
        os._exit(0)
    os.dup2(reader, 0)
    os.closerange(3, 64)
os.execv(real, ["ssh", *words])
