/* deny.c: runs a program under a filter that refuses one system call, with EPERM, where one of its arguments has
 * one value: a sandbox that forbids what a child does between clone and exec.
 *
 * deny CALL ARGUMENT VALUE PROGRAM [WORD...] */
#include <errno.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>

#ifndef SYS_close_range
#define SYS_close_range 436
#endif

static const struct {
    const char *name;
    unsigned number;
} calls[] = {
    {"setpgid", SYS_setpgid},     {"prctl", SYS_prctl}, {"dup3", SYS_dup3},
    {"prlimit64", SYS_prlimit64}, {"mount", SYS_mount}, {"rt_sigaction", SYS_rt_sigaction},
    {"set_mempolicy", SYS_set_mempolicy}, {"sched_setaffinity", SYS_sched_setaffinity},
    {"pidfd_open", SYS_pidfd_open}, {"close_range", SYS_close_range}, {"unshare", SYS_unshare},
};

int main(int argc, char **words) {
    unsigned number = 0;
    for (size_t i = 0; argc > 4 && i < sizeof calls / sizeof *calls; i++)
        if (strcmp(calls[i].name, words[1]) == 0) number = calls[i].number;
    if (number == 0) return 2;
    unsigned at = (unsigned)(offsetof(struct seccomp_data, args) + 8 * strtoul(words[2], NULL, 0));
    struct sock_filter filter[] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, number, 0, 3),
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, at), /* the low half: we are little-endian */
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, (unsigned)strtoul(words[3], NULL, 0), 0, 1),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EPERM),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
    };
    struct sock_fprog program = {sizeof filter / sizeof *filter, filter};
    if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) < 0 ||
        prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) < 0) {
        perror("deny: no filter");
        return 77;
    }
    (void)execvp(words[4], words + 4);
    perror(words[4]);
    return 127;
}
