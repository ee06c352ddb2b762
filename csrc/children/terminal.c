/* children/terminal.c: the terminal's foreground and its modes.
 *
 * Workers have separate process groups. A single worker gets the terminal's foreground, as a
 * shell's job would, but only if the launcher has it: started in the background it takes
 * nothing. All signals are blocked here, so tcsetpgrp and tcsetattr from the background raise no
 * SIGTTOU. */
#include "group/group.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <unistd.h>

/* Worker 0 is the single one. The child gives itself the foreground, before its program runs. */
int tty_prepare(struct ir_group *g) {
    struct terminal *t = &g->terminal;
    if (t->fd >= 0 || !isatty(0)) return 0;
    int fd = fd_duplicate(0);
    if (fd < 0) return fd;
    t->fd = fd;
    t->has_owner = true;
    if (tty_is_ours(g)) t->has_modes = tcgetattr(fd, &t->modes) == 0;
    return 0;
}

/* Whatever stdin is: the terminal that programs find. */
int tty_open(void) {
    return fd_new(open("/dev/tty", O_RDWR | O_NONBLOCK | O_NOCTTY | O_CLOEXEC));
}

void tty_owner_started(struct ir_group *g, pid_t pid) {
    g->terminal.holder = pid;
    g->terminal.holder_index = 0;
}

bool tty_is_ours(const struct ir_group *g) {
    return g->terminal.fd >= 0 && tcgetpgrp(g->terminal.fd) == getpgrp();
}

bool tty_is_held(const struct ir_group *g) {
    return g->terminal.holder > 0 && tcgetpgrp(g->terminal.fd) == g->terminal.holder;
}

bool tty_give(struct ir_group *g, uint32_t index, pid_t group) {
    struct terminal *t = &g->terminal;
    t->has_modes = tcgetattr(t->fd, &t->modes) == 0;
    const bool given = tcsetpgrp(t->fd, group) == 0;
    t->holder = given ? group : 0;
    t->holder_index = index;
    return given;
}

/* Only from the holder, or a group that it made and that is gone: the foreground may be the
 * shell's again, or another job's. */
void tty_restore(struct ir_group *g) {
    if (g->terminal.holder <= 0) return;
    const pid_t front = tcgetpgrp(g->terminal.fd);
    if (front == g->terminal.holder || (front > 0 && kill(-front, 0) < 0 && errno == ESRCH))
        (void)tcsetpgrp(g->terminal.fd, getpgrp());
}

bool tty_has_modes_of(const struct ir_group *g, const struct termios *given) {
    struct termios now;
    return tcgetattr(g->terminal.fd, &now) == 0 && now.c_iflag == given->c_iflag &&
           now.c_oflag == given->c_oflag && now.c_cflag == given->c_cflag &&
           now.c_lflag == given->c_lflag && memcmp(now.c_cc, given->c_cc, sizeof now.c_cc) == 0;
}
