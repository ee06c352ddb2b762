/*
 * rank: a worker that does nothing, on cue. Every one says "up" with one byte into the fifo UP.
 *
 *   rank idle UP        then sleeps for ever (odd ranks as /bin/sleep); TERM ends it
 *   rank work UP        then computes for 10 ms, five times a second; TERM ends it
 *   rank meet UP GO     then waits until the fifo GO is at its end, and exits 0
 *   rank fail K UP GO STAMP
 *       rank K waits for GO, writes CLOCK_MONOTONIC in ns to the file STAMP and exits
 *       3; the others are idle
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

static _Noreturn void die(const char *what) {
    (void)fprintf(stderr, "rank: %s: %s\n", what, strerror(errno));
    exit(1);
}

static int open_path(const char *path, int flags) {
    int fd = open(path, flags | O_CLOEXEC, 0644);
    if (fd < 0)
        die(path);
    return fd;
}

static long rank_from_env(void) {
    static const char *const names[] = {"LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK",
                                        "PMI_RANK", "SLURM_PROCID"};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        if (getenv(names[i]))
            return strtol(getenv(names[i]), NULL, 10);
    return 0;
}

static void say_up(const char *up) {
    int fd = open_path(up, O_WRONLY);
    if (write(fd, "u", 1) != 1)
        die(up);
    (void)close(fd);
}

static void wait_go(int fd) {
    char byte;
    if (read(fd, &byte, 1) < 0)
        die("go");
}

static _Noreturn void idle_for_ever(const char *up) {
    say_up(up);
    if (rank_from_env() % 2)
        (void)execl("/bin/sleep", "sleep", "86400", (char *)NULL);
    for (;;)
        (void)pause();
}

static _Noreturn void work_for_ever(const char *up) {
    const struct timespec rest = {.tv_nsec = 190000000};
    say_up(up);
    for (;;) {
        const clock_t end = clock() + CLOCKS_PER_SEC / 100;
        while (clock() < end) continue;
        (void)nanosleep(&rest, NULL);
    }
}

static int main_meet(const char *up, const char *go) {
    int fd = open_path(go, O_RDONLY);
    say_up(up);
    wait_go(fd);
    return 0;
}

static int main_fail(const char *up, const char *go, const char *stamp) {
    int out = open_path(stamp, O_WRONLY | O_CREAT | O_TRUNC);
    struct timespec t;
    (void)main_meet(up, go);
    (void)clock_gettime(CLOCK_MONOTONIC, &t);
    if (dprintf(out, "%lld\n", (long long)t.tv_sec * 1000000000 + t.tv_nsec) < 0)
        die(stamp);
    _exit(3);
}

int main(int argc, char **argv) {
    if (argc == 3 && strcmp(argv[1], "idle") == 0)
        idle_for_ever(argv[2]);
    if (argc == 3 && strcmp(argv[1], "work") == 0)
        work_for_ever(argv[2]);
    if (argc == 4 && strcmp(argv[1], "meet") == 0)
        return main_meet(argv[2], argv[3]);
    if (argc == 6 && strcmp(argv[1], "fail") == 0) {
        if (rank_from_env() != strtol(argv[2], NULL, 10))
            idle_for_ever(argv[3]);
        return main_fail(argv[3], argv[4], argv[5]);
    }
    (void)fprintf(stderr, "rank: idle UP | work UP | meet UP GO | fail K UP GO STAMP\n");
    return 2;
}
