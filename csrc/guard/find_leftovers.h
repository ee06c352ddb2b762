/* guard/find_leftovers.h: the marks of a launch, and what its guard has killed of it. */
#ifndef GUARD_HUNT_H
#define GUARD_HUNT_H

#include "sys/sys.h"
#include "teardown/teardown.h"

#define ADOPTERS 64u
#define WORKERS_READ 16384u /* what a pipe holds of them */

struct launch {
    const char *mark; /* NAME=value, in the environment of all that it started */
    uint64_t since;   /* ticks since boot: nothing older is its */
    pid_t session;
    pid_t workers[WORKERS_READ];
    size_t n;
    pid_t host;  /* the launcher, where it lives and its orphans may go to an ancestor of its; 0 */
    pid_t adopters[ADOPTERS]; /* where its orphans are: with the guard */
    size_t adopters_n;
    struct processes killed;
    bool groups_only, found;
    bool unsure;             /* something of it may live that this cannot see the end of */
    bool awaits;             /* something that may become a guard */
    int64_t awaits_until_ns; /* 0: none seen */
};

bool end_launch(struct launch *launch);
void end_workers(struct launch *launch, int wait_ms);

#endif
