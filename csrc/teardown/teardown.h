/* teardown/teardown.h: what outlives the workers */
#ifndef TEARDOWN_TEARDOWN_H
#define TEARDOWN_TEARDOWN_H

#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>

struct ir_group;

#define GIVE_UP_MS 5000 /* how long we wait for what SIGKILL does not end */
#define STRAYS_NAMED 16  /* named one by one; more are only stopped */

/* ---- leftovers.c: one of them */
struct stray {
    pid_t pid;
    uint64_t start_ticks;
    int fd; /* its pidfd; -1: there is none */
};

/* fork_chase.c */
enum chased { CHASED_GONE, CHASED_OTHER, CHASED_KILLED };
pid_t chase_begin(void);
bool chase(pid_t last, enum chased (*kill_ours)(pid_t, void *), void *with);

/* leftovers.c */
int stray_foreign(struct ir_group *g);
void foreign_remove(struct ir_group *g, pid_t pid);
void stray_gone(struct ir_group *g, int fd);
bool stray_has_unwatched(struct ir_group *g);
void stray_close(struct ir_group *g);
bool stray_adopts(const struct ir_group *g);
uint32_t stray_count(struct ir_group *g);
uint32_t stray_signal(struct ir_group *g, int sig, bool report, bool hunts);
void stray_signal_groups(struct ir_group *g, int sig);
void stray_name_stuck(struct ir_group *g);

#endif
