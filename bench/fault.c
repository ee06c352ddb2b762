/*
 * fault: a worker that does what its words say, one after the other.
 *
 *   fault UP GO WORD...
 *     ignore     TERM from now on             daemon    leaves a child: forked twice, in a session of
 *     up         one byte into the fifo UP              its own, deaf to TERM and HUP, called "left"
 *     go         waits for the fifo GO's end  orphans=N leaves N that end at once
 *     stamp=FILE CLOCK_MONOTONIC in ns        sleep=MS
 *     wait       for ever                     exit=N
 *     @N ... @*  the words between are rank N's only
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

static _Noreturn void die(const char *what) {
    (void)fprintf(stderr, "fault: %s: %s\n", what, strerror(errno));
    exit(125);
}

static int open_path(const char *path, int flags) {
    int fd = open(path, flags | O_CLOEXEC, 0644);
    if (fd < 0)
        die(path);
    return fd;
}

static void leave(int lives) {
    int ends[2], status;
    char byte;
    if (pipe(ends) < 0)
        die("pipe");
    pid_t pid = fork();
    if (pid < 0)
        die("fork");
    if (pid == 0) {
        (void)setsid();
        if (fork() != 0)
            _exit(0);
        (void)signal(SIGTERM, SIG_IGN);
        (void)signal(SIGHUP, SIG_IGN);
        (void)prctl(PR_SET_NAME, "left");
        (void)close(ends[0]);
        (void)close(ends[1]);
        while (lives)
            (void)pause();
        _exit(0);
    }
    (void)close(ends[1]);
    (void)waitpid(pid, &status, 0);
    if (read(ends[0], &byte, 1) < 0)
        die("read");
    (void)close(ends[0]);
}

static void stamp(const char *path) {
    struct timespec t;
    int fd = open_path(path, O_WRONLY | O_CREAT | O_TRUNC);
    (void)clock_gettime(CLOCK_MONOTONIC, &t);
    if (dprintf(fd, "%lld\n", (long long)t.tv_sec * 1000000000 + t.tv_nsec) < 0)
        die(path);
    (void)close(fd);
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

static void sleep_ms(long ms) {
    struct timespec t = {.tv_sec = ms / 1000, .tv_nsec = ms % 1000 * 1000000};
    (void)nanosleep(&t, NULL);
}

int main(int argc, char **argv) {
    const char *rank = getenv("LOCAL_RANK") ? getenv("LOCAL_RANK") : "0";
    int mine = 1;
    if (argc < 3)
        return 2;
    int go = open_path(argv[2], O_RDONLY);
    for (int i = 3; i < argc; i++) {
        const char *word = argv[i], *equals = strchr(word, '=');
        const char *value = equals ? equals + 1 : "";
        if (word[0] == '@')
            mine = strcmp(word + 1, "*") == 0 || strcmp(word + 1, rank) == 0;
        else if (!mine)
            continue;
        else if (strcmp(word, "ignore") == 0)
            (void)signal(SIGTERM, SIG_IGN);
        else if (strcmp(word, "daemon") == 0)
            leave(1);
        else if (strncmp(word, "orphans=", 8) == 0)
            for (long k = strtol(value, NULL, 10); k > 0; k--)
                leave(0);
        else if (strcmp(word, "up") == 0)
            say_up(argv[1]);
        else if (strcmp(word, "go") == 0)
            wait_go(go);
        else if (strncmp(word, "stamp=", 6) == 0)
            stamp(value);
        else if (strncmp(word, "sleep=", 6) == 0)
            sleep_ms(strtol(value, NULL, 10));
        else if (strncmp(word, "exit=", 5) == 0)
            _exit((int)strtol(value, NULL, 10));
        else if (strcmp(word, "wait") == 0)
            for (;;)
                (void)pause();
        else
            return 2;
    }
    return 0;
}
