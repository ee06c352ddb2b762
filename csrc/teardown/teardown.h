/* teardown/teardown.h: what outlives the workers */
#ifndef TEARDOWN_TEARDOWN_H
#define TEARDOWN_TEARDOWN_H

#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>

struct ir_group;
struct worker;

#define GIVE_UP_MS 5000 /* the longest wait for what SIGKILL does not end */
#define STRAYS_NAMED 16  /* named one by one; more only get a stop */

/* ---- leftovers.c: one of them */
struct stray {
    pid_t pid;
    uint64_t start_ticks;
    int fd; /* its pidfd; -1: there is none */
    uint32_t part; /* of which part it is (its first worker, from 1); 0: of none that is known */
};

/* fork_chase.c */
enum chased { CHASED_GONE, CHASED_OTHER, CHASED_KILLED };
pid_t chase_begin(void *with);
bool chase(pid_t last, pid_t (*newest_now)(void *), enum chased (*kill_ours)(pid_t, void *),
           void *with);

/* unseen.c */
struct processes;
bool child_is_foreign(const struct ir_group *g, pid_t pid);
bool child_is_worker(const struct ir_group *g, pid_t pid);
bool is_worker_group(const struct ir_group *g, pid_t group);
bool stray_adopts(const struct ir_group *g);
bool group_needs_leader(const struct ir_group *g, const struct worker *w);
void groups_release(struct ir_group *g);
void group_release(struct ir_group *g, struct worker *w);
bool group_signal_rest(const struct ir_group *g, const struct worker *w, int sig);
bool group_is_left(const struct ir_group *g, const struct worker *w);
uint32_t groups_signal(const struct ir_group *g, int sig, struct processes *ret);
void groups_living(const struct ir_group *g, const struct processes *groups, struct processes *ret);
int children_list(const struct ir_group *g, struct processes *ret);
void children_find(struct ir_group *g, struct processes *ret);
pid_t number_newest(void *group);

/* leftovers.c */
int stray_foreign(struct ir_group *g);
void foreign_remove(struct ir_group *g, pid_t pid);
void stray_gone(struct ir_group *g, int fd);
bool stray_has_unwatched(struct ir_group *g);
void stray_close(struct ir_group *g);
void stray_foresee(struct ir_group *g);
bool strays_are_trackers(struct ir_group *g);
uint32_t stray_count(struct ir_group *g);
uint32_t stray_signal(struct ir_group *g, int sig, bool report, bool hunts);
void stray_signal_groups(struct ir_group *g, int sig);
uint32_t stray_name_stuck(struct ir_group *g);
uint32_t stray_signal_part(struct ir_group *g, const uint32_t *workers, uint32_t n, const char *mark,
                           int sig);

#endif
