/* start/main.c: bin/infini-run and bin/infini-job, which start the script beside them, PROGRAM.py.
 *
 * An installer writes its interpreter's path into the first line of PROGRAM.py. The kernel reads
 * no such line where the path has a space in it or more than 127 characters
 * (Documentation/admin-guide/binfmt-misc.rst, BINPRM_BUF_SIZE before Linux 5.1). So this program
 * reads the line, and starts a Python without site and its .pth files (-S), a twentieth of the
 * whole start. The script finds the package, or brings it. There is no libc in it: its start
 * takes longer than all of this (guard/freestanding_start.c). */
#include <errno.h>
#include <fcntl.h>
#include <linux/auxvec.h>
#include <linux/limits.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "sys/raw.h"

#define TAIL ".py"
#define PRINT(text) (void)raw(SYS_write, 2, (long)(text), sizeof(text) - 1, 0, 0)

void start_program(uintptr_t *stack);

/* The stack is as the kernel leaves it: argc, argv, NULL, variables, NULL (System V ABI). Below it is room for two
 * words more. */
#if defined(__x86_64__)
__asm__(".globl _start\n"
        ".type _start, @function\n"
        "_start:\n"
        "  mov %rsp, %rdi\n"
        "  and $-16, %rsp\n"
        "  sub $16, %rsp\n"
        "  call start_program\n");
#elif defined(__aarch64__)
__asm__(".globl _start\n"
        ".type _start, %function\n"
        "_start:\n"
        "  mov x0, sp\n"
        "  sub sp, sp, #16\n"
        "  bl start_program\n");
#else
#error "no entry for this processor"
#endif

struct auxiliary { /* getauxval(3) */
    uintptr_t type;
    const char *text;
};

/* The path of its exec. */
static const char *executed_path(const uintptr_t *variables) {
    while (*variables != 0) variables++;
    const struct auxiliary *entry = (const void *)(variables + 1);
    while (entry->type != AT_NULL && entry->type != AT_EXECFN) entry++;
    return entry->type == AT_EXECFN ? entry->text : "";
}

static bool append(char *path, size_t n) {
    for (size_t i = 0; i < sizeof TAIL; i++) path[n + i] = TAIL[i];
    return raw(SYS_faccessat, AT_FDCWD, (long)path, R_OK, 0, 0) == 0;
}

/* The path that started it, and TAIL (an installer may link to this file from where the script
 * is). Else its own path, links followed, and TAIL (a user may link to it). Returns its length;
 * 0: it is too long. */
static size_t find_script(char *path, const uintptr_t *variables) {
    const size_t size = PATH_MAX - sizeof TAIL;
    size_t n = 0;
    for (const char *name = executed_path(variables); n < size && name[n] != '\0'; n++)
        path[n] = name[n];
    if (n < size && append(path, n)) return n + sizeof TAIL - 1;
    long read = raw(SYS_readlinkat, AT_FDCWD, (long)"/proc/self/exe", (long)path, (long)size, 0);
    if (read > 0) n = (size_t)read; /* without /proc the path of its start stays */
    if (n < size) (void)append(path, n);
    return n < size ? n + sizeof TAIL - 1 : 0;
}

/* What is behind #! in the first line. Returns its length; 0: there is no such line. */
static size_t read_interpreter(const char *script, char *line, size_t size) {
    long fd = raw(SYS_openat, AT_FDCWD, (long)script, O_RDONLY | O_CLOEXEC, 0, 0);
    if (fd < 0) return 0;
    char mark[2] = {0};
    long n = raw(SYS_read, fd, (long)mark, sizeof mark, 0, 0);
    if (n == sizeof mark && mark[0] == '#' && mark[1] == '!')
        n = raw(SYS_read, fd, (long)line, (long)size, 0, 0);
    else n = 0;
    (void)raw(SYS_close, fd, 0, 0, 0, 0);
    for (long i = 0; i < n; i++) {
        if (line[i] != '\n') continue;
        line[i] = '\0';
        return (size_t)i;
    }
    return 0;
}

/* Else it is a shell or an env, which are for the kernel, and whose words are not a Python's. */
static bool is_python(const char *line, size_t length) {
    static const char name[] = "python";
    size_t at = length, same = 0;
    while (at > 0 && line[at - 1] != '/') at--;
    if (at == 0) return false;
    while (same < sizeof name - 1 && line[at + same] == name[same]) same++;
    for (size_t i = at; i < length; i++)
        if (line[i] == ' ' || line[i] == '\t') return false;
    return same == sizeof name - 1;
}

void start_program(uintptr_t *stack) {
    char script[PATH_MAX], line[PATH_MAX];
    uintptr_t *words = stack - 1, *argv = stack + 1, *variables = argv + stack[0] + 1;
    const size_t size = find_script(script, variables);
    if (stack[0] == 0 || size == 0) {
        PRINT("infini-run: its own path is too long\n");
        (void)raw(SYS_exit_group, 127, 0, 0, 0, 0);
    }
    size_t length = read_interpreter(script, line, sizeof line);
    if (is_python(line, length)) {
        uintptr_t argc = stack[0], self = argv[0];
        words[0] = (uintptr_t)line; /* LINE -S SCRIPT ARGUMENTS */
        words[1] = (uintptr_t) "-S";
        words[2] = (uintptr_t)script;
        (void)raw(SYS_execve, (long)line, (long)words, (long)variables, 0, 0);
        stack[0] = argc;
        argv[0] = self;
    }
    long r = raw(SYS_execve, (long)script, (long)argv, (long)variables, 0, 0);
    (void)raw(SYS_write, 2, (long)script, (long)size, 0, 0);
    if (r == -EACCES) {
        PRINT(" cannot be started: you may not execute it, or the Python in its first line\n");
        (void)raw(SYS_exit_group, 126, 0, 0, 0, 0);
    }
    PRINT(" cannot be started: it, or the Python in its first line, does not exist\n");
    (void)raw(SYS_exit_group, 127, 0, 0, 0, 0);
}
