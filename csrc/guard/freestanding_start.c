/* guard/freestanding_start.c: waits for the launcher's death before libc has started.
 *
 * libc's start asks the processor what it is, and under a hypervisor each of these questions is a trap:
 * 0.6 ms of a processor, for a program that nearly always is killed before it does anything. So this is
 * the entry point (ld's -e); when there is something to do it goes on to libc's own, as if it had been
 * called by the kernel. Nothing of libc may be used here, nor anything that needs thread-local storage
 * (compiled with -fno-stack-protector). main() does the same by itself where this one gave up. */
#include <fcntl.h>
#include <linux/prctl.h>
#include <signal.h>
#include <stdint.h>

#include "sys/raw.h"
#include "guard/arguments.h"

#ifndef SYS_close_range
#define SYS_close_range 436
#endif

void guard_await(const uintptr_t *stack);

/* The stack, as the kernel left it, goes on to _start, and so does the register that a dynamic loader
 * left its own end in. */
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

/* argc, then argv, as every Linux program finds them (System V ABI, process initialization). */
void guard_await(const uintptr_t *stack) {
    if (stack[0] != GUARD_ARGC) return;
    const char *const *argv = (const char *const *)(stack + 1);
    int parent = number_of(argv[GUARD_PARENT]);
    uint64_t death = UINT64_C(1) << (SIGUSR1 - 1);
    long null = raw(SYS_openat, AT_FDCWD, (long)"/dev/null", O_RDWR, 0, 0);
    if (null < 0 || raw(SYS_dup3, null, 1, 0, 0, 0) < 0 || raw(SYS_dup3, null, 2, 0, 0, 0) < 0)
        return;
    if (raw(SYS_close_range, 3, 0xffffffffL, 0, 0, 0) < 0 ||
        raw(SYS_chdir, (long)"/", 0, 0, 0, 0) < 0)
        return;
    if (raw(SYS_prctl, PR_SET_PDEATHSIG, SIGUSR1, 0, 0, 0) < 0) return;
    while (raw(SYS_getppid, 0, 0, 0, 0, 0) == parent) {
        long r = raw(SYS_rt_sigtimedwait, (long)&death, 0, 0, sizeof death, 0);
        if (r < 0 && r != -EINTR) return;
    }
}
