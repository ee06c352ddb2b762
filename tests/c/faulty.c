/* faulty.c: makes one call of the core fail: an LD_PRELOAD shim. The rule: only calls that come from the core's
 * own code, or the guard's (by return address), are counted and can fail; the interpreter's and every rank's go their way.
 *
 * FAULTY        function:k:errno: the k-th call fails with that errno, the calls before and after it work;
 *               "syscall434" is syscall(2) of that number; function:k:errno:+ fails from the k-th on
 * FAULTY_COUNTS a file of COUNTERS 64-bit counters, filled while we run: how often each was called
 *
 * Both, and LD_PRELOAD, are taken out of the environment before the program sees it. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <link.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

/* name, what a failure returns: MINUS -1 and errno, NOTHING NULL and errno, NUMBER the errno itself */
#define FUNCTIONS(X)                                                                               \
    X(epoll_create1, MINUS)                                                                        \
    X(epoll_ctl, MINUS)                                                                            \
    X(epoll_wait, MINUS)                                                                           \
    X(timerfd_create, MINUS)                                                                       \
    X(signalfd, MINUS)                                                                             \
    X(pipe2, MINUS)                                                                                \
    X(opendir, NOTHING)                                                                            \
    X(fcntl, MINUS)                                                                                \
    X(write, MINUS)                                                                                \
    X(poll, MINUS) X(strdup, NOTHING) X(setpgid, MINUS) X(getpgid, MINUS) X(kill, MINUS)           \
        X(pthread_create, NUMBER) X(clone, MINUS) X(getrlimit, MINUS) X(setrlimit, MINUS)          \
            X(prctl, MINUS) X(chdir, MINUS) X(send, MINUS) X(open, MINUS) X(read, MINUS)           \
                X(mmap, MINUS) X(sigaction, MINUS) X(readdir, NOTHING) X(nanosleep, MINUS)         \
                    X(timerfd_settime, MINUS) X(fstat, MINUS) X(sigpending, MINUS)                 \
                        X(waitid, MINUS) X(tcsetpgrp, MINUS) X(ioctl, MINUS)                       \
                            X(mkdir, MINUS) X(mkdirat, MINUS) X(openat, MINUS) X(unlinkat, MINUS)  \
                                X(rmdir, MINUS) X(statfs, MINUS) X(access, MINUS)                  \
                                    X(getxattr, MINUS) X(fdopendir, NOTHING) X(fdopen, NOTHING)    \
                                        X(stat, MINUS) X(dup2, MINUS) X(pread, MINUS)              \
                                            X(sigwaitinfo, MINUS) X(socket, MINUS)                 \
                                                X(bind, MINUS) X(recvmsg, MINUS)         \
                                                    X(setsockopt, MINUS)

enum { EPOLL_CTL_ADD = 1 }; /* <sys/epoll.h> would declare what is defined here */
enum { MINUS, NOTHING, NUMBER };
enum {
#define X(name, failure) AT_##name,
    FUNCTIONS(X)
#undef X
        AT_malloc,
    AT_calloc,
    AT_realloc,
    AT_syscall, /* and one for each number up to 511 */
    COUNTERS = AT_syscall + 512
};

static const char *const names[] = {
#define X(name, failure) #name,
    FUNCTIONS(X)
#undef X
        "malloc",
    "calloc",
    "realloc",
};

static uint64_t private_counts[COUNTERS], *counts = private_counts;
static int chosen = -1, chosen_errno;
static uint64_t chosen_call;
static int and_after;
int faulty_off; /* set by tests/c/coverage.c: what counts for gcov is in the core's file, but not the core's */
static uintptr_t core_start, core_end;

static int find_core(struct dl_phdr_info *info, size_t size, void *unused) {
    (void)size, (void)unused;
    int is_guard = info->dlpi_name[0] == '\0' && strcmp(program_invocation_short_name, "irun-guard") == 0;
    if (!is_guard && strstr(info->dlpi_name, "_irun.") == NULL) return 0;
    for (int i = 0; i < info->dlpi_phnum; i++) {
        const ElfW(Phdr) *part = &info->dlpi_phdr[i];
        if (part->p_type != PT_LOAD || !(part->p_flags & PF_X)) continue;
        core_start = info->dlpi_addr + part->p_vaddr;
        core_end = core_start + part->p_memsz;
    }
    return 1;
}

static int from_core(const void *caller) {
    static __thread int looking;
    if (core_start == 0 && !looking) {
        looking = 1;
        (void)dl_iterate_phdr(find_core, NULL);
        looking = 0;
    }
    return (uintptr_t)caller >= core_start && (uintptr_t)caller < core_end;
}

/* 0: it goes its way. */
static int failure_of(int function, const void *caller) {
    if (faulty_off || !from_core(caller)) return 0;
    uint64_t count = __atomic_add_fetch(&counts[function], 1, __ATOMIC_RELAXED);
    if (function != chosen) return 0;
    if (count == chosen_call || (and_after && count > chosen_call)) return errno = chosen_errno;
    return 0;
}

/* Every argument is a word, and there are at most six that matter: one shape fits all. */
#define WORDS long a, long b, long c, long d, long e, long f
typedef long (*function)(WORDS);

#define X(name, failure)                                                                           \
    long faulty_##name(WORDS) __asm__(#name);                                                      \
    long faulty_##name(WORDS) {                                                                    \
        static function next;                                                                      \
        if (next == NULL) next = (function)dlsym(RTLD_NEXT, #name);                                \
        int error = AT_##name == AT_epoll_ctl && b != EPOLL_CTL_ADD                                \
                        ? 0 /* only a new watch takes memory: epoll_ctl(2) */                      \
                        : failure_of(AT_##name, __builtin_return_address(0));                      \
        if (error == 0) return next(a, b, c, d, e, f);                                             \
        return failure == MINUS ? -1 : failure == NOTHING ? 0 : error;                             \
    }
FUNCTIONS(X)
#undef X

long faulty_syscall(long number, WORDS) __asm__("syscall");
long faulty_syscall(long number, WORDS) {
    static long (*next)(long, WORDS);
    if (next == NULL) next = (long (*)(long, WORDS))dlsym(RTLD_NEXT, "syscall");
    int at = number >= 0 && number < 512 ? AT_syscall + (int)number : AT_syscall;
    return failure_of(at, __builtin_return_address(0)) ? -1 : next(number, a, b, c, d, e, f);
}

/* dlsym(3) itself allocates: libc's own names of these. */
void *__libc_malloc(size_t), *__libc_calloc(size_t, size_t), *__libc_realloc(void *, size_t);

void *malloc(size_t size) {
    return failure_of(AT_malloc, __builtin_return_address(0)) ? NULL : __libc_malloc(size);
}

void *calloc(size_t n, size_t size) {
    return failure_of(AT_calloc, __builtin_return_address(0)) ? NULL : __libc_calloc(n, size);
}

void *realloc(void *memory, size_t size) {
    int error = failure_of(AT_realloc, __builtin_return_address(0));
    return error ? NULL : __libc_realloc(memory, size);
}

static void choose(char *text) {
    char *name = strtok(text, ":"), *call = strtok(NULL, ":"), *number = strtok(NULL, ":");
    if (name == NULL || call == NULL || number == NULL) return;
    chosen_call = strtoull(call, NULL, 10);
    chosen_errno = atoi(number);
    and_after = strtok(NULL, ":") != NULL;
    for (int i = 0; i < AT_syscall; i++)
        if (strcmp(names[i], name) == 0) chosen = i;
    if (strncmp(name, "syscall", 7) == 0) chosen = AT_syscall + atoi(name + 7);
}

__attribute__((constructor)) static void start(void) {
    char *choice = getenv("FAULTY"), *path = getenv("FAULTY_COUNTS");
    if (path != NULL) {
        int fd = open(path, O_RDWR | O_CLOEXEC);
        void *shared = mmap(NULL, sizeof private_counts, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
        if (fd < 0 || shared == MAP_FAILED) abort();
        counts = shared;
        (void)close(fd);
    }
    if (choice != NULL) choose(strdup(choice));
    (void)unsetenv("FAULTY");
    (void)unsetenv("FAULTY_COUNTS");
    (void)unsetenv("LD_PRELOAD");
}
