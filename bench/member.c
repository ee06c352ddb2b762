/*
 * member: a rank of the trials in membership.py. It tells of itself in a file that all ranks append to, so that the
 * order of the lines is the order in which they were written, whatever clocks say:
 *
 *   start WORLD RANK SIZE HOST PID NS       at once; NS is CLOCK_MONOTONIC, which all hosts of one machine share
 *   write HOST PID                          again and again
 *
 *   member FILE [deaf] [writes]
 *
 * deaf: TERM is ignored. writes: one line each millisecond, for as long as it lives. SIGUSR1 lets it exit with 1, as
 * a rank does whose peer has gone; SIGUSR2 with 0.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/utsname.h>
#include <time.h>
#include <unistd.h>

static void fail(int number) {
    (void)number;
    _exit(1);
}

static void succeed(int number) {
    (void)number;
    _exit(0);
}

static const char *variable(const char *name) {
    const char *value = getenv(name);
    return value ? value : "0";
}

static void say(int fd, const char *line, int size) {
    if (write(fd, line, (size_t)size) != size)
        _exit(3);
}

int main(int argc, char **argv) {
    struct timespec now, pause_time = {.tv_nsec = 1000000};
    struct utsname host;
    int writes = 0, size;
    char line[256];

    (void)clock_gettime(CLOCK_MONOTONIC, &now);
    (void)signal(SIGUSR1, fail);
    (void)signal(SIGUSR2, succeed);
    for (int i = 2; i < argc; i++) {
        if (strcmp(argv[i], "deaf") == 0)
            (void)signal(SIGTERM, SIG_IGN);
        writes |= strcmp(argv[i], "writes") == 0;
    }
    int fd = argc < 2 ? -1 : open(argv[1], O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0600);
    if (fd < 0 || uname(&host) < 0)
        return 3;
    size = snprintf(line, sizeof line, "start %s %s %s %s %d %lld\n", variable("TORCHELASTIC_RESTART_COUNT"),
                    variable("RANK"), variable("WORLD_SIZE"), host.nodename, (int)getpid(),
                    (long long)now.tv_sec * 1000000000 + now.tv_nsec);
    say(fd, line, size);
    size = snprintf(line, sizeof line, "write %s %d\n", host.nodename, (int)getpid());
    while (1) {
        if (writes) {
            say(fd, line, size);
            (void)nanosleep(&pause_time, NULL);
        } else {
            (void)pause();
        }
    }
}
