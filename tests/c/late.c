/* late.c: a library that is loaded before others: the wall clock is LATE seconds ahead, and CLOCK_MONOTONIC is
 * EARLIER_BOOT seconds, as on a machine that has been up for longer. */
#include <stdlib.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

int clock_gettime(clockid_t which, struct timespec *at) {
    int done = (int)syscall(SYS_clock_gettime, which, at);
    const char *late = getenv("LATE");
    if (which == CLOCK_REALTIME && late) at->tv_sec += atol(late);
    const char *boot = getenv("EARLIER_BOOT");
    if (which == CLOCK_MONOTONIC && boot) at->tv_sec += atol(boot);
    return done;
}
