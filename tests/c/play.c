/* A worker that does what its words say, one after the other.
 *
 * say=TEXT          "TEXT RANK PID" on stdout, one write
 * ask=THING         the same, with what it sees of it: cwd, foreground, pids, ...
 * ignore=TERM       ignore the signal
 * tell=USR1         say "got USR1" whenever it comes
 * end=TERM:3        say "got TERM" and exit 3 when it comes; `end=TERM:-SEGV`: die of SIGSEGV instead
 * hold=FD           wait for the end of that pipe
 * after=FD          read a pid there, wait for its death
 * pause=SECONDS     be late
 * read, listen      say "read LINE" of a line from stdin
 * name=NAME         what the process is called in /proc
 * daemon ... done   what is between is done by a stray (double fork, setsid); continues once it said something
 * group ... done    by a child in its process group
 * hop, hop=FILE     fork, let the child go on in a session of its own, exit; each touches the file
 * notify=A;B        tell NOTIFY_SOCKET A and B in one message
 * notify_fd         a message with a descriptor, of which a pipe's end is closed at once
 * pings=N           tell it WATCHDOG=1 N times
 * flood             tell it something as fast as it takes it, without end
 * spin              compute without end
 * threads=N         have N threads more, which wait
 * slow=MIB          hold a file in memory of that size: its exit takes long after it has closed stdout
 * orphans=N         N double forks that end at once
 * reaped            wait until nothing in /proc is a zombie
 * wait              until a signal ends it
 * exit=3, die=SEGV  the end
 * @1 ... @*         the words between are rank 1's only
 * +0 ... +*         they are for the first attempt only (+1: the one after the first restart, ...)
 *
 * What fails ends it with 1 and a line on stderr. It ignores SIGPIPE, as Python does. */

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define HOP_S 120 /* beyond any test: of a run that was broken off nothing hops on for ever */
#define MOST_STRAYS 64

static const char *rank, *attempt;
static int waited_for[MOST_STRAYS],
    n_waited_for; /* of a stray: what its rank reads until the stray said something */
static const char *how_to_end[NSIG]; /* EXIT, -SIGNAL, or NULL: continue */

static const struct {
    const char *name;
    int number;
} SIGNALS[] = {
    {"HUP", SIGHUP},       {"INT", SIGINT},   {"QUIT", SIGQUIT},   {"ILL", SIGILL},
    {"TRAP", SIGTRAP},     {"ABRT", SIGABRT}, {"BUS", SIGBUS},     {"FPE", SIGFPE},
    {"KILL", SIGKILL},     {"USR1", SIGUSR1}, {"SEGV", SIGSEGV},   {"USR2", SIGUSR2},
    {"PIPE", SIGPIPE},     {"ALRM", SIGALRM}, {"TERM", SIGTERM},   {"CHLD", SIGCHLD},
    {"CONT", SIGCONT},     {"STOP", SIGSTOP}, {"TSTP", SIGTSTP},   {"TTIN", SIGTTIN},
    {"TTOU", SIGTTOU},     {"URG", SIGURG},   {"XCPU", SIGXCPU},   {"XFSZ", SIGXFSZ},
    {"VTALRM", SIGVTALRM}, {"PROF", SIGPROF}, {"POLL", SIGPOLL},   {"IO", SIGIO},
    {"PWR", SIGPWR},       {"SYS", SIGSYS},   {"WINCH", SIGWINCH},
};

static _Noreturn void fail(const char *what) {
    dprintf(2, "play: %s: %s\n", what, strerror(errno));
    _exit(1);
}

static int check(int result, const char *what) {
    if (result < 0) fail(what);
    return result;
}

static const char *variable(const char *name) {
    const char *value = getenv(name);

    if (value == NULL) {
        errno = ENOENT;
        fail(name);
    }
    return value;
}

/* Also from handlers: write(2) alone, and snprintf of texts and a number, which allocates nothing. */
static void say(const char *format, ...) {
    char line[PATH_MAX + 256];
    va_list args;
    int length;

    va_start(args, format);
    length = vsnprintf(line, PATH_MAX, format, args);
    va_end(args);
    if (length < 0 || length >= PATH_MAX) {
        errno = ENAMETOOLONG;
        fail("say");
    }
    length += snprintf(line + length, 256, " %s %d\n", rank, (int)getpid());
    for (ssize_t done; (done = write(1, line, (size_t)length)) != length;)
        if (done >= 0 || errno != EINTR) fail("stdout");
    while (n_waited_for > 0) close(waited_for[--n_waited_for]);
}

static int number(const char *name) {
    if (strncmp(name, "RTMIN", 5) == 0) return SIGRTMIN + atoi(name + 5);
    if (strncmp(name, "RTMAX", 5) == 0) return SIGRTMAX + atoi(name + 5);
    for (size_t k = 0; k < sizeof SIGNALS / sizeof *SIGNALS; k++)
        if (strcmp(name, SIGNALS[k].name) == 0) return SIGNALS[k].number;
    errno = EINVAL;
    fail(name);
}

static void die(const char *name) {
    int signal_number = number(name);
    sigset_t set;

    setrlimit(RLIMIT_CORE, &(struct rlimit){0, 0});
    if (signal_number != SIGKILL) {
        signal(signal_number, SIG_DFL);
        sigemptyset(&set);
        sigaddset(&set, signal_number);
        sigprocmask(SIG_UNBLOCK, &set, NULL);
    }
    kill(getpid(), signal_number);
}

static const char *names[NSIG];

static void handle(int signal_number) {
    int saved = errno;
    const char *how = how_to_end[signal_number];

    say("got %s", names[signal_number]);
    if (how != NULL && *how == '-') die(how + 1);
    else if (how != NULL) _exit(atoi(how));
    errno = saved;
}

/* NAME, or NAME:HOW */
static void on(const char *argument) {
    char *name = strdup(argument), *how = strchr(name, ':');
    int signal_number;

    if (how != NULL) *how++ = '\0';
    signal_number = number(name);
    names[signal_number] = name;
    how_to_end[signal_number] = how;
    check(sigaction(signal_number, &(struct sigaction){.sa_handler = handle}, NULL), name);
}

static void wait_for_signals(void) {
    for (;;) pause();
}

static ssize_t read_some(int fd, void *to, size_t size) {
    ssize_t got;

    while ((got = read(fd, to, size)) < 0)
        if (errno != EINTR) fail("read");
    return got;
}

/* All that comes until the end of it; the first 63 bytes are kept. */
static void read_all(int fd, char text[64]) {
    char chunk[4096];
    size_t kept = 0;

    for (ssize_t got; (got = read_some(fd, chunk, sizeof chunk)) > 0;)
        for (ssize_t k = 0; k < got && kept < 63; k++) text[kept++] = chunk[k];
    text[kept] = '\0';
}

/* Byte by byte: what comes after the line is left for another read. */
static void read_line(void) {
    char line[PATH_MAX] = "", byte;
    size_t length = 0;

    while (read_some(0, &byte, 1) == 1 && byte != '\n')
        if (length < sizeof line - 64) line[length++] = byte;
    while (length > 0 && strchr(" \t\r", line[length - 1])) length--;
    line[length] = '\0';
    say("read %s", line + strspn(line, " \t\r"));
}

static void outlive(pid_t pid) {
    struct pollfd dead = {check((int)syscall(SYS_pidfd_open, pid, 0), "pidfd_open"), POLLIN, 0};

    while (poll(&dead, 1, -1) < 0)
        if (errno != EINTR) fail("poll");
    close(dead.fd);
}

static void rest(double seconds) {
    struct timespec left = {(time_t)seconds, (long)((seconds - (double)(time_t)seconds) * 1e9)};

    while (nanosleep(&left, &left) < 0)
        if (errno != EINTR) fail("nanosleep");
}

static void play(char **words);

static void do_daemon(char **words) {
    int ends[2];
    char text[64];

    check(pipe2(ends, O_CLOEXEC), "pipe");
    if (check(fork(), "fork") != 0) {
        close(ends[1]);
        while (wait(NULL) < 0)
            if (errno != EINTR) fail("wait");
        read_all(ends[0], text);
        close(ends[0]);
        return;
    }
    if (n_waited_for == MOST_STRAYS) abort();
    waited_for[n_waited_for++] = ends[1];
    close(ends[0]);
    setsid();
    if (check(fork(), "fork") != 0) _exit(0);
    play(words);
    _exit(0);
}

static void do_group(char **words) {
    if (check(fork(), "fork") == 0) {
        play(words);
        _exit(0);
    }
}

static void hop(const char *path) {
    struct timespec now;
    time_t end;

    clock_gettime(CLOCK_MONOTONIC, &now);
    for (end = now.tv_sec + HOP_S; now.tv_sec < end; clock_gettime(CLOCK_MONOTONIC, &now)) {
        if (check(fork(), "fork") != 0) _exit(0);
        setsid();
        if (*path) check(utimensat(AT_FDCWD, path, NULL, 0), path);
        rest(
            0.0005); /* a look at /proc takes longer; process 1 may reap late, and numbers of processes run out */
    }
}

static int connect_notify(void) {
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    const char *path = variable("NOTIFY_SOCKET");
    size_t length = strlen(path);
    int fd = check(socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0), "socket");

    if (length >= sizeof address.sun_path) {
        errno = ENAMETOOLONG;
        fail(path);
    }
    memcpy(address.sun_path, path, length);
    if (*path == '@') address.sun_path[0] = '\0';
    check(connect(fd, (struct sockaddr *)&address,
                  (socklen_t)(offsetof(struct sockaddr_un, sun_path) + length)),
          path);
    return fd;
}

static void notify(const char *message, long count) {
    int fd = connect_notify();
    char *text = strdup(message);

    for (char *at = text; (at = strchr(at, ';'));) *at = '\n';
    for (; count != 0; count -= count > 0)
        while (send(fd, text, strlen(text), 0) < 0)
            if (errno != EINTR) fail("send");
    free(text);
    close(fd);
}

static void notify_fd(void) {
    int ends[2], fd = connect_notify();
    union {
        struct cmsghdr header;
        char room[CMSG_SPACE(sizeof(int))];
    } control = {.header = {CMSG_LEN(sizeof(int)), SOL_SOCKET, SCM_RIGHTS}};
    struct iovec text = {(char[]){"BARRIER=1"}, 9};
    struct msghdr message = {.msg_iov = &text,
                             .msg_iovlen = 1,
                             .msg_control = &control,
                             .msg_controllen = sizeof control.room};

    check(pipe2(ends, O_CLOEXEC), "pipe");
    memcpy(CMSG_DATA(&control.header), &ends[0], sizeof(int));
    check((int)sendmsg(fd, &message, 0), "sendmsg");
    close(fd);
}

static void *wait_in_thread(void *unused) {
    wait_for_signals();
    return unused;
}

static void start_threads(long count) {
    pthread_attr_t small;
    pthread_t thread;

    pthread_attr_init(&small);
    pthread_attr_setstacksize(&small, 65536);
    for (; count > 0; count--)
        if ((errno = pthread_create(&thread, &small, wait_in_thread, NULL)) != 0)
            fail("pthread_create");
}

/* The kernel takes the file's pages back after it has closed all descriptors, and before it is a zombie. */
static void hold_memory(long mib) {
    int fd = check(memfd_create("slow", MFD_CLOEXEC), "memfd_create");

    while ((errno = posix_fallocate(fd, 0, (off_t)mib << 20)) != 0)
        if (errno != EINTR) fail("posix_fallocate");
}

/* How many processes /proc shows, or how many zombies. */
static int count_processes(int only_zombies) {
    DIR *proc = opendir("/proc");
    int found = 0;

    if (proc == NULL) fail("/proc");
    for (struct dirent *entry; (entry = readdir(proc)) != NULL;) {
        char path[64], stat[512], *end;
        ssize_t length;
        int fd;

        if (entry->d_name[0] < '0' || entry->d_name[0] > '9') continue;
        snprintf(path, sizeof path, "/proc/%.20s/stat", entry->d_name);
        fd = open(path, O_RDONLY | O_CLOEXEC);
        length = fd < 0 ? -1 : read(fd, stat, sizeof stat - 1);
        if (fd >= 0) close(fd);
        if (length <= 0) continue;
        stat[length] = '\0';
        end = strrchr(stat, ')');
        found += end != NULL && (!only_zombies || end[2] == 'Z');
    }
    closedir(proc);
    return found;
}

static int count_descriptors(pid_t pid) {
    char path[64];
    DIR *folder;
    int found = 0;

    snprintf(path, sizeof path, "/proc/%d/fd", (int)pid);
    folder = opendir(path);
    if (folder == NULL) fail(path);
    for (struct dirent *entry; (entry = readdir(folder)) != NULL;) found += entry->d_name[0] != '.';
    closedir(folder);
    return found;
}

static void rename_process(const char *name) {
    int fd = check(open("/proc/self/comm", O_WRONLY | O_CLOEXEC), "/proc/self/comm");

    check((int)write(fd, name, strlen(name)), "/proc/self/comm");
    close(fd);
}

static void ask(const char *thing) {
    char text[PATH_MAX - 64];

    if (strcmp(thing, "cwd") == 0)
        say("cwd %s", getcwd(text, sizeof text) != NULL ? text : (fail("getcwd"), ""));
    else if (strcmp(thing, "foreground") == 0)
        say("foreground %s", check(tcgetpgrp(0), "tcgetpgrp") == getpgrp() ? "True" : "False");
    else if (strcmp(thing, "parent") == 0) say("parent %d", (int)getppid());
    else if (strcmp(thing, "parents_descriptors") == 0)
        say("parents_descriptors %d", count_descriptors(getppid()));
    else if (strcmp(thing, "attempt") == 0)
        say("attempt %s/%s", variable("TORCHELASTIC_RESTART_COUNT"),
            variable("TORCHELASTIC_MAX_RESTARTS"));
    else if (strcmp(thing, "port") == 0) say("port %s", variable("MASTER_PORT"));
    else if (strcmp(thing, "mark") == 0) say("mark %s", variable("INFINI_RUN_ID"));
    else if (strcmp(thing, "pids") == 0) say("pids %d", count_processes(0));
    else {
        errno = EINVAL;
        fail(thing);
    }
}

static void step(const char *verb, const char *argument) {
    char text[64];

    if (strcmp(verb, "say") == 0) say("%s", argument);
    else if (strcmp(verb, "ask") == 0) ask(argument);
    else if (strcmp(verb, "ignore") == 0)
        check(signal(number(argument), SIG_IGN) == SIG_ERR ? -1 : 0, argument);
    else if (strcmp(verb, "tell") == 0 || strcmp(verb, "end") == 0) on(argument);
    else if (strcmp(verb, "hold") == 0) read_all(atoi(argument), text);
    else if (strcmp(verb, "after") == 0) {
        read_all(atoi(argument), text);
        outlive(atoi(text));
    } else if (strcmp(verb, "pause") == 0) rest(atof(argument));
    else if (strcmp(verb, "read") == 0 || strcmp(verb, "listen") == 0) read_line();
    else if (strcmp(verb, "name") == 0) rename_process(argument);
    else if (strcmp(verb, "hop") == 0) hop(argument);
    else if (strcmp(verb, "notify") == 0) notify(argument, 1);
    else if (strcmp(verb, "notify_fd") == 0) notify_fd();
    else if (strcmp(verb, "pings") == 0) notify("WATCHDOG=1", atol(argument));
    else if (strcmp(verb, "flood") == 0) notify("STATUS=flood", -1);
    else if (strcmp(verb, "spin") == 0)
        for (volatile unsigned n = 0;; n++) {
        }
    else if (strcmp(verb, "threads") == 0) start_threads(atol(argument));
    else if (strcmp(verb, "slow") == 0) hold_memory(atol(argument));
    else if (strcmp(verb, "orphans") == 0)
        for (long n = atol(argument); n > 0; n--) do_daemon((char *[]){NULL});
    else if (strcmp(verb, "reaped") == 0)
        while (count_processes(1) > 0) rest(0.001);
    else if (strcmp(verb, "wait") == 0) wait_for_signals();
    else if (strcmp(verb, "exit") == 0) _exit(atoi(argument));
    else if (strcmp(verb, "die") == 0) die(argument);
    else {
        errno = EINVAL;
        fail(verb);
    }
}

static int is_block(const char *word) {
    return strcmp(word, "daemon") == 0 || strcmp(word, "group") == 0;
}

/* Ends the words of a block at the `done` that belongs to it; returns what comes after. */
static char **take_block(char **words) {
    for (int depth = 1; *words != NULL; words++) {
        depth += is_block(*words) - (strcmp(*words, "done") == 0);
        if (depth == 0) {
            *words = NULL;
            return words + 1;
        }
    }
    errno = EINVAL;
    fail("no done");
}

static void play(char **words) {
    int is_mine = 1, is_now = 1;

    while (*words != NULL) {
        char *word = *words++, *argument = strchr(word, '=');

        if (*word == '@') is_mine = strcmp(word, "@*") == 0 || strcmp(word + 1, rank) == 0;
        else if (*word == '+') is_now = strcmp(word, "+*") == 0 || strcmp(word + 1, attempt) == 0;
        else if (is_block(word)) {
            char **inner = words;

            words = take_block(words);
            if (is_mine && is_now) (strcmp(word, "daemon") == 0 ? do_daemon : do_group)(inner);
        } else if (is_mine && is_now) {
            char *verb = argument == NULL ? word : strndup(word, (size_t)(argument - word));

            step(verb, argument == NULL ? "" : argument + 1);
        }
    }
}

int main(int argc, char **argv) {
    (void)argc;
    rank = getenv("RANK") != NULL ? getenv("RANK") : "-1";
    attempt =
        getenv("TORCHELASTIC_RESTART_COUNT") != NULL ? getenv("TORCHELASTIC_RESTART_COUNT") : "-1";
    signal(SIGPIPE, SIG_IGN);
    play(argv + 1);
    return 0;
}
