/*
 * floor: what the kernel alone can do. Starts N children that exec a program, reaps
 * them, R times over, and prints one line of JSON with nanoseconds (median, samples):
 *   clone_ns  first clone -> last clone returned
 *   exec_ns   first clone -> last exec done (with -x): EOF on a close-on-exec pipe
 *             that every child holds
 *   total_ns  first clone -> last child reaped
 * exec_ns has rounds of its own, because waiting for it delays the reaping.
 *
 *   floor [-n N] [-r ROUNDS] [-b BYTES] [-m fork|vfork|clone] [-p] [-x] [program [args...]]
 *
 * clone is CLONE_VM with a small stack per child; -p adds CLONE_PIDFD; -b grows the
 * parent by touched memory.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <signal.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum { STACK_SIZE = 16 * 1024 };

enum mode { MODE_FORK, MODE_VFORK, MODE_CLONE };

struct floor {
    enum mode mode;
    bool pidfds, exec_too;
    size_t n, rounds, grow;
    char **argv;
    char *stacks;
    int *fds;
};

struct times {
    int64_t *clone_ns, *exec_ns, *total_ns;
};

extern char **environ;

static _Noreturn void die(const char *what) {
    (void)fprintf(stderr, "floor: %s: %s\n", what, strerror(errno));
    exit(1);
}

static int64_t now_ns(void) {
    struct timespec t;
    (void)clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

static void *map_pages(size_t size) {
    int flags = MAP_PRIVATE | MAP_ANONYMOUS;
    void *p = mmap(NULL, size, PROT_READ | PROT_WRITE, flags, -1, 0);
    if (p == MAP_FAILED)
        die("mmap");
    return p;
}

/* Small pages: a fork that copies huge-page tables would look cheaper than a Python heap's. */
static void grow_parent(size_t size) {
    if (size == 0)
        return;
    char *p = map_pages(size);
    (void)madvise(p, size, MADV_NOHUGEPAGE);
    for (size_t i = 0; i < size; i += 4096)
        p[i] = 1;
}

/* Runs in the parent's memory until exec: raw system calls only, nothing returns. */
static int child_main(void *arg) {
    char **argv = arg;
    (void)syscall(SYS_execve, argv[0], argv, environ);
    (void)syscall(SYS_exit_group, 127);
    return 127;
}

static void spawn_one(struct floor *f, size_t k) {
    char *top = f->stacks + (k + 1) * STACK_SIZE;
    int flags = SIGCHLD;
    if (f->mode != MODE_FORK)
        flags |= CLONE_VM;
    if (f->mode == MODE_VFORK)
        flags |= CLONE_VFORK;
    if (f->pidfds)
        flags |= CLONE_PIDFD;
    if (clone(child_main, top, flags, f->argv, &f->fds[k]) < 0)
        die("clone");
}

static int64_t spawn_all(struct floor *f) {
    for (size_t k = 0; k < f->n; k++)
        spawn_one(f, k);
    return now_ns();
}

static void reap_all(const struct floor *f) {
    for (size_t k = 0; k < f->n; k++) {
        siginfo_t si;
        if (waitid(P_ALL, 0, &si, WEXITED) < 0)
            die("waitid");
        if (si.si_code != CLD_EXITED || si.si_status == 127) {
            (void)fprintf(stderr, "floor: cannot run %s\n", f->argv[0]);
            exit(1);
        }
    }
    for (size_t k = 0; f->pidfds && k < f->n; k++)
        (void)close(f->fds[k]);
}

static void round_total(struct floor *f, int64_t *clone_ns, int64_t *total_ns) {
    int64_t start = now_ns();
    *clone_ns = spawn_all(f) - start;
    reap_all(f);
    *total_ns = now_ns() - start;
}

static void round_exec(struct floor *f, int64_t *exec_ns) {
    int ends[2];
    char byte;
    if (pipe2(ends, O_CLOEXEC) < 0)
        die("pipe2");
    int64_t start = now_ns();
    (void)spawn_all(f);
    (void)close(ends[1]);
    if (read(ends[0], &byte, 1) != 0)
        die("exec pipe");
    *exec_ns = now_ns() - start;
    (void)close(ends[0]);
    reap_all(f);
}

static int compare_ns(const void *a, const void *b) {
    int64_t x = *(const int64_t *)a, y = *(const int64_t *)b;
    return (x > y) - (x < y);
}

static int64_t median(const int64_t *samples, size_t n) {
    int64_t *sorted = calloc(n, sizeof *sorted);
    if (!sorted)
        die("calloc");
    memcpy(sorted, samples, n * sizeof *sorted);
    qsort(sorted, n, sizeof *sorted, compare_ns);
    int64_t m = n % 2 ? sorted[n / 2] : (sorted[n / 2 - 1] + sorted[n / 2]) / 2;
    free(sorted);
    return m;
}

static void print_figure(const char *name, const int64_t *samples, size_t n) {
    printf(", \"%s\": {\"median\": %lld, \"samples\": [", name,
           (long long)median(samples, n));
    for (size_t i = 0; i < n; i++)
        printf("%s%lld", i ? ", " : "", (long long)samples[i]);
    printf("]}");
}

static void print_report(const struct floor *f, const struct times *t) {
    static const char *const names[] = {"fork", "vfork", "clone"};
    printf("{\"mode\": \"%s\", \"n\": %zu, \"rounds\": %zu, \"grow\": %zu", names[f->mode],
           f->n, f->rounds, f->grow);
    print_figure("clone_ns", t->clone_ns, f->rounds);
    if (f->exec_too)
        print_figure("exec_ns", t->exec_ns, f->rounds);
    print_figure("total_ns", t->total_ns, f->rounds);
    printf("}\n");
}

static size_t parse_size(const char *text) {
    char *end;
    errno = 0;
    unsigned long long v = strtoull(text, &end, 10);
    if (errno || end == text || *end || *text == '-' || v > SIZE_MAX / STACK_SIZE) {
        (void)fprintf(stderr, "floor: not a number: %s\n", text);
        exit(2);
    }
    return (size_t)v;
}

static enum mode parse_mode(const char *text) {
    if (strcmp(text, "fork") == 0)
        return MODE_FORK;
    if (strcmp(text, "vfork") == 0)
        return MODE_VFORK;
    if (strcmp(text, "clone") == 0)
        return MODE_CLONE;
    (void)fprintf(stderr, "floor: -m takes fork, vfork or clone, not %s\n", text);
    exit(2);
}

static void parse_options(struct floor *f, int argc, char **argv) {
    for (int c; (c = getopt(argc, argv, "+n:r:b:m:px")) != -1;) {
        switch (c) {
        case 'n': f->n = parse_size(optarg); break;
        case 'r': f->rounds = parse_size(optarg); break;
        case 'b': f->grow = parse_size(optarg); break;
        case 'm': f->mode = parse_mode(optarg); break;
        case 'p': f->pidfds = true; break;
        case 'x': f->exec_too = true; break;
        default: exit(2);
        }
    }
    if (f->n == 0 || f->rounds == 0) {
        (void)fprintf(stderr, "floor: -n and -r are at least 1\n");
        exit(2);
    }
    if (optind < argc)
        f->argv = argv + optind;
}

int main(int argc, char **argv) {
    char *plain[] = {(char[]){"/bin/true"}, NULL};
    struct floor f = {.mode = MODE_CLONE, .n = 64, .rounds = 7, .argv = plain};
    parse_options(&f, argc, argv);
    grow_parent(f.grow);
    f.stacks = map_pages(f.n * STACK_SIZE);
    f.fds = map_pages(f.n * sizeof *f.fds);
    int64_t *samples = map_pages(3 * f.rounds * sizeof *samples);
    struct times t = {samples, samples + f.rounds, samples + 2 * f.rounds};
    for (size_t i = 0; i < f.rounds; i++) {
        round_total(&f, &t.clone_ns[i], &t.total_ns[i]);
        if (f.exec_too)
            round_exec(&f, &t.exec_ns[i]);
    }
    print_report(&f, &t);
    return 0;
}
