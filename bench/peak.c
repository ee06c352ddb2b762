/*
 * peak: runs a command and writes the peak resident memory, in KiB, of the largest
 * process in it to the descriptor FD. It exists because the kernel counts what a
 * process was before exec, too: started straight from Python, every command would
 * look at least as large as that Python.
 *
 *   peak FD program [args...]      exits as the program did
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

static int run_program(char **argv, struct rusage *ret_usage) {
    int status;
    pid_t pid = fork();
    if (pid < 0)
        return 126;
    if (pid == 0) {
        (void)execv(argv[0], argv);
        _exit(127);
    }
    while (wait4(pid, &status, 0, ret_usage) < 0)
        if (errno != EINTR)
            return 126;
    return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

int main(int argc, char **argv) {
    struct rusage usage = {0};
    if (argc < 3) {
        (void)fprintf(stderr, "peak: FD program [args...]\n");
        return 2;
    }
    int fd = atoi(argv[1]);
    if (fcntl(fd, F_SETFD, FD_CLOEXEC) < 0)
        return 2;
    int code = run_program(argv + 2, &usage);
    if (dprintf(fd, "%ld\n", usage.ru_maxrss) < 0)
        return 1;
    return code;
}
