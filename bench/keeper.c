/*
 * keeper: process 1 of a trial's PID namespace, of which nothing is asked but to be neutral. It starts one
 * command, reaps whatever comes to it, and tells on the descriptor FD:
 *
 *   started PID NS      as seen in here, and CLOCK_MONOTONIC before its fork; told after its exec
 *   ended STATUS NS     as wait gives it
 *
 * Then it stays, so that what the command has left can be counted, until it is killed.
 *
 *   keeper [-x] [-i SIGNAL]... [-0] [-t] [-o FILE] [-k US] FD COMMAND...
 *     -x  become the command, which is then process 1 itself; nothing is told
 *     -i  with a signal ignored         -0  with stdin closed
 *     -t  as leader of a session whose terminal is stdin
 *     -o  stdout is that file           -k  send it TERM so many microseconds after it was executed
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

static _Noreturn void die(const char *what) {
    (void)fprintf(stderr, "keeper: %s: %s\n", what, strerror(errno));
    exit(125);
}

static int64_t now_ns(void) {
    struct timespec t;
    (void)clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

struct request {
    int ignored[8], n_ignored;
    int becomes, closes_stdin, takes_terminal;
    long kill_after_us;
    const char *stdout_path;
};

static _Noreturn void become(const struct request *request, char **command) {
    for (int i = 0; i < request->n_ignored; i++)
        (void)signal(request->ignored[i], SIG_IGN);
    if (request->takes_terminal && (setsid() < 0 || ioctl(0, TIOCSCTTY, 0) < 0))
        die("terminal");
    if (request->stdout_path) {
        int fd = open(request->stdout_path, O_WRONLY);
        if (fd < 0 || dup2(fd, 1) < 0 || close(fd) < 0)
            die(request->stdout_path);
    }
    if (request->closes_stdin)
        (void)close(0);
    (void)execv(command[0], command);
    die(command[0]);
}

/* Returns once the command was executed: the pipe's other end was close-on-exec. */
static pid_t start(const struct request *request, char **command, int64_t *ret_ns) {
    int ends[2];
    char byte;
    if (pipe2(ends, O_CLOEXEC) < 0)
        die("pipe");
    *ret_ns = now_ns();
    pid_t pid = fork();
    if (pid < 0)
        die("fork");
    if (pid == 0)
        become(request, command);
    (void)close(ends[1]);
    if (read(ends[0], &byte, 1) < 0)
        die("read");
    (void)close(ends[0]);
    return pid;
}

static _Noreturn void keep(int tell, const struct request *request, char **command) {
    int64_t begin_ns;
    pid_t pid = start(request, command, &begin_ns);
    (void)dprintf(tell, "started %d %lld\n", (int)pid, (long long)begin_ns);
    if (request->kill_after_us >= 0) {
        long us = request->kill_after_us;
        struct timespec t = {.tv_sec = us / 1000000, .tv_nsec = us % 1000000 * 1000};
        (void)nanosleep(&t, NULL);
        (void)kill(pid, SIGTERM);
    }
    for (;;) {
        int status;
        pid_t died = waitpid(-1, &status, __WALL);
        if (died == pid)
            (void)dprintf(tell, "ended %d %lld\n", status, (long long)now_ns());
        else if (died < 0)
            (void)pause();
    }
}

int main(int argc, char **argv) {
    struct request request = {.kill_after_us = -1};
    for (int option; (option = getopt(argc, argv, "+xi:0to:k:")) != -1;) switch (option) {
        case 'x': request.becomes = 1; break;
        case '0': request.closes_stdin = 1; break;
        case 't': request.takes_terminal = 1; break;
        case 'o': request.stdout_path = optarg; break;
        case 'k': request.kill_after_us = strtol(optarg, NULL, 10); break;
        case 'i':
            if (request.n_ignored < 8)
                request.ignored[request.n_ignored++] = (int)strtol(optarg, NULL, 10);
            break;
        default: return 125;
        }
    if (argc - optind < 2)
        return 125;
    int tell = (int)strtol(argv[optind], NULL, 10);
    (void)fcntl(tell, F_SETFD, FD_CLOEXEC);
    if (request.becomes)
        become(&request, argv + optind + 1);
    keep(tell, &request, argv + optind + 1);
}
