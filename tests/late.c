/* late.c: a library that is loaded before others: the wall clock is LATE seconds ahead. */
#include <stdlib.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

int clock_gettime(clockid_t which, struct timespec *at) {
    int done = (int)syscall(SYS_clock_gettime, which, at);
    const char *late = getenv("LATE");
    if (which == CLOCK_REALTIME && late) at->tv_sec += atol(late);
    return done;
}
