/* guard/freestanding_start.c: waits for the launcher's end, or a lease's, before libc has started.
 *
 * libc's start asks the processor what it is, and under a hypervisor each of these questions is
 * a trap. That is 0.6 ms of a processor, for a program that nearly always dies before it does
 * anything. So this is the entry point (ld's -e). When there is something to do it continues to
 * libc's own, as if the kernel had called it. This file uses nothing of libc, and nothing that
 * needs thread-local storage (it has -fno-stack-protector). main() does the same where this one
 * gave up. */
#include <fcntl.h>
#include <linux/prctl.h>
#include <signal.h>
#include <stdint.h>
#include <sys/mman.h>
#include <time.h>

#include "sys/lease.h"
#include "sys/raw.h"
#include "guard/arguments.h"

#ifndef SYS_close_range
#define SYS_close_range 436
#endif

void guard_await(const uintptr_t *stack);

/* The stack, as the kernel left it, continues to _start, and so does the register that a dynamic
 * loader left its own end in. */
#if defined(__x86_64__)
__asm__(".globl guard_entry\n"
        ".type guard_entry, @function\n"
        "guard_entry:\n"
        "  mov %rsp, %rdi\n"
        "  push %rdx\n"
        "  push %rdx\n"
        "  call guard_await\n"
        "  pop %rdx\n"
        "  pop %rdx\n"
        "  jmp _start\n");
#elif defined(__aarch64__)
__asm__(".globl guard_entry\n"
        ".type guard_entry, %function\n"
        "guard_entry:\n"
        "  stp x0, x30, [sp, #-16]!\n"
        "  add x0, sp, #16\n"
        "  bl guard_await\n"
        "  ldp x0, x30, [sp], #16\n"
        "  b _start\n");
#else
#error "no entry for this processor: link without it"
#endif

static int number_of(const char *word) {
    int number = 0;
    while (*word >= '0' && *word <= '9') number = number * 10 + (*word++ - '0');
    return number;
}

/* False if the lease has run out, or this cannot continue: then main.c does both. */
static int set_alarm(int timer, const int64_t *lease) {
    int64_t deadline_ns = lease_deadline(lease);
    const struct itimerspec at = {
        .it_value = {deadline_ns / 1000000000LL, deadline_ns % 1000000000LL}};
    struct timespec now = {0, 0};
    if (raw(SYS_clock_gettime, CLOCK_BOOTTIME, (long)&now, 0, 0, 0) < 0) return 0;
    if (deadline_ns <= (int64_t)now.tv_sec * 1000000000LL + now.tv_nsec) return 0;
    return raw(SYS_timer_settime, timer, TIMER_ABSTIME, (long)&at, 0, 0) >= 0;
}

/* Returns when the launcher has lost its lock, or at once if there is none. Every signal is blocked. */
static void await_lock(void) {
    const struct flock whole = {.l_type = F_RDLCK, .l_whence = SEEK_SET};
    (void)raw(SYS_fcntl, 0, F_SETLKW, (long)&whole, 0, 0);
}

/* argc, then argv, as every Linux program finds them (System V ABI, process initialization). */
void guard_await(const uintptr_t *stack) {
    if (stack[0] != GUARD_ARGC) return;
    const char *const *argv = (const char *const *)(stack + 1);
    int parent = number_of(argv[GUARD_PARENT]);
    uint64_t awaited = UINT64_C(1) << (SIGUSR1 - 1) | UINT64_C(1) << (SIGALRM - 1);
    const int leased = argv[GUARD_LEASE][0] != '\0';
    const int64_t *lease = 0;
    int timer = 0, told = 0;
    long null = raw(SYS_openat, AT_FDCWD, (long)"/dev/null", O_RDWR, 0, 0);
    if (null < 0) return;
    if (!leased && (raw(SYS_dup3, null, 1, 0, 0, 0) < 0 || raw(SYS_dup3, null, 2, 0, 0, 0) < 0))
        return;
    if (raw(SYS_close_range, 3, 0xffffffffL, 0, 0, 0) < 0 ||
        raw(SYS_chdir, (long)"/", 0, 0, 0, 0) < 0)
        return;
    if (raw(SYS_prctl, PR_SET_PDEATHSIG, SIGUSR1, 0, 0, 0) < 0) return;
    if (!leased && argv[GUARD_LOCK][0] != '\0') {
        await_lock();
        return;
    }
    if (leased) {
        const union {
            long result;
            const int64_t *lease;
        } memory = {raw6(SYS_mmap, 0, sizeof *lease, PROT_READ, MAP_SHARED, 2, 0)};
        if (memory.result < 0 && memory.result > -4096) return;
        lease = memory.lease;
        if (raw(SYS_timer_create, CLOCK_BOOTTIME, 0, (long)&timer, 0, 0) < 0) return;
    }
    while (raw(SYS_getppid, 0, 0, 0, 0, 0) == parent) {
        if (leased && !set_alarm(timer, lease)) return;
        if (leased && !told)
            told = raw(SYS_write, 1, (long)&(const char){LEASE_HELD}, 1, 0, 0) == 1;
        long r = raw(SYS_rt_sigtimedwait, (long)&awaited, 0, 0, sizeof awaited, 0);
        if (r < 0 && r != -EINTR) return;
    }
}
